"""A link under suspicion: the deployment avoids a silent node, or else the link is at fault; and no
other suffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.values.actions import DropConnection, EndService, Replan
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    Event,
    HeadReported,
    HeartbeatsReceived,
    LinkReported,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    Ticked,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    Progress,
    State,
    Timings,
    validate_state,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.domain.control.commands import IDLE_INTERVAL_S, Heartbeat
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.link import LinkSuspected

NAME = DeploymentName("tale")
NODES = ("a", "b", "c")
TICK_S = 0.1
TIMINGS = Timings()
START = 1000.0


def node(name: str) -> NodeId:
    return NodeId(f"id-{name}")


STAGES = tuple(
    PlacedStage(
        i, node(name), NodeName(name), f"{name}:7000", LayerRange(i * 4, i * 4 + 4), 1000, 1000
    )
    for i, name in enumerate(NODES)
)
AB = (node("a"), node("b"))


class Site:
    """A ready deployment on nodes a, b and c at epoch 3. Nodes send heartbeats unless they are
    stopped."""

    def __init__(
        self, make_registration: Any, phase: Phase = Phase.READY, period_s: float = 0.5
    ) -> None:
        self.make_registration = make_registration
        self.now = START
        self.state = State(instance="test")
        self.dropped: list[tuple[float, NodeId]] = []
        self.failures: list[tuple[float, EdgeShardError]] = []
        self.replans = 0
        self.period_s = dict.fromkeys(NODES, period_s)
        self.next_s = {name: START + 0.1 * number for number, name in enumerate(NODES)}
        self.connections = 0
        for name in NODES:
            self.connect(name)
        self.state = replace(self.state, deployments={NAME: self.record(phase)})
        validate_state(self.state)

    def record(self, phase: Phase) -> DeploymentRecord:
        spec = parse_spec({"name": NAME, "model": "tiny", "source": "a"})
        ready = phase is Phase.READY
        prepared = tuple(Progress(number, phase is not Phase.LOADING) for number in (1, 2, 3))
        return DeploymentRecord(
            "u1", spec, Digest("d" * 64), Placement(STAGES, 16, 8, 1, 1), Epoch(3), phase,
            ever_ready=True, prepared=prepared, released=(Progress(),) * 3,
            activated=Progress(1, ready), attachment=9 if ready else 0,
            deadline=None if ready else START + 1e6, saving=1, saved=1, saved_epoch=Epoch(3),
        )  # fmt: skip

    def connect(self, name: str) -> None:
        self.connections += 1
        self.feed(NodeRegistered(self.make_registration(name), self.now))
        self.feed(NodeConnected(node(name), "i1", self.connections, self.now))

    def feed(self, event: Event) -> None:
        self.state = apply(self.state, event)
        validate_state(self.state)
        while actions := reconcile(self.state, self.now):
            for action in actions:
                if isinstance(action, DropConnection):
                    self.dropped.append((self.now, action.node_id))
                if isinstance(action, EndService):
                    self.failures.append((self.now, action.failure))
                self.replans += isinstance(action, Replan)
                self.state = apply(self.state, ActionIssued(action, self.now))
                validate_state(self.state)

    def stop(self, name: str) -> None:
        self.next_s[name] = float("inf")

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += TICK_S
            for name in NODES:
                while self.next_s[name] <= self.now:
                    self.next_s[name] += self.period_s[name]
                    self.feed(HeartbeatsReceived((Heartbeat(node(name), "i1", (), 0),), self.now))
            self.feed(Ticked(self.now))

    def report(self, by: str = "a", recovered: bool = False, **changes: Any) -> None:
        stage = NODES.index(by)
        said = LinkSuspected(
            NAME, Epoch(3), stage, (stage + 1) % 3, recovered, "nothing came back for 2.0 s"
        )
        self.feed(LinkReported(node(by), replace(said, **changes), self.now))

    def report_head(self, recovered: bool = False, epoch: int = 3) -> None:
        self.feed(
            HeadReported(NAME, Epoch(epoch), recovered, "nothing came back for 2.0 s", self.now)
        )

    @property
    def avoided(self) -> set[NodeId]:
        return set(self.state.deployments[NAME].avoided)

    @property
    def phase(self) -> tuple[Phase, int]:
        record = self.state.deployments[NAME]
        return record.phase, record.epoch


@pytest.fixture
def site(make_registration: Any) -> Site:
    site = Site(make_registration)
    site.run(5.0)
    return site


def test_a_deployment_goes_on_without_a_receiver_that_stands_still(site: Site) -> None:
    site.stop("b")
    site.run(2.1)
    site.report("a")
    reported = site.now
    site.run(3.0)
    ((at, failure),) = site.failures
    assert at - reported <= TIMINGS.suspect_wait_s + TICK_S
    assert failure.reason == "NODE_LOST" and "node b is silent" in failure.message
    assert site.phase == (Phase.WAITING, 3) and site.avoided == {node("b")} and site.replans == 1
    assert not site.state.suspects and not site.state.bad_links


def test_a_report_shortens_the_silence_of_no_node(site: Site) -> None:
    """Neither its connection nor another deployment of it ends by the word of one node, which may
    be false."""
    other = DeploymentName("poem")
    spec = parse_spec({"name": other, "model": "tiny", "source": "b"})
    poem = replace(
        site.record(Phase.READY), uid="u2", spec=spec, placement=Placement(STAGES[1:], 16, 8, 1, 1)
    )
    done = (Progress(1, True),) * 2
    poem = replace(poem, prepared=done, released=(Progress(),) * 2)
    site.state = replace(site.state, deployments={**site.state.deployments, other: poem})
    site.stop("b")
    site.run(2.1)
    site.report("a")
    site.run(TIMINGS.heartbeat_timeout_s - 3.5)
    assert not site.dropped and site.state.deployments[other].phase is Phase.READY
    site.run(2.0)
    assert [lost for _, lost in site.dropped] == [node("b")], (
        "it was silent for as long as any node may be"
    )
    assert site.state.deployments[other].phase is Phase.WAITING


def test_a_deployment_goes_on_without_a_sender_that_is_silent_after_its_report(site: Site) -> None:
    """Its report counts as heard, so this takes longer."""
    site.report("a")
    site.stop("a")
    reported = site.now
    site.run(1.9)
    assert not site.failures
    site.run(0.3)
    ((at, _),) = site.failures
    assert not site.dropped and site.avoided == {node("a")}
    assert at - reported == pytest.approx(TIMINGS.suspect_limit_s, abs=1.5 * TICK_S)


def test_a_link_between_nodes_that_both_answer_is_at_fault(site: Site) -> None:
    site.report("a")
    reported = site.now
    site.run(0.6)
    assert site.phase == (Phase.READY, 3) and not site.failures
    site.run(0.4)
    ((at, failure),) = site.failures
    assert TIMINGS.suspect_wait_s <= at - reported <= TIMINGS.suspect_wait_s + 2 * TICK_S
    assert failure.reason == "LINK_STALLED" and failure.retry_after_s == 1.0
    assert "from node a to node b" in failure.message and "nothing came back" in failure.message
    assert not site.dropped and site.phase == (Phase.WAITING, 3) and site.replans == 1, (
        "it is planned again at once"
    )
    assert not site.state.suspects
    assert site.state.bad_links == {AB: pytest.approx(at + TIMINGS.bad_link_s)}


def test_a_deployment_that_never_was_ready_fails(make_registration: Any) -> None:
    site = Site(make_registration, Phase.ACTIVATING)
    record = replace(site.state.deployments[NAME], ever_ready=False)
    site.state = replace(site.state, deployments={NAME: record})
    site.run(1.0)
    site.report("c")
    site.run(2.0)
    record = site.state.deployments[NAME]
    assert record.phase is Phase.FAILED and record.failure is not None
    assert (
        record.failure.reason == "LINK_STALLED"
        and "from node c to node a" in record.failure.message
    )


@pytest.mark.parametrize("after_s", [0.1, 0.6])
def test_a_link_that_recovers_in_time_changes_nothing(site: Site, after_s: float) -> None:
    before = site.phase
    site.report("a")
    site.run(after_s)
    site.report("a", recovered=True)
    site.run(10.0)
    assert site.phase == before and not site.failures and not site.dropped
    assert not site.state.suspects and not site.state.bad_links


@pytest.mark.parametrize(("by", "epoch"), [("b", 3), ("a", 2)])
def test_a_recovery_is_of_its_own_link_and_epoch(site: Site, by: str, epoch: int) -> None:
    site.report("a")
    site.report(by, recovered=True, epoch=Epoch(epoch))
    site.run(2.0)
    assert [failure.reason for _, failure in site.failures] == ["LINK_STALLED"]


@pytest.mark.parametrize(
    ("by", "changes"),
    [
        ("a", {"epoch": Epoch(2)}),
        ("a", {"epoch": Epoch(4)}),
        ("a", {"deployment": DeploymentName("poem")}),
        ("a", {"from_stage": 1, "to_stage": 2}),
        ("a", {"to_stage": 2}),
        ("a", {"from_stage": 7, "to_stage": 0}),
        ("c", {"to_stage": 3}),
    ],
)
def test_what_is_said_of_another_epoch_or_of_another_nodes_link_changes_nothing(
    site: Site, by: str, changes: dict[str, Any]
) -> None:
    before = site.state
    site.report(by, **changes)
    assert site.state == before
    stranger = LinkReported(
        NodeId("id-z"), LinkSuspected(NAME, Epoch(3), 0, 1, False, "x"), site.now
    )
    site.feed(stranger)
    assert site.state == before


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.DELETING])
def test_an_epoch_that_has_ended_has_no_suspects(site: Site, phase: Phase) -> None:
    site.report("a")
    assert site.state.suspects
    record = replace(site.state.deployments[NAME], phase=phase, attachment=0, not_before=1e9)
    site.state = replace(site.state, deployments={NAME: record})
    site.state = apply(site.state, Ticked(site.now))
    assert not site.state.suspects
    site.report("a")
    assert not site.state.suspects and site.phase == (phase, 3)


def test_a_link_is_bad_for_a_minute_behind_its_last_suspicion(
    make_registration: Any, site: Site
) -> None:
    site.report("a")
    site.run(2.0)
    assert AB in site.state.bad_links
    site.run(30.0)
    site.state = replace(site.state, deployments={NAME: site.record(Phase.READY)})
    site.report("a")
    site.report("a", recovered=True)
    site.run(TIMINGS.bad_link_s - 1.0)
    assert AB in site.state.bad_links, "it was under suspicion once more"
    site.run(1.2)
    assert not site.state.bad_links


@pytest.mark.parametrize(("name", "kept"), [("a", False), ("b", False), ("c", True)])
def test_a_node_that_connects_again_has_no_bad_links(site: Site, name: str, kept: bool) -> None:
    site.report("a")
    site.run(2.0)
    connection = site.state.nodes[node(name)].connection
    site.feed(NodeDisconnected(node(name), connection, site.now))
    assert AB in site.state.bad_links
    site.connect(name)
    assert (AB in site.state.bad_links) == kept


def test_a_coordinator_that_stood_still_itself_takes_nobody_for_lost(site: Site) -> None:
    site.report("a")
    site.now += 8.0
    site.feed(Ticked(site.now))
    site.report("b", recovered=True)
    assert not site.dropped and site.phase == (Phase.READY, 3)
    for name in NODES:
        site.next_s[name] = site.now + 0.05
    site.run(1.0)
    assert not site.dropped and [failure.reason for _, failure in site.failures] == ["LINK_STALLED"]


# Heads, which the coordinator watches itself


def test_a_head_that_stands_still_is_lost_and_nobody_else(site: Site) -> None:
    site.stop("a")
    site.run(2.0)
    site.report_head()
    reported = site.now
    site.run(3.0)
    ((at, lost),) = site.dropped
    assert lost == node("a") and at - reported <= TIMINGS.suspect_wait_s + TICK_S
    ((_, failure),) = site.failures
    assert failure.reason == "NODE_LOST" and "node a" in failure.message
    assert site.phase == (Phase.WAITING, 3) and not site.state.suspects and not site.state.bad_links


def test_a_head_that_talks_on_its_control_stream_is_left_alone(site: Site) -> None:
    site.report_head()
    assert site.state.suspects
    site.run(5.0)
    assert not site.dropped and not site.failures and site.phase == (Phase.READY, 3)
    assert not site.state.suspects and not site.state.bad_links


def test_a_head_that_answers_again_is_suspect_no_more(site: Site) -> None:
    site.stop("a")
    site.run(2.0)
    site.report_head()
    site.run(0.5)
    site.report_head(recovered=True)
    site.run(5.0)
    assert not site.dropped and not site.state.suspects and site.phase == (Phase.READY, 3)


def test_what_the_coordinator_finds_of_a_head_of_another_epoch_changes_nothing(site: Site) -> None:
    before = site.state
    site.report_head(epoch=2)
    site.report_head(epoch=4)
    site.feed(HeadReported(DeploymentName("poem"), Epoch(3), False, "", site.now))
    assert site.state == before


def test_a_head_and_its_link_are_suspect_each_for_itself(site: Site) -> None:
    site.report("a")
    site.report_head()
    assert [(known.from_stage, known.to_stage) for known in site.state.suspects] == [(0, 1), (0, 0)]
    site.report("a", recovered=True)
    assert [(known.from_stage, known.to_stage) for known in site.state.suspects] == [(0, 0)]


def test_a_coordinator_that_hears_nobody_loses_no_head(site: Site) -> None:
    """It is cut off from all nodes, whose streams stand: as blind as one whose nodes vanish
    together."""
    for name in NODES:
        site.stop(name)
    site.run(2.0)
    site.report_head()
    site.run(4.0)
    site.report_head()  # the watch reports it again
    site.run(2.0)
    assert not site.dropped and not site.failures and site.phase == (Phase.READY, 3)
    # connections do not all come back at once
    for name, after_s in (
        ("b", 0.05),
        ("c", 0.05),
        ("a", 1.5),
    ):
        site.next_s[name] = site.now + after_s
    site.run(0.2)
    site.report_head()
    site.run(1.4)
    site.report_head(recovered=True)
    site.run(20.0)
    assert not site.dropped and not site.state.suspects and site.phase == (Phase.READY, 3)


def test_nodes_that_hold_nothing_speak_more_seldom_and_make_no_coordinator_blind(
    site: Site,
) -> None:
    """One heartbeat in 1.8 s, a little late, leaves a gap as long as a silent head's limit."""
    site.stop("a")
    for name in ("b", "c"):
        site.period_s[name], site.next_s[name] = IDLE_INTERVAL_S + 0.2, site.now + 0.85
    site.run(2.0)
    site.report_head()
    reported = site.now
    site.run(3.0)
    ((at, lost),) = site.dropped
    assert lost == node("a") and at - reported <= TIMINGS.suspect_wait_s + TICK_S


