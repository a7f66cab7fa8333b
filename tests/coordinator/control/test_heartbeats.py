"""Heartbeats on control streams: changes made whole, many put together, and streams that are of no
use ended."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.control.runtime import node_reports
from edgeshard_coordinator.control.runtime.hub import ControlStream
from edgeshard_coordinator.control.runtime.node_reports import HeartbeatBatches
from edgeshard_coordinator.core.nodes import node_events
from edgeshard_coordinator.core.values.events import CommandAnswered, Event, HeartbeatsReceived
from edgeshard_coordinator.core.values.state import KnownNode, State

from edgeshard import WIRE_VERSION
from edgeshard.domain.control.commands import MOST_STAGES, Heartbeat, HeartbeatChange, ReleaseStage
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import (
    DeadlineError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StageKey, StagePhase, StageStatus
from edgeshard.proto.v1 import admin_pb2, coordinator_pb2, head_pb2_grpc
from edgeshard.rpc import hello
from edgeshard.wire.control import agent_message_to_wire, heartbeat_to_wire

pytestmark = pytest.mark.timing

DEADLINE_S = 30.0
STAGE = StageStatus(DeploymentName("old"), Epoch(4), 0, LayerRange(0, 4), StagePhase.ACTIVE)


class Loop:
    """A state loop that only records posted events."""

    def __init__(self, make_facts: Any, *names: str) -> None:
        nodes = [
            KnownNode(
                NodeId(f"id-{name}"),
                NodeName(name),
                "x:1",
                WIRE_VERSION,
                make_facts(),
                "i1",
                connection=number,
            )
            for number, name in enumerate(names, 1)
        ]
        self.state = State(instance="test", nodes={node.node_id: node for node in nodes})
        self.posted: list[Event] = []
        self.came = asyncio.Event()

    def now(self) -> float:
        return 7.0

    def post(self, event: Event) -> None:
        self.posted.append(event)
        self.came.set()

    def streams(self) -> list[ControlStream]:
        return [
            ControlStream(node.node_id, node.incarnation, node.connection)
            for node in self.state.nodes.values()
        ]

    def heartbeats(self) -> list[list[str]]:
        return [
            [beat.node_id[-1] for beat in event.heartbeats]
            for event in self.posted
            if hasattr(event, "heartbeats")
        ]


def beat(
    stream: ControlStream, *stages: StageStatus, memory: int = 1
) -> coordinator_pb2.ControlRequest:
    return agent_message_to_wire(Heartbeat(stream.node_id, stream.incarnation, stages, memory))


def change(**changes: Any) -> coordinator_pb2.ControlRequest:
    return agent_message_to_wire(HeartbeatChange(**changes))


async def test_heartbeats_wait_for_each_other_and_go_as_one_event_the_newest_of_each_node(
    make_facts: Any,
) -> None:
    loop = Loop(make_facts, *"abc")
    batches, streams = HeartbeatBatches(loop), loop.streams()  # type: ignore[arg-type]
    for stream in streams:
        batches.heard(stream, beat(stream))
    for memory in (2, 3):
        batches.heard(streams[0], change(memory_available_bytes=memory))
    assert not loop.posted and len(batches) == 5
    await asyncio.wait_for(loop.came.wait(), DEADLINE_S)
    (event,) = loop.posted
    assert isinstance(event, HeartbeatsReceived) and loop.heartbeats() == [["a", "b", "c"]]
    assert event.heartbeats[0].memory_available_bytes == 3 and len(batches) == 0


async def test_news_of_a_stage_goes_at_once_and_takes_along_what_waits(make_facts: Any) -> None:
    loop = Loop(make_facts, *"ab")
    batches, (first, second) = HeartbeatBatches(loop), loop.streams()  # type: ignore[arg-type]
    batches.heard(first, beat(first))
    batches.heard(second, beat(second, STAGE))
    assert loop.heartbeats() == [["a", "b"]]
    failed = replace(STAGE, phase=StagePhase.FAILED)
    batches.heard(second, change(stages=(failed,), urgent=True))
    assert loop.heartbeats() == [["a", "b"], ["b"]]
    event = loop.posted[-1]
    assert isinstance(event, HeartbeatsReceived) and event.heartbeats[0].stages == (failed,)
    batches.heard(second, change(removed=(STAGE.key,), urgent=True))
    event = loop.posted[-1]
    assert isinstance(event, HeartbeatsReceived) and event.heartbeats[0].stages == ()


async def test_before_what_else_a_node_says_comes_what_it_said_before(make_facts: Any) -> None:
    loop = Loop(make_facts, *"ab")
    batches, (first, second) = HeartbeatBatches(loop), loop.streams()  # type: ignore[arg-type]
    batches.heard(first, beat(first))
    batches.flush_of(second)
    assert not loop.posted
    batches.flush_of(first)
    assert loop.heartbeats() == [["a"]]


async def test_a_stream_that_was_replaced_or_has_ended_says_nothing_more(make_facts: Any) -> None:
    loop = Loop(make_facts, *"abc")
    batches, (first, second, third) = HeartbeatBatches(loop), loop.streams()  # type: ignore[arg-type]
    newer = replace(loop.state.nodes[first.node_id], connection=9)
    loop.state = replace(loop.state, nodes={**loop.state.nodes, first.node_id: newer})
    away = replace(loop.state.nodes[second.node_id], connection=0)
    loop.state = replace(loop.state, nodes={**loop.state.nodes, second.node_id: away})
    for stream in (first, second, third):
        batches.heard(stream, beat(stream))
    batches.flush()
    assert loop.heartbeats() == [["c"]]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (change(memory_available_bytes=3), "heartbeat"),
        (agent_message_to_wire(Heartbeat(NodeId("id-b"), "i1", (), 0)), "node_id"),
        (agent_message_to_wire(Heartbeat(NodeId("id-a"), "i2", (), 0)), "node_id"),
    ],
    ids=["a change first", "of another node", "of another process"],
)
async def test_a_stream_whose_heartbeats_cannot_be_is_ended(
    site: Any, failing: Any, message: coordinator_pb2.ControlRequest, field: str
) -> None:
    a, b = await site.connected("a", "b")
    await a._call.write(message)
    async with failing(InvalidArgumentError) as caught:
        await a.ended()
    assert caught[0].field == field
    await site.until(lambda state: not state.is_connected(a.node_id))
    await site.heard(b)


async def test_a_heartbeat_with_more_stages_than_a_node_can_hold_is_refused_by_name(
    site: Any, failing: Any
) -> None:
    (agent,) = await site.connected("a")
    stages = [replace(STAGE, stage=number) for number in range(MOST_STAGES + 1)]
    await site.heard(agent, *stages[:MOST_STAGES])
    assert len(site.state.nodes[agent.node_id].stages) == MOST_STAGES
    removed = tuple(StageKey(STAGE.deployment, number) for number in range(MOST_STAGES + 1))
    for field, too_many in (
        ("stages", Heartbeat(agent.node_id, "i1", tuple(stages), 0)),
        ("stages", HeartbeatChange((stages[-1],), urgent=True)),
        ("removed", HeartbeatChange(removed=removed)),
    ):
        await agent.say(too_many)
        async with failing(InvalidArgumentError) as caught:
            await agent.ended()
        assert (caught[0].field, caught[0].reason) == (field, "TOO_MANY_STAGES")
        await agent.connect()
        await site.heard(agent, *stages[:MOST_STAGES])


async def test_a_change_is_part_of_the_state_and_the_rest_is_as_it_was(site: Any) -> None:
    (agent,) = await site.connected("a")
    other = replace(STAGE, stage=1)
    await site.heard(agent, STAGE, other)
    await agent.say(HeartbeatChange((replace(STAGE, steps_done=5),)))
    await site.until(
        lambda state: any(stage.steps_done == 5 for stage in state.nodes[agent.node_id].stages)
    )
    assert set(site.state.nodes[agent.node_id].stages) == {replace(STAGE, steps_done=5), other}
    await agent.say(HeartbeatChange(removed=(STAGE.key,), urgent=True))
    await site.until(lambda state: state.nodes[agent.node_id].stages == (other,))


@pytest.fixture
def any_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any node counts as silent, so that another process may take its place at once."""
    monkeypatch.setattr(node_events, "LATE_S", -60.0)


