"""Which nodes count as lost, and when: a node that fails does, and nodes that a blind coordinator
does not see do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.nodes import lost_nodes
from edgeshard_coordinator.core.values.actions import DropConnection, SendCommand
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    Event,
    HeadDetached,
    HeartbeatsReceived,
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

from edgeshard.domain.control.commands import Heartbeat
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus

TIMES = Timings()
TICK_S = 0.5


class Desk:
    """Connected nodes with a ready deployment on each three of them; time goes by with ticks and
    heartbeats."""

    def __init__(self, make_registration: Any, names: str) -> None:
        self.make = make_registration
        self.now = 100.0
        self.connections = 0
        # Nothing is measured: no probe comes between.
        self.state = State(instance="test", timings=replace(TIMES, probe_quiet_s=1e9))
        self.dropped: list[str] = []
        self.sent: list[SendCommand] = []
        for name in names:
            self.feed(NodeRegistered(make_registration(name), self.now))
            self.connect(name)
        groups = [names[start : start + 3] for start in range(0, len(names), 3)]
        records = {DeploymentName(group): ready(group, self.state) for group in groups}
        self.state = replace(self.state, deployments=records)
        self.wait(1.0)

    def feed(self, event: Event) -> None:
        self.state = apply(self.state, event)
        validate_state(self.state)
        while actions := reconcile(self.state, self.now):
            for action in actions:
                self.state = apply(self.state, ActionIssued(action, self.now))
                validate_state(self.state)
                if isinstance(action, DropConnection):
                    self.dropped.append(action.node_id[-1])
                if isinstance(action, SendCommand):
                    self.sent.append(action)

    def connect(self, name: str, incarnation: str = "i1") -> None:
        self.connections += 1
        self.feed(NodeConnected(node(name), incarnation, self.connections, self.now))

    def restart(self, name: str) -> None:
        self.feed(NodeRegistered(self.make(name, incarnation="i2"), self.now))
        self.connect(name, "i2")

    def vanish(self, name: str) -> None:
        self.feed(NodeDisconnected(node(name), self.state.nodes[node(name)].connection, self.now))

    def wait(self, seconds: float, silent: str = "") -> None:
        """Nodes send heartbeats, except the `silent` ones."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + TICK_S, end)
            beats = tuple(
                Heartbeat(known.node_id, known.incarnation, held(known.name, self.state), 0)
                for known in self.state.nodes.values()
                if known.connected and known.name not in silent
            )
            self.feed(HeartbeatsReceived(beats, self.now))
            self.feed(Ticked(self.now))

    def stand_still(self, seconds: float) -> None:
        self.now += seconds

    def phases(self) -> dict[str, Phase]:
        return {str(name): record.phase for name, record in self.state.deployments.items()}

    def epochs(self) -> set[int]:
        return {record.epoch for record in self.state.deployments.values()}


def node(name: str) -> NodeId:
    return NodeId(f"id-{name}")


def held(name: str, state: State) -> tuple[StageStatus, ...]:
    found = [record for record in state.deployments.values() if name in record.name]
    return tuple(
        StageStatus(r.name, r.epoch, r.name.index(name), LayerRange(0, 2), StagePhase.ACTIVE)
        for r in found
    )


def ready(names: str, state: State) -> DeploymentRecord:
    stages = tuple(
        PlacedStage(
            i, node(name), NodeName(name), f"{name}:7000", LayerRange(i * 2, i * 2 + 2), 1000, 1000
        )
        for i, name in enumerate(names)
    )
    return DeploymentRecord(
        uid=f"u-{names}",
        spec=parse_spec({"name": names, "model": "tiny", "source": names[0]}),
        manifest_digest=Digest("d" * 64),
        placement=Placement(stages, 16, 8, 1, 1),
        epoch=Epoch(3),
        phase=Phase.READY,
        ever_ready=True,
        prepared=tuple(Progress(state.nodes[stage.node_id].connection, True) for stage in stages),
        released=(Progress(),) * len(stages),
        activated=Progress(1, True),
        attachment=9,
        saving=1,
        saved=1,
        saved_epoch=Epoch(3),
    )


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcdefghi"])
def test_one_node_that_vanishes_is_lost_at_once_however_many_there_are(
    make_registration: Any, names: str
) -> None:
    desk = Desk(make_registration, names)
    desk.vanish("a")
    assert desk.phases() == {
        name: Phase.WAITING if "a" in name else Phase.READY for name in desk.phases()
    }
    assert not desk.state.awaited


