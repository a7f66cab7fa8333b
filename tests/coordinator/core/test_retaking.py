"""Layers that a busy node measured, and the time of their next measurement: only decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.deployments import new_record
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer
from edgeshard_coordinator.core.profiling.measuring import STAGE_CAME, restored
from edgeshard_coordinator.core.values.actions import SendCommand
from edgeshard_coordinator.core.values.events import (
    CommandAnswered,
    DeployRequested,
    HeartbeatsReceived,
    NodeDisconnected,
    ProfileReported,
)
from edgeshard_coordinator.core.values.measurements import Measurements, Reported, key_of
from edgeshard_coordinator.core.values.state import DeploymentRecord, ServedOperation, Timings

from edgeshard.domain.control.commands import (
    CommandResult,
    Heartbeat,
    MeasureCompute,
    ProbeLinks,
    ProfileReport,
)
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import AbortedError, InternalError
from edgeshard.domain.ids import Digest, Epoch, OperationId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import ComputeProfile, Effort
from tests.support.desk import Desk, node

TIMES = Timings()
BUSY = 0.3


class Site(Desk):
    """Two nodes with all links known; `a` is ordered to measure a model and is not always quiet."""

    def __init__(self, make_registration: Any, make_profile: Any, config: dict[str, Any]) -> None:
        super().__init__(make_registration, "ab")
        self.command = MeasureCompute(config, DType.FLOAT32, effort=Effort.QUICK, again=False)
        self.profile: ComputeProfile = make_profile(config, 1e-3, DType.FLOAT32)
        # The other node is known: the coordinator orders measurements by itself only for a busy
        # node.
        self.feed(ProfileReported(ProfileReport(node("b"), compute=(self.profile,)), self.now))
        self.wait(TIMES.probe_quiet_s)
        while self.sent:
            self.answer()
            self.wait(0.5)

    def beat(self, others_share: float) -> None:
        heard = Heartbeat(node("a"), "i1", (), 0, others_share=others_share)
        self.feed(HeartbeatsReceived((heard,), self.now))

    def measured(self, others_share: float, effort: Effort = Effort.FULL) -> SendCommand:
        """The oldest command is done, while other processes used `others_share` of the cores."""
        profile = replace(self.profile, others_share=others_share, effort=effort)
        self.feed(ProfileReported(ProfileReport(node("a"), compute=(profile,)), self.now))
        return self.answer()

    def measured_busy(self) -> None:
        """An operator's measurement that was disturbed."""
        self.ask("a", compute=self.command)
        self.measured(BUSY)
        while self.sent:
            self.answer()
        self.told.clear()

    def until_sent(self, limit_s: float = 10_000.0) -> float:
        """Seconds until a command is sent."""
        began = self.now
        while not self.sent and self.now < began + limit_s:
            self.wait(1.0)
        assert self.sent, "nothing was asked"
        return self.now - began


@pytest.fixture
def site(make_registration: Any, make_profile: Any, make_manifest: Any) -> Site:
    return Site(make_registration, make_profile, make_manifest().config)


def deploy(site: Site, make_manifest: Any, layers: str) -> None:
    spec = parse_spec(
        {"name": "tale", "model": "tiny", "source": layers[0], "concurrency": 1, "layers": layers}
    )
    placement = SimplePlacer().place(spec, make_manifest(), site.state.candidates())
    blank = DeploymentRecord("u1", spec, Digest("d" * 64), placement, Epoch(0))
    operation = ServedOperation(OperationId("op"), "f", b"")
    site.feed(
        DeployRequested(new_record(site.state, blank), site.state.version, operation, site.now)
    )


def test_a_quiet_node_is_measured_once(site: Site) -> None:
    site.ask("a", compute=site.command)
    site.measured(0.01)
    site.wait(10 * TIMES.retake_first_s)
    assert not site.sent and site.state.retakes == ()


def test_what_was_measured_beside_other_work_is_measured_again_when_the_node_is_quiet(
    site: Site,
) -> None:
    site.measured_busy()
    waited = site.until_sent()
    assert TIMES.retake_first_s <= waited < TIMES.retake_first_s + 5
    command = site.sent[0].command
    assert command == replace(site.command, again=True), "the kept profile would do no good"
    site.measured(0.0)
    assert site.state.retakes == () and not site.sent and not site.told, (
        "nobody asked, so nobody is told"
    )
    (known,) = site.state.measured[node("a")].profiles.values()
    assert known.value.others_share == 0.0
    site.wait(10 * TIMES.retake_limit_s / 60)
    assert not site.sent


def test_what_a_deployment_waited_for_is_measured_again_with_more_effort(site: Site) -> None:
    site.ask("a", compute=replace(site.command, effort=Effort.FIRST))
    site.measured(0.0, Effort.FIRST)
    while site.sent:
        site.answer()
    site.told.clear()
    waited = site.until_sent()
    assert TIMES.retake_first_s <= waited < TIMES.retake_first_s + 5
    assert site.sent[0].command == replace(site.command, effort=Effort.QUICK, again=True)
    site.measured(0.0, Effort.QUICK)
    assert site.state.retakes == () and not site.sent and not site.told
    site.wait(10 * TIMES.retake_limit_s / 60)
    assert not site.sent