def test_a_head_that_is_silent_still_when_the_lease_is_over_is_lost(site: Site) -> None:
    for name in NODES:
        site.stop(name)
    site.run(2.0)
    site.report_head()
    site.run(1.0)
    for name in ("b", "c"):
        site.next_s[name] = site.now
    site.run(TIMINGS.lease_s + TIMINGS.heartbeat_timeout_s)
    assert [lost for _, lost in site.dropped] == [node("a")]


def test_a_coordinator_that_stood_still_itself_loses_no_head(site: Site) -> None:
    site.report_head()
    site.now += 30.0
    site.feed(Ticked(site.now))
    site.report_head()
    for name in NODES:
        site.next_s[name] = site.now + 4.0  # their connections take a while to come back
    site.run(6.0)
    assert not site.dropped and site.phase == (Phase.READY, 3) and not site.state.suspects


@settings(deadline=None, max_examples=200)
@given(
    periods=st.lists(st.floats(0.2, 1.0), min_size=3, max_size=3),
    phases=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    stopped=st.sampled_from([None, "a", "b", "c"]),
    before_s=st.floats(0.0, 2.2),
)
def test_a_silent_node_is_avoided_and_no_other(
    make_registration: Any,
    periods: list[float],
    phases: list[float],
    stopped: str | None,
    before_s: float,
) -> None:
    """The link from a to b is reported `before_s` after one node stopped, or none; heartbeats come
    when they come."""
    site = Site(make_registration)
    site.period_s = dict(zip(NODES, periods, strict=True))
    site.next_s = {name: START + phase for name, phase in zip(NODES, phases, strict=True)}
    site.run(3.0)
    if stopped is not None and stopped != "a":
        site.stop(stopped)
    site.run(before_s)
    site.report("a")
    if stopped == "a":
        site.stop("a")
    reported = site.now
    site.run(4.0)
    if stopped in ("a", "b"):
        ((at, failure),) = site.failures
        assert (
            failure.reason == "NODE_LOST" and at - reported <= TIMINGS.suspect_limit_s + 2 * TICK_S
        )
        assert site.avoided == {node(stopped)} and not site.dropped and not site.state.bad_links
        if stopped == "b" and before_s >= TIMINGS.suspect_silence_s + 1.5 * TICK_S:
            assert at - reported <= TIMINGS.suspect_wait_s + 2 * TICK_S
        return
    assert not site.dropped and AB in site.state.bad_links
    ((at, failure),) = site.failures
    assert failure.reason == "LINK_STALLED" and at - reported <= 1.0 + 2 * TICK_S