def test_two_of_two_nodes_that_vanish_are_lost_at_once(make_registration: Any) -> None:
    desk = Desk(make_registration, "ab")
    desk.vanish("a")
    desk.vanish("b")
    assert desk.phases() == {"ab": Phase.WAITING} and not desk.state.awaited


def test_when_most_nodes_vanish_together_their_deployments_wait_for_them(
    make_registration: Any,
) -> None:
    """The first of them were lost before the pattern showed; a node that vanishes later is awaited,
    and finds its former stages.
    """
    desk = Desk(make_registration, "abcdefghi")
    for name in "abcdef":
        desk.now += 0.1
        desk.vanish(name)
    assert desk.phases() == {"abc": Phase.WAITING, "def": Phase.WAITING, "ghi": Phase.READY}
    for name in "ghi":
        desk.now += 0.3
        desk.vanish(name)
    assert desk.phases()["ghi"] is Phase.READY and set(desk.state.awaited) >= {
        node("g"),
        node("h"),
        node("i"),
    }
    desk.wait(TIMES.lease_s / 2)
    for name in "ghi":
        desk.connect(name)
    desk.wait(2 * TIMES.lease_s)
    assert (
        desk.phases()["ghi"] is Phase.READY
        and desk.state.deployments[DeploymentName("ghi")].epoch == 3
    )
    assert not any(command.node_id in (node("g"), node("h"), node("i")) for command in desk.sent)


def test_nodes_whose_processes_are_replaced_one_after_the_other_died(
    make_registration: Any,
) -> None:
    desk = Desk(make_registration, "abcd")
    for name in "abc":
        desk.vanish(name)
        assert not desk.state.awaited, name
        desk.wait(0.3)
        desk.restart(name)


def test_nodes_that_do_not_come_back_are_lost_after_a_lease(make_registration: Any) -> None:
    desk = Desk(make_registration, "abcdefghi")
    for name in "abcdefghi":
        desk.vanish(name)
    began = desk.now
    desk.wait(TIMES.lease_s - 1)
    assert desk.phases()["ghi"] is Phase.READY
    desk.wait(1.5)
    assert set(desk.phases().values()) == {Phase.WAITING} and desk.now - began < TIMES.lease_s + 1


def test_nodes_that_vanish_one_after_the_other_have_faults_of_their_own(
    make_registration: Any,
) -> None:
    desk = Desk(make_registration, "abcdefghi")
    for name in "abcdefghi":
        desk.wait(lost_nodes.TOGETHER_S)
        desk.vanish(name)
        assert not desk.state.awaited
    assert set(desk.phases().values()) == {Phase.WAITING}


def test_the_first_of_nodes_that_are_not_heard_any_more_is_not_lost_either(
    make_registration: Any,
) -> None:
    """As when the coordinator's own link is dead: the ends of streams are noticed one by one, the
    silence is one.

    The first end is noticed 3 s after that node was heard (keepalive), and 2.1 s after any other at
    the soonest.
    """
    desk = Desk(make_registration, "abcdef")
    desk.wait(2.1, silent="abcdef")
    desk.vanish("a")
    assert desk.phases() == {"abc": Phase.READY, "def": Phase.READY} and set(
        desk.state.awaited
    ) == {node("a")}
    desk.vanish("b")
    desk.connect("a")
    desk.connect("b")
    desk.wait(2 * TIMES.lease_s)
    assert desk.phases() == {"abc": Phase.READY, "def": Phase.READY} and desk.epochs() == {3}


def test_most_nodes_that_fall_silent_get_a_lease_and_no_second_one(make_registration: Any) -> None:
    desk = Desk(make_registration, "abcdef")
    desk.wait(TIMES.heartbeat_timeout_s + 2 * TICK_S, silent="abcd")
    assert not desk.dropped and set(desk.phases().values()) == {Phase.READY}
    desk.wait(TIMES.lease_s, silent="abcd")
    assert sorted(desk.dropped) == list("abcd") and set(desk.phases().values()) == {Phase.WAITING}


