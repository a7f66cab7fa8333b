"""Missing measurements of a node, and layers that are measured automatically: only decisions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.deployments import new_record
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer
from edgeshard_coordinator.core.profiling.measuring import REQUESTS_RAN, STAGE_CAME, restored
from edgeshard_coordinator.core.profiling.missing_profiles import Unknown
from edgeshard_coordinator.core.values.actions import SendCommand
from edgeshard_coordinator.core.values.events import (
    CommandAnswered,
    DeployRequested,
    HeartbeatsReceived,
    ModelDeleted,
    NodeDisconnected,
    NodeRemoved,
    ProfileReported,
)
from edgeshard_coordinator.core.values.state import DeploymentRecord, ServedOperation, Timings

from edgeshard.domain.control.commands import (
    CommandResult,
    Heartbeat,
    MeasureCompute,
    ProbeLinks,
    ProfileReport,
)
from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.errors import AbortedError, InternalError
from edgeshard.domain.ids import Digest, Epoch, OperationId
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.profile import ComputeProfile, Effort, config_hash
from tests.support.desk import Desk, node

TIMES = Timings()
INT8 = Quantisation.parse("int8")


class Site(Desk):
    """Nodes with all links known."""

    def __init__(
        self, make_registration: Any, make_profile: Any, manifest: Any, names: str = "ab"
    ) -> None:
        super().__init__(make_registration, names)
        self.make_profile = make_profile
        self.manifest = manifest
        self.config = manifest.config
        self.follow()

    def profile(self, **changes: Any) -> ComputeProfile:
        made: ComputeProfile = self.make_profile(self.config, 1e-3, DType.FLOAT32)
        return replace(made, **changes)

    def command(self, **changes: Any) -> MeasureCompute:
        return replace(
            MeasureCompute(self.config, DType.FLOAT32, effort=Effort.FULL, again=False), **changes
        )

    def measured(self, **changes: Any) -> SendCommand:
        """The oldest command is done, and its node has reported the profile that was asked for."""
        command = self.sent[0].command
        assert isinstance(command, MeasureCompute)
        made = self.profile(
            dtype=command.dtype, quantisation=command.quantisation, effort=command.effort
        )
        self.feed(
            ProfileReported(
                ProfileReport(self.sent[0].node_id, compute=(replace(made, **changes),)), self.now
            )
        )
        return self.answer()

    def by_operator(self, *names: str, **changes: Any) -> None:
        """An operator has these nodes measured."""
        self.ask(*names, compute=self.command(**changes))
        while self.sent:
            self.measured() if isinstance(self.sent[0].command, MeasureCompute) else self.answer()
        self.told.clear()

    def follow(self, seconds: float = 100.0) -> list[tuple[str, str]]:
        """The commands sent in that time, each answered half a second later."""
        seen, end = [], self.now + seconds
        while self.now < end:
            self.wait(0.5)
            assert len(self.sent) <= 1, "one node at a time"
            if self.sent:
                seen += self.under_way()
                self.measured() if isinstance(
                    self.sent[0].command, MeasureCompute
                ) else self.answer()
        return seen

    def until_sent(self, limit_s: float = 10_000.0) -> float:
        """Seconds until a command is sent."""
        began = self.now
        while not self.sent and self.now < began + limit_s:
            self.wait(1.0)
        assert self.sent, "nothing was asked"
        return self.now - began

    def deploy(self, ready: bool = True, **changes: Any) -> None:
        values: dict[str, Any] = {
            "name": "tale",
            "model": "tiny",
            "source": "a",
            "concurrency": 1,
            "layers": "a=0:12",
        }
        spec = parse_spec(values | {"dtype": "float32"} | changes)
        placement = SimplePlacer().place(spec, self.manifest, self.state.candidates())
        blank = DeploymentRecord("u1", spec, Digest("d" * 64), placement, Epoch(0))
        operation = ServedOperation(OperationId("op"), "f", b"")
        record = new_record(self.state, blank)
        self.feed(DeployRequested(record, self.state.version, operation, self.now, self.config))
        if ready:  # as the disk, the nodes and the head would have it
            known = self.state.deployments[record.name]
            done = tuple(replace(progress, sent_on=1, done=True) for progress in known.prepared)
            service: dict[str, Any] = {
                "attachment": 1,
                "ever_ready": True,
                "activated": replace(known.activated, sent_on=1, done=True),
            }
            saved: dict[str, Any] = {
                "saving": known.revision,
                "saved": known.revision,
                "saved_epoch": known.epoch,
                "operations": (),
            }
            known = replace(
                known, phase=DeploymentPhase.READY, deadline=None, prepared=done, **service, **saved
            )
            self.state = replace(self.state, deployments={record.name: known})
            self.sent.clear()

    def unknown(self, name: str) -> tuple[list[MeasureCompute], list[str]]:
        unknown, known = Unknown(self.state), self.state.nodes[node(name)]
        links = unknown.links(known)
        assert unknown.link_count(known) == len(links)
        return unknown.profiles(known), sorted(node_id[-1] for node_id in links)


@pytest.fixture
def site(make_registration: Any, make_profile: Any, make_manifest: Any) -> Site:
    return Site(make_registration, make_profile, make_manifest())


@pytest.fixture
def measured_site(site: Site) -> Site:
    """One whose nodes an operator had measured."""
    site.by_operator("a", "b")
    return site


def test_nothing_is_wanted_where_nobody_measured_or_deployed(site: Site) -> None:
    assert site.follow() == [] and site.unknown("a") == ([], [])


def test_a_node_that_joins_is_measured_after_its_links(measured_site: Site) -> None:
    site = measured_site
    site.connect("c")
    assert site.unknown("c") == ([site.command()], ["a", "b"]) and site.unknown("a") == ([], ["c"])
    site.wait(TIMES.probe_quiet_s - 0.5)
    assert not site.sent, "the site has only just changed"
    asked = site.follow()
    assert sorted(asked[:3]) == [(name, "ProbeLinks") for name in "abc"] and asked[3:] == [
        ("c", "MeasureCompute")
    ]
    assert site.unknown("c") == site.unknown("a") == ([], []) and not site.told, (
        "nobody asked, so nobody is told"
    )
    assert site.follow(1_000.0) == []


def test_every_sort_of_weights_that_another_node_was_measured_for_is_measured(
    measured_site: Site,
) -> None:
    site = measured_site
    site.by_operator("a", quantisation=INT8, effort=Effort.QUICK)
    asked = []
    site.until_sent()
    asked.append(site.sent[0].command)
    site.measured()
    site.connect("c")
    while site.until_sent() < 100.0:
        if isinstance(site.sent[0].command, ProbeLinks):
            site.answer()
            continue
        asked.append(site.sent[0].command)
        site.measured()
        if len(asked) == 3:
            break
    quick = site.command(quantisation=INT8, effort=Effort.QUICK)
    assert asked == [quick, site.command(), quick], "as exactly as the other nodes were"


def test_after_a_first_deployment_others_are_measured_quickly(measured_site: Site) -> None:
    site = measured_site
    site.by_operator("a", quantisation=INT8, effort=Effort.FIRST)
    assert site.unknown("b")[0] == [site.command(quantisation=INT8, effort=Effort.QUICK)]


@pytest.mark.parametrize("name", "ab")
def test_one_measured_in_full_has_the_others_follow_in_full(measured_site: Site, name: str) -> None:
    site = measured_site
    site.by_operator(name, effort=Effort.QUICK, again=True)
    site.connect("c")
    assert site.unknown("c")[0] == [site.command()], "the other one was measured in full"


def test_small_integers_are_not_asked_of_an_accelerator(
    measured_site: Site, make_facts: Any
) -> None:
    site = measured_site
    site.by_operator("a", quantisation=INT8)
    site.connect("c", facts=replace(make_facts(), kind="cuda"))
    assert site.unknown("c")[0] == [site.command()]


def test_running_requests_come_first(measured_site: Site) -> None:
    site = measured_site
    site.connect("c")
    for _ in range(20):
        site.wait(TIMES.probe_quiet_s, active_requests=1)
    assert not site.sent
    site.wait(TIMES.probe_quiet_s - 0.5)
    assert not site.sent
    assert site.follow()[-1] == ("c", "MeasureCompute")


def test_a_deployment_under_way_comes_first(measured_site: Site) -> None:
    site = measured_site
    site.connect("c")
    site.deploy(ready=False)
    site.wait(100.0)
    assert not any(isinstance(action.command, MeasureCompute | ProbeLinks) for action in site.sent)


def test_the_model_of_a_deployment_is_wanted_and_measured_quickly(site: Site) -> None:
    site.deploy(quantisation={"b": "int8"})
    wanted = site.command(effort=Effort.QUICK)
    assert site.unknown("a") == ([wanted], [])
    site.until_sent(TIMES.probe_quiet_s)
    (action,) = site.sent
    assert (action.node_id, action.command) == (node("b"), replace(wanted, quantisation=INT8)), (
        "a serves"
    )
    site.measured()
    assert [name for name, _ in site.follow()] == ["a", "b", "a"], (
        "b comes first whenever it lacks something"
    )


def test_a_node_that_a_deployment_excludes_is_not_measured_for_it(site: Site) -> None:
    site.deploy(exclude=["b"])
    assert site.unknown("b") == ([], []) and site.follow()[0] == ("a", "MeasureCompute")


@pytest.mark.parametrize("phase", [DeploymentPhase.FAILED, DeploymentPhase.DELETING])
def test_what_has_failed_or_is_being_deleted_wants_nothing(
    site: Site, phase: DeploymentPhase
) -> None:
    site.deploy()
    (record,) = site.state.deployments.values()
    site.state = replace(site.state, deployments={record.name: replace(record, phase=phase)})
    assert site.unknown("b") == ([], [])


def without_profiles(site: Site, *names: str) -> None:
    kept = {node(name): replace(site.state.measured[node(name)], profiles={}) for name in names}
    site.state = replace(site.state, measured={**site.state.measured, **kept})


def test_nodes_that_serve_are_measured_after_others_and_while_no_request_runs(
    measured_site: Site,
) -> None:
    site = measured_site
    site.connect("c")
    site.follow(TIMES.probe_quiet_s + 10.0)
    without_profiles(site, "a", "c")
    site.deploy(layers="a=0:12")
    site.wait(TIMES.probe_quiet_s + 10.0, active_requests=1)
    assert not site.sent
    assert [name for name, _ in site.follow()] == ["c", "a"]


@pytest.mark.parametrize(
    "figures",
    [
        {"beside_stages": True},
        {"effort": Effort.FIRST},
        {"beside_stages": True, "effort": Effort.FIRST},
    ],
)
def test_what_stages_or_haste_made_doubtful_is_measured_again_when_the_node_does_not_serve(
    measured_site: Site, figures: dict[str, Any]
) -> None:
    site = measured_site
    without_profiles(site, "a")
    site.deploy(layers="a=0:12")
    site.until_sent()
    site.measured(**figures)
    site.wait(5 * TIMES.retake_first_s)
    assert site.unknown("a")[0] == [] and not site.sent, "no better can come of it"
    site.state = replace(site.state, deployments={})
    site.wait(1.0)
    assert [(sent.node_id, sent.command) for sent in site.sent] == [
        (node("a"), site.command(again=True))
    ]
    site.measured()
    assert site.state.retakes == ()


def test_what_was_measured_on_a_busy_node_that_serves_is_taken_again_there_when_the_site_is_quiet(
    measured_site: Site,
) -> None:
    site = measured_site
    without_profiles(site, "a")
    site.deploy(layers="a=0:12")
    site.until_sent()
    site.measured(beside_stages=True, others_share=0.3)
    site.wait(5 * TIMES.retake_first_s, active_requests=1)
    assert not site.sent
    assert site.until_sent() >= TIMES.probe_quiet_s - 1
    site.measured(beside_stages=True)
    (item,) = site.state.retakes
    assert item.attempts == 0, "those on the node alone are others"
    site.wait(5 * TIMES.retake_first_s)
    assert not site.sent


def test_a_busy_node_that_does_not_serve_is_measured_again_first(measured_site: Site) -> None:
    site = measured_site
    site.deploy(layers="a=0:12")
    for name in "ab":
        site.ask(name, compute=site.command(again=True))
        site.measured(others_share=0.3)
        while site.sent:
            site.answer()
    assert [item.node_id for item in site.state.retakes] == [node("a"), node("b")]
    site.wait(TIMES.retake_first_s + TIMES.retake_quiet_s)
    assert site.under_way() == [("b", "MeasureCompute")]


def test_one_that_others_use_is_measured_and_again_when_they_leave_it_alone(
    measured_site: Site,
) -> None:
    site = measured_site
    site.connect("c")
    while not (site.sent and isinstance(site.sent[0].command, MeasureCompute)):
        site.answer() if site.sent else site.wait(0.5)
        site.feed(
            HeartbeatsReceived((Heartbeat(node("c"), "i1", (), 0, others_share=0.3),), site.now)
        )
    site.measured(others_share=0.3)
    assert site.unknown("c") == ([], [])
    assert site.until_sent() >= TIMES.retake_first_s - 5
    assert site.sent[0].command == site.command(again=True)
    site.measured(others_share=0.0)
    assert site.state.retakes == () and site.follow(1_000.0) == []


def joined(site: Site) -> None:
    """A third node joins, and its links are measured."""
    site.connect("c")
    while not (site.sent and isinstance(site.sent[0].command, MeasureCompute)):
        site.answer() if site.sent else site.wait(0.5)


def test_one_that_fails_is_asked_less_and_less_and_then_no_more_until_it_restarts(
    measured_site: Site,
) -> None:
    site, times = measured_site, []
    joined(site)
    for _ in range(TIMES.retake_attempts):
        site.until_sent()
        times.append(site.now)
        site.answer(failure=InternalError("no room for one layer"))
    for attempt, (sooner, later) in enumerate(pairwise(times)):
        wanted = min(TIMES.retake_limit_s, TIMES.retake_first_s * 2**attempt)
        assert wanted <= later - sooner < wanted + 5
    site.wait(3 * TIMES.retake_limit_s)
    assert not site.sent and site.unknown("c")[0], "still unknown, and said to be"
    site.connect("c", incarnation="i2")
    site.wait(TIMES.probe_quiet_s)
    assert site.under_way() == [("c", "MeasureCompute")] and not site.told


def test_a_node_that_fails_holds_up_no_other(measured_site: Site) -> None:
    site = measured_site
    joined(site)
    site.answer(failure=InternalError("no room for one layer"))
    site.connect("d")
    assert ("d", "MeasureCompute") in site.follow(20.0)


@pytest.mark.parametrize("reason", [STAGE_CAME, REQUESTS_RAN])
def test_one_that_is_broken_off_costs_no_attempt(measured_site: Site, reason: str) -> None:
    site = measured_site
    joined(site)
    for _ in range(2 * TIMES.retake_attempts):
        site.until_sent()
        site.answer(failure=AbortedError("it was broken off", reason=reason))
    site.until_sent()
    site.measured()
    assert site.state.profile_tries == {}


def test_what_an_operator_has_measured_meanwhile_is_not_asked_again(measured_site: Site) -> None:
    site = measured_site
    joined(site)
    site.answer(failure=InternalError("no room for one layer"))
    site.by_operator("c")
    assert site.state.profile_tries == {} and site.follow(1_000.0) == []


def test_a_node_that_went_away_meanwhile_is_asked_once_it_is_back(measured_site: Site) -> None:
    site = measured_site
    joined(site)
    site.feed(NodeDisconnected(node("c"), 3, site.now))
    late = site.sent.pop()
    assert site.unknown("a") == ([], []), "c is no node to send to now"
    site.wait(2 * TIMES.retake_first_s)
    assert not site.sent and not site.state.jobs
    site.connect("c")
    site.feed(CommandAnswered(node("c"), CommandResult(late.operation_id), site.now))
    assert site.follow() == [("c", "MeasureCompute")]


def test_a_starting_node_is_not_measured_until_it_has_started(measured_site: Site) -> None:
    site = measured_site
    site.connect("c", starting=True)
    assert site.follow() == [] and site.unknown("a") == ([], [])


def test_a_node_that_left_leaves_nothing(measured_site: Site) -> None:
    site = measured_site
    joined(site)
    site.answer(failure=InternalError("no room for one layer"))
    site.feed(NodeRemoved(node("c"), site.now))
    assert site.state.profile_tries == {} and site.follow() == []


def test_a_model_that_left_the_store_is_not_measured_any_more(measured_site: Site) -> None:
    site = measured_site
    site.feed(ModelDeleted(config_hash(site.config), site.now))
    site.connect("c")
    assert site.unknown("c")[0] == [] and ("c", "MeasureCompute") not in site.follow()


def test_a_restarted_coordinator_wants_what_it_wanted(measured_site: Site) -> None:
    site, digest = measured_site, Digest("d" * 64)
    site.deploy(dtype="bfloat16", layers="a=0:12")
    fresh = replace(site.state, configs={}, jobs=(), profile_tries={})
    (record,) = fresh.deployments.values()
    fresh = replace(fresh, deployments={record.name: replace(record, shape="")})
    other = {**site.config, "vocab_size": 99}
    site.state = restored(fresh, {digest: site.config, Digest("e" * 64): other}, site.now)
    assert list(site.state.configs) == [config_hash(site.config)], (
        "what is only in the store is not wanted"
    )
    assert site.unknown("b")[0] == [site.command(dtype=DType.BFLOAT16, effort=Effort.QUICK)]
    site.connect("c")
    assert [command.dtype for command in site.unknown("c")[0]] == [DType.BFLOAT16, DType.FLOAT32]
    site.state = restored(site.state, {}, site.now)
    assert site.unknown("c") == ([], ["a", "b"]), "nobody knows the config"