@pytest.mark.usefixtures("any_silence")
async def test_a_node_that_is_not_known_any_more_has_its_stream_ended_and_comes_again(
    site: Any, failing: Any
) -> None:
    """Another process registered in its place, and this one lives on."""
    (agent,) = await site.connected("a")
    await site.agent("a", incarnation="i2").register()
    await agent.heartbeat()
    async with failing(NotFoundError) as caught:
        await agent.ended()
    assert caught[0].field == "node_id"
    await agent.connect()
    await site.heard(agent)


async def test_a_release_is_answered_before_a_later_heartbeat_and_after_an_earlier_one(
    site: Any,
) -> None:
    """So a node that names its stage for the last time just before gets no second order to release
    it."""
    agents, _ = await site.deployed()
    a = agents[0]
    held = site.state.nodes[a.node_id].stages
    a.held.add(ReleaseStage)
    request = admin_pb2.DeleteDeploymentRequest(operation_id="op-2", name="tale")
    await site.admin.DeleteDeployment(request, timeout=DEADLINE_S)
    operation_id, command = await a.take_pending()
    await a.heartbeat()
    await a.say(HeartbeatChange(held))  # sent as no news, so that it waits
    await a.reply(operation_id, command)
    await site.until(lambda state: "tale" not in state.deployments)
    await site.heard(a)
    assert len(a.released()) == 1
    events = [entry.event for entry in site.coordinator.loop.recorded().entries]
    named = [e for e in events if isinstance(e, HeartbeatsReceived) and e.heartbeats[-1].stages]
    answered = [
        e
        for e in events
        if isinstance(e, CommandAnswered) and e.result.operation_id == operation_id
    ]
    assert events.index(named[-1]) < events.index(answered[0])