def test_a_few_silent_nodes_are_lost_when_their_time_is_over(make_registration: Any) -> None:
    desk = Desk(make_registration, "abcdef")
    desk.wait(TIMES.heartbeat_timeout_s - TICK_S, silent="ab")
    assert not desk.dropped
    desk.wait(2 * TICK_S, silent="ab")
    assert desk.dropped == ["a", "b"] and desk.phases() == {
        "abc": Phase.WAITING,
        "def": Phase.READY,
    }


@pytest.mark.parametrize("names", ["ab", "abc", "abcdef"])
def test_a_coordinator_that_stood_still_loses_nobody(make_registration: Any, names: str) -> None:
    """The ends of streams may be its first events afterwards; they are attributed to the stall,
    however few they are.
    """
    desk = Desk(make_registration, names)
    desk.stand_still(30.0)
    desk.vanish("a")
    desk.feed(Ticked(desk.now))
    assert set(desk.phases().values()) == {Phase.READY} and not desk.dropped
    desk.wait(TIMES.lease_s / 2)
    desk.connect("a")
    desk.wait(2 * TIMES.lease_s)
    assert set(desk.phases().values()) == {Phase.READY} and desk.epochs() == {3} and not desk.sent


def test_who_stays_away_after_a_stall_is_lost_after_a_lease(make_registration: Any) -> None:
    desk = Desk(make_registration, "ab")
    desk.stand_still(30.0)
    desk.vanish("a")
    desk.wait(TIMES.lease_s + 2 * TICK_S, silent="b")
    assert desk.phases() == {"ab": Phase.WAITING} and desk.dropped == ["b"]


def test_a_stall_before_the_actions_of_an_event_drops_nobody(make_registration: Any) -> None:
    """The clock ran on between an event and its actions; no node was silent by any tick."""
    desk = Desk(make_registration, "ab")
    assert reconcile(desk.state, desk.now + 60.0) == []


def test_ticks_a_little_late_are_no_stall(make_registration: Any) -> None:
    desk = Desk(make_registration, "ab")
    desk.stand_still(TIMES.stall_s)
    desk.vanish("a")
    assert desk.phases() == {"ab": Phase.WAITING}


def test_another_process_in_place_of_an_awaited_one_has_lost_what_it_held(
    make_registration: Any,
) -> None:
    desk = Desk(make_registration, "ab")
    desk.stand_still(30.0)
    desk.vanish("a")
    desk.restart("a")
    assert not desk.state.awaited and desk.epochs() == {4}


def test_a_head_that_is_awaited_has_a_lease_to_attach_again(make_registration: Any) -> None:
    desk = Desk(make_registration, "ab")
    desk.stand_still(30.0)
    desk.vanish("a")
    desk.feed(HeadDetached(DeploymentName("ab"), 9, desk.now))
    assert desk.phases() == {"ab": Phase.ACTIVATING}
    desk.wait(TIMES.reattach_timeout_s + 1)
    assert desk.phases() == {"ab": Phase.ACTIVATING}
    desk.wait(TIMES.lease_s)
    assert desk.phases() == {"ab": Phase.WAITING}


def test_after_its_start_the_coordinator_awaits_the_nodes_it_knows(make_registration: Any) -> None:
    """If a node that has registered leaves again, it is lost as at any time."""
    before = Desk(make_registration, "abcdef").state
    away = {known: replace(node, connection=0, stages=()) for known, node in before.nodes.items()}
    desk = Desk(make_registration, "")
    desk.state = lost_nodes.started(replace(before, nodes=away, ticked_at=None), desk.now)
    validate_state(desk.state)
    desk.wait(1.0)
    assert set(desk.phases().values()) == {Phase.READY} and len(desk.state.awaited) == 6
    for name in "abcde":
        desk.connect(name)
    desk.vanish("a")
    assert desk.phases() == {"abc": Phase.WAITING, "def": Phase.READY}
    desk.wait(TIMES.lease_s)
    assert desk.phases()["def"] is Phase.WAITING and not desk.state.awaited


def test_while_nodes_are_awaited_a_silent_one_has_time_too(make_registration: Any) -> None:
    desk = Desk(make_registration, "abcdefghi")
    desk.wait(TIMES.heartbeat_timeout_s / 2, silent="i")
    for name in "abcde":
        desk.vanish(name)
    desk.wait(TIMES.lease_s - 1, silent="i")
    assert not desk.dropped
    desk.wait(2.0, silent="i")
    assert desk.dropped == ["i"]