def test_a_node_that_others_use_is_left_alone(site: Site) -> None:
    site.measured_busy()
    for _ in range(600):
        site.wait(1.0)
        site.beat(BUSY)
    assert not site.sent
    waited = site.until_sent()
    assert TIMES.retake_quiet_s <= waited < TIMES.retake_quiet_s + 5
    assert isinstance(site.sent[0].command, MeasureCompute)


def test_it_is_tried_less_and_less_and_then_no_more(site: Site) -> None:
    site.measured_busy()
    waits = []
    for _ in range(TIMES.retake_attempts):
        waits.append(site.until_sent())
        site.measured(BUSY)
    for attempt, waited in enumerate(waits):
        wanted = min(TIMES.retake_limit_s, TIMES.retake_first_s * 2**attempt)
        assert wanted <= waited < wanted + 5
    site.wait(2 * TIMES.retake_limit_s)
    assert not site.sent
    # A caller that repeats it starts again.
    site.measured_busy()
    site.until_sent()
    site.measured(0.0)
    assert site.state.retakes == ()


def test_a_failure_counts_and_is_not_repeated_at_once(site: Site) -> None:
    site.measured_busy()
    site.until_sent()
    site.answer(failure=InternalError("no room for one layer"))
    assert site.until_sent() >= 2 * TIMES.retake_first_s - 5
    site.measured(0.0)
    assert not site.told


@pytest.mark.parametrize("layers", ["a=0:12", "b=0:4,a=4:12"])
def test_no_node_is_measured_that_a_deployment_needs(
    site: Site, make_manifest: Any, layers: str
) -> None:
    site.measured_busy()
    deploy(site, make_manifest, layers)
    site.wait(10 * TIMES.retake_first_s)
    assert not any(isinstance(action.command, MeasureCompute) for action in site.sent)


def test_a_deployment_elsewhere_is_no_reason_to_wait(site: Site, make_manifest: Any) -> None:
    site.measured_busy()
    deploy(site, make_manifest, "b=0:12")
    site.sent.clear()
    site.wait(TIMES.retake_first_s + 5, active_requests=3)
    assert [(action.node_id, type(action.command)) for action in site.sent] == [
        (node("a"), MeasureCompute)
    ]


def test_a_stage_that_comes_costs_no_attempt(site: Site) -> None:
    site.measured_busy()
    for _ in range(2 * TIMES.retake_attempts):
        site.until_sent()
        site.answer(failure=AbortedError("a stage came to the node", reason=STAGE_CAME))
    (item,) = site.state.retakes
    assert item.attempts == 0


def test_what_an_operator_asks_meanwhile_comes_first_and_settles_it(site: Site) -> None:
    site.measured_busy()
    site.ask("b", compute=site.command, uid="other")
    site.wait(5 * TIMES.retake_first_s)
    assert [action.node_id for action in site.sent] == [node("b")], "one thing after the other"
    site.answer()
    while site.sent and isinstance(site.sent[0].command, ProbeLinks):
        site.answer()
    site.ask("a", compute=site.command, uid="third")
    site.measured(0.0)
    site.wait(5 * TIMES.retake_first_s)
    assert not site.sent and site.state.retakes == ()


def test_a_node_that_went_away_is_measured_again_once_it_is_back(site: Site) -> None:
    site.measured_busy()
    site.until_sent()
    site.feed(NodeDisconnected(node("a"), 1, site.now))
    late = site.sent.pop(0)
    site.wait(5 * TIMES.retake_first_s)
    assert not site.sent
    site.connect("a")
    site.feed(CommandAnswered(node("a"), CommandResult(late.operation_id), site.now))
    while not site.sent or isinstance(site.sent[0].command, ProbeLinks):
        site.answer() if site.sent else site.wait(1.0)
    site.measured(0.0)
    assert site.state.retakes == ()


def test_a_restarted_coordinator_still_has_it_measured_again(site: Site, make_profile: Any) -> None:
    busy = replace(site.profile, others_share=BUSY)
    other = replace(
        make_profile({**site.command.config, "vocab_size": 99}, 1e-3, DType.FLOAT32),
        others_share=BUSY,
    )
    known = Measurements({key_of(profile): Reported(profile, 0.0) for profile in (busy, other)})
    state = replace(site.state, measured={**site.state.measured, node("a"): known})
    configs = {Digest("d" * 64): site.command.config}
    (item,) = restored(state, configs, site.now).retakes
    assert (item.node_id, item.command) == (
        node("a"),
        replace(site.command, again=True, effort=busy.effort),
    )
    first = replace(site.profile, effort=Effort.FIRST)
    hurried = replace(
        state, measured={node("a"): Measurements({key_of(first): Reported(first, 0.0)})}
    )
    (item,) = restored(hurried, configs, site.now).retakes
    assert item.command == replace(site.command, again=True, effort=Effort.QUICK)
    quiet = replace(
        state,
        measured={node("a"): Measurements({key_of(site.profile): Reported(site.profile, 0.0)})},
    )
    assert restored(quiet, configs, site.now).retakes == ()