async def test_the_old_way_to_say_it_still_counts(site: Any) -> None:
    (agent,) = await site.connected("a")
    said = Heartbeat(agent.node_id, "i1", (STAGE,), 0)
    answer = await agent.stub.Heartbeat(heartbeat_to_wire(said), timeout=DEADLINE_S)
    assert answer.known and site.state.nodes[agent.node_id].stages == (STAGE,)
    answer = await agent.stub.Heartbeat(
        heartbeat_to_wire(replace(said, incarnation="i2")), timeout=DEADLINE_S
    )
    assert not answer.known


@pytest.mark.parametrize("stream", ["control", "attach", "listen"])
async def test_a_stream_without_a_hello_has_a_deadline(
    site: Any, failing: Any, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setattr(hello, "HELLO_TIMEOUT_S", 0.05)
    agent = site.agent("a")
    call = {
        "control": lambda: agent.stub.Control(timeout=DEADLINE_S),
        "attach": lambda: head_pb2_grpc.HeadServiceStub(site.channel).Attach(timeout=DEADLINE_S),
        "listen": lambda: site.inference.Listen(timeout=DEADLINE_S),
    }[stream]()
    async with failing(DeadlineError) as caught:
        await call.read()
    assert (caught[0].field, caught[0].reason) == (
        "listener" if stream == "listen" else "hello",
        "NO_HELLO",
    )


async def test_a_node_that_registers_all_the_time_is_refused_and_others_are_not(
    site: Any, failing: Any
) -> None:
    """Each registration is a write to the disk."""
    (agent,) = await site.connected("a")
    for _ in range(int(node_reports.BURST_S)):
        await agent.register()
    async with failing(ResourceExhaustedError) as caught:
        for _ in range(5):
            await agent.register()
    assert caught[0].reason == "TOO_MANY_REGISTRATIONS" and 0.0 < caught[0].retry_after_s <= 5.0
    await site.connected("b")
    assert site.state.is_connected(agent.node_id)


@pytest.mark.usefixtures("any_silence")
async def test_a_hundred_restarts_of_an_agent_leave_one_node_and_nothing_else(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them so quickly that the new process is there before the old one's stream has
    ended."""
    monkeypatch.setattr(node_reports, "BURST_S", 1000.0)
    agent = site.agent("a")
    await agent.connect()
    calls = []
    for number in range(100):
        await agent.heartbeat(replace(STAGE, epoch=Epoch(number + 1)))
        if number % 2:
            await agent.vanish()
        calls.append(agent._task)
        await agent.restart()
    await site.until(lambda state: state.is_connected(agent.node_id))
    await site.heard(agent)
    await asyncio.wait(calls, timeout=DEADLINE_S)
    services = site.coordinator._agents

    def left() -> list[Any]:
        gc.collect()
        # A traceback of an earlier test's last refusal keeps a stream of another node.
        streams = [item for item in gc.get_objects() if type(item) is ControlStream]
        return [stream for stream in streams if stream.node_id == agent.node_id]

    deadline = time.monotonic() + DEADLINE_S
    while len(left()) > 1 and time.monotonic() < deadline:  # noqa: ASYNC110 (what gRPC lets go of has no event)
        await asyncio.sleep(0.05)
    assert len(left()) == 1 and len(site.coordinator._hub) == 1
    await site.heard(agent)
    assert len(services.batches) == 0
    assert list(site.state.nodes) == [agent.node_id] and not site.state.awaited
    readers = [
        task for task in asyncio.all_tasks() if "CoordinatorServicer._read" in repr(task.get_coro())
    ]
    assert len(readers) == 1
    await agent.vanish()
    await site.until(lambda state: not state.is_connected(agent.node_id))
    assert len(site.coordinator._hub) == 0


async def test_a_node_that_reconnects_while_it_is_awaited_finds_its_deployment_as_it_was(
    open_site: Any,
) -> None:
    """The coordinator stalled; all streams broke meanwhile, and the nodes kept their stages."""
    site = await open_site(lease_s=60.0, stall_s=0.6)
    agents, _ = await site.deployed()
    kinds = [agent.kinds() for agent in agents]
    await site.until(lambda state: state.ticked_at is not None)
    time.sleep(1.5)  # noqa: ASYNC251 (it stands still)
    await agents[1].vanish()
    await site.until(lambda state: not state.is_connected(agents[1].node_id))
    assert site.state.deployments["tale"].phase is DeploymentPhase.READY
    await agents[1].connect()
    await site.heard(agents[1])
    record = site.state.deployments["tale"]
    assert (record.phase, record.epoch) == (DeploymentPhase.READY, 1) and not site.state.awaited
    assert [agent.kinds() for agent in agents] == kinds, "nothing was prepared again"


def test_an_error_ends_a_stream_after_what_was_put_on_it_before() -> None:
    stream = ControlStream(NodeId("a"), "i1", 1)
    error: EdgeShardError = NotFoundError("gone")
    stream.outgoing.put_nowait((OperationId("op"), ReleaseStage(DeploymentName("old"), Epoch(1))))
    stream.fail(error)
    stream.close()
    assert [stream.outgoing.get_nowait() for _ in range(3)][1:] == [error, None]


@pytest.mark.parametrize(
    "comes_back", [True, False], ids=["and the node registers once more", "and stays"]
)
@pytest.mark.usefixtures("any_silence")
async def test_a_node_whose_place_a_late_registration_took_comes_again(
    site: Any, make_registration: Any, comes_back: bool
) -> None:
    """The late registration of its earlier process, which the network delivered twice. The node
    heartbeats on, over a stream that counts for nothing, and it would have stayed away for good."""
    (node,) = await site.connected("b")
    late = site.agent("b", incarnation="i0")
    await late.register()
    if comes_back:
        await node.register()
    assert not site.state.is_connected(node.node_id)
    await node.heartbeat()
    async with asyncio.timeout(DEADLINE_S):
        while not node._call.done():  # noqa: ASYNC110 (what is watched has no event)
            await asyncio.sleep(0.01)
    await node.connect()
    await site.until(lambda state: state.is_connected(node.node_id))
