"""The measurements that nodes are ordered to take, and their times: only decisions, without nodes
or clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.deployments import new_record
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer
from edgeshard_coordinator.core.profiling.measuring import PEERS_AT_ONCE, settle
from edgeshard_coordinator.core.values.events import (
    CommandAnswered,
    DeployRequested,
    NodeDisconnected,
    NodeRegistered,
    ProfileReported,
)
from edgeshard_coordinator.core.values.jobs import Measured
from edgeshard_coordinator.core.values.measurements import key_of
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    KnownNode,
    ServedOperation,
    Timings,
)

from edgeshard.domain.control.commands import CommandResult, ProfileReport
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import DeadlineError, InternalError, NotFoundError, UnavailableError
from edgeshard.domain.ids import Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import MeasuredLink
from tests.support.desk import LINK, Desk, node

QUIET_S = Timings().probe_quiet_s


@pytest.fixture
def desk(make_registration: Any) -> Any:
    return lambda names="abc": Desk(make_registration, names)


def test_links_are_measured_by_themselves_one_node_at_a_time(desk: Any) -> None:
    site = desk()
    site.wait(QUIET_S - 0.5)
    assert not site.sent, "the site has only just begun"
    site.wait(1.0)
    seen = []
    while site.sent:
        assert len(site.sent) == 1
        action = site.answer()
        seen.append((action.node_id, [peer.name for peer in action.command.peers]))
        site.wait(0.5)
    assert seen == [("id-a", ["b", "c"]), ("id-b", ["a", "c"]), ("id-c", ["a", "b"])]
    site.wait(60.0)
    assert not site.sent and site.links() == 6 and not site.told
    assert site.state.measured[node("a")].saved and site.saved[-1].node_id == node("c")


def test_a_new_node_is_measured_from_and_to(desk: Any) -> None:
    site = desk("ab")
    site.wait(QUIET_S)
    while site.sent:
        site.answer()
        site.wait(0.5)
    site.connect("c")
    site.wait(QUIET_S)
    asked = []
    while site.sent:
        action = site.answer()
        asked += [(action.node_id, peer.node_id) for peer in action.command.peers]
        site.wait(0.5)
    assert sorted(asked) == [(node(x), node(y)) for x, y in ("ac", "bc", "ca", "cb")], (
        "and nothing twice"
    )


def test_many_peers_come_in_batches(desk: Any) -> None:
    site = desk("abcdefgh")
    site.wait(QUIET_S)
    for _ in range(16):
        assert len(site.answer().command.peers) <= PEERS_AT_ONCE
        site.wait(0.5)
    assert site.links() == 56 and not site.sent


def test_requests_and_deployments_come_first(desk: Any, make_manifest: Any) -> None:
    site = desk()
    site.wait(60.0, active_requests=1)
    assert not site.sent, "somebody is being served"
    layers = "a=0:4,b=4:8,c=8:12"
    spec = parse_spec(
        {"name": "tale", "model": "tiny", "source": "a", "concurrency": 1, "layers": layers}
    )
    placement = SimplePlacer().place(spec, make_manifest(), site.state.candidates())
    blank = DeploymentRecord("u1", spec, Digest("d" * 64), placement, Epoch(0))
    operation = ServedOperation(OperationId("op"), "f", b"")
    site.feed(
        DeployRequested(new_record(site.state, blank), site.state.version, operation, site.now)
    )
    site.wait(60.0)
    assert not site.sent, "a deployment is being loaded"
    site.feed(NodeDisconnected(node("b"), 2, site.now))
    site.wait(QUIET_S)
    assert site.under_way() == [("a", "ReleaseStage"), ("c", "ReleaseStage"), ("a", "ProbeLinks")]


def test_a_link_that_gives_nothing_is_tried_less_and_less_and_then_no_more(desk: Any) -> None:
    site = desk("ab")
    timings = site.state.timings
    times: dict[str, list[float]] = {"a": [], "b": []}
    for _ in range(40_000):
        if site.sent:
            times[site.answer(reached=False).node_id[-1]].append(site.now)
        site.wait(0.25)
    for tried in times.values():
        assert len(tried) == timings.probe_attempts
        gaps = [later - sooner for sooner, later in pairwise(tried)]
        for attempt, gap in enumerate(gaps):
            wanted = min(timings.probe_retry_limit_s, timings.probe_retry_first_s * 2**attempt)
            assert wanted <= gap < wanted + 5.0
    site.connect("b", incarnation="i2")
    site.wait(QUIET_S)
    assert site.under_way() == [("a", "ProbeLinks")], "b is another process now"
    site.answer()
    site.wait(0.5)
    assert site.under_way() == [("b", "ProbeLinks")]


def test_a_probe_that_fails_counts_as_tried(desk: Any) -> None:
    site = desk("ab")
    site.wait(QUIET_S)
    site.answer(failure=InternalError("the node cannot"))
    site.wait(1.0)
    assert site.under_way() == [("b", "ProbeLinks")] and not site.told
    site.answer()
    site.wait(5.0)
    assert not site.sent
    site.wait(6.0)
    assert site.under_way() == [("a", "ProbeLinks")]


def test_what_an_operator_asks_for_goes_layers_first_and_links_one_by_one(desk: Any) -> None:
    site = desk()
    site.ask("a", "b")
    assert site.under_way() == [("a", "MeasureCompute"), ("b", "MeasureCompute")], (
        "each node has its own cores"
    )
    site.answer()
    assert site.under_way() == [("b", "MeasureCompute")], "a probe would disturb it"
    site.ask("c", uid="other")
    assert site.under_way() == [("b", "MeasureCompute"), ("c", "MeasureCompute")]
    site.answer()
    site.answer()
    assert site.under_way() == [("a", "ProbeLinks")]
    site.ask("c", uid="third")
    assert site.under_way() == [("a", "ProbeLinks")], "and it would disturb the probe"
    site.answer()
    assert site.told == [Measured("call", node("a"))]
    while site.sent:
        assert len(site.sent) == 1
        site.answer()
    assert [(item.uid, item.node_id, item.failure) for item in site.told[1:]] == [
        ("call", node("b"), None),
        ("other", node("c"), None),
        ("third", node("c"), None),
    ]
    assert site.links() == 6


def test_known_links_are_measured_again_only_on_demand(desk: Any) -> None:
    site = desk("ab")
    site.ask("a", "b", compute=None, every=True)
    while site.sent:
        site.answer()
    site.told.clear()
    site.ask("a", uid="again")
    site.answer()
    assert not site.sent and site.told == [Measured("again", node("a"))]
    site.ask("a", uid="links", compute=None, every=True)
    assert [peer.name for peer in site.answer().command.peers] == ["b"]
    assert site.told[-1] == Measured("links", node("a"))


@pytest.mark.parametrize("known", [False, True])
def test_links_that_a_probe_did_not_bring_are_named(desk: Any, known: bool) -> None:
    site = desk()
    if known:
        links = tuple(MeasuredLink(node("a"), node(name), LINK) for name in "bc")
        site.feed(ProfileReported(ProfileReport(node("a"), links=links), site.now))
        site.now += 5
    site.ask("a", compute=None, every=True)
    only = MeasuredLink(node("a"), node("b"), LINK)
    site.feed(ProfileReported(ProfileReport(node("a"), links=(only,)), site.now))
    site.answer(reached=False)
    assert site.told == [Measured("call", node("a"), missed=(NodeName("c"),))], (
        "what was known before is no answer"
    )


class Counted(dict[NodeId, KnownNode]):
    """Nodes, and how often one was looked at."""

    looks = 0

    def __iter__(self) -> Iterator[NodeId]:
        for node_id in super().__iter__():
            self.looks += 1
            yield node_id


def test_waiting_jobs_cost_no_look_at_every_node(desk: Any) -> None:
    site = desk("abcdefghijklmnopqrstuvwxyz")
    site.ask(*"abcdefghijklmnopqrstuvwxyz", compute=None, every=True)
    nodes = Counted(site.state.nodes)
    assert settle(replace(site.state, nodes=nodes), site.now).jobs == site.state.jobs
    assert nodes.looks <= 2 * len(nodes), (
        "each of the 25 that wait asked for the first node it may probe, or the second"
    )


def test_a_failure_ends_one_node_and_leaves_the_others(desk: Any) -> None:
    site = desk()
    site.ask("a", "b")
    why = InternalError("no room for one layer")
    site.answer(failure=why)
    assert site.told == [Measured("call", node("a"), why)]
    site.answer()
    site.answer()
    assert site.told[1:] == [Measured("call", node("b"))]


def test_a_lost_node_ends_its_part(desk: Any) -> None:
    site = desk()
    site.ask("a", "b")
    site.feed(NodeDisconnected(node("a"), 1, site.now))
    assert [(item.node_id, type(item.failure)) for item in site.told] == [
        (node("a"), UnavailableError)
    ]
    late = CommandResult(site.sent[0].operation_id)
    site.feed(CommandAnswered(node("a"), late, site.now))
    site.connect("a")
    site.feed(CommandAnswered(node("a"), late, site.now))
    assert len(site.told) == 1 and site.under_way()[1:] == [("b", "MeasureCompute")]


def test_a_stream_that_opens_again_ends_what_was_asked_over_the_old_one(desk: Any) -> None:
    site = desk()
    site.ask("a")
    site.connect("a")
    assert isinstance(site.told[0].failure, UnavailableError)


def test_a_node_that_never_answers_does_not_hold_up_the_site(desk: Any) -> None:
    site = desk("ab")
    site.wait(QUIET_S)
    assert site.under_way() == [("a", "ProbeLinks")]
    site.wait(site.state.timings.probe_timeout_s + 0.5)
    assert site.under_way() == [("a", "ProbeLinks"), ("b", "ProbeLinks")]
    site.ask("b")
    site.sent.pop(0)
    site.answer()
    site.wait(site.state.timings.measure_timeout_s)
    assert isinstance(site.told[0].failure, DeadlineError)


def test_nodes_that_are_away_are_not_asked(desk: Any) -> None:
    site = desk("ab")
    site.feed(NodeDisconnected(node("b"), 2, site.now))
    before = site.state
    with pytest.raises(UnavailableError) as info:
        site.ask("a", "b")
    assert info.value.field == "nodes" and "node b" in info.value.message
    assert site.state is before and not site.sent


def test_a_report_is_kept_by_model_dtype_and_receiver(
    desk: Any, make_profile: Any, make_manifest: Any
) -> None:
    site, config = desk(), make_manifest().config
    first = make_profile(config, 1e-3)
    for profile in (
        first,
        make_profile(config, 2e-3, DType.FLOAT32),
        make_profile({**config, "vocab_size": 99}, 3e-3),
    ):
        site.feed(ProfileReported(ProfileReport(node("a"), compute=(profile,)), site.now))
    assert len(site.state.measured[node("a")].profiles) == 3
    site.now += 5
    newer = make_profile(config, 4e-3)
    link = MeasuredLink(node("a"), node("b"), LINK)
    version = site.state.version
    site.feed(ProfileReported(ProfileReport(node("a"), compute=(newer,), links=(link,)), site.now))
    known = site.state.measured[node("a")]
    assert len(known.profiles) == 3 and known.profiles[key_of(first)].value == newer
    assert known.links[node("b")].reported_at == known.profiles[key_of(first)].reported_at == 105.0
    assert site.state.version == version, "a placement under way is as good as it was"


def test_times_of_another_device_are_forgotten(
    desk: Any, make_profile: Any, make_manifest: Any, make_facts: Any
) -> None:
    config = make_manifest().config
    profiles = make_profile(config, 1e-3), make_profile(config, 2e-3, DType.FLOAT32)
    link = MeasuredLink(node("a"), node("b"), LINK)

    def measured() -> Desk:
        site: Desk = desk()
        site.feed(
            ProfileReported(ProfileReport(node("a"), compute=profiles, links=(link,)), site.now)
        )
        return site

    site = measured()
    other = make_profile(config, 5e-3, fingerprint="other")
    site.feed(ProfileReported(ProfileReport(node("a"), compute=(other,)), site.now))
    assert [known.value for known in site.state.measured[node("a")].profiles.values()] == [other]
    upgraded = replace(make_facts(), software="torch 3")
    less_memory = replace(make_facts(), memory_budget_bytes=1)
    for facts, left in ((upgraded, 0), (less_memory, 2)):
        site = measured()
        site.connect("a", incarnation="i2", facts=facts)
        assert len(site.state.measured[node("a")].profiles) == left
        assert len(site.saved[-1].measurements.profiles) == left
        site = measured()
        site.feed(ProfileReported(ProfileReport(node("a"), facts), site.now))
        assert (
            len(site.state.measured[node("a")].profiles) == left
            and site.state.nodes[node("a")].facts == facts
        )
        assert site.links() == 1, "the way to b is the same"


def test_reports_of_or_about_strangers_change_nothing(desk: Any) -> None:
    site = desk()
    before = site.state
    stranger = MeasuredLink(node("a"), node("z"), LINK)
    for report in (ProfileReport(node("z")), ProfileReport(node("a"), links=(stranger,))):
        with pytest.raises(NotFoundError) as info:
            site.feed(ProfileReported(report, site.now))
        assert info.value.field in ("node_id", "links")
    assert site.state is before


def test_a_node_that_took_over_a_name_takes_over_no_measurements(desk: Any) -> None:
    site = desk()
    for sender, receiver in ("ab", "ba"):
        link = MeasuredLink(node(sender), node(receiver), LINK)
        site.feed(ProfileReported(ProfileReport(node(sender), links=(link,)), site.now))
    site.feed(NodeDisconnected(node("b"), 2, site.now))
    site.feed(NodeRegistered(site.make_registration("b", node_id=NodeId("id-new")), site.now))
    assert node("b") not in site.state.measured and not site.state.measured[node("a")].links
