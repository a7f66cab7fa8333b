"""A node's heartbeats on its control stream: the first whole, then what changed; and a node that
finds its way back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_agent.net.control import PROMPT_HEARTBEAT_S, ControlClient, drawn
from edgeshard_agent.net.streams import MAX_RETRY_S

from edgeshard import WIRE_VERSION
from edgeshard.domain.control import commands
from edgeshard.domain.control.commands import (
    HOLDING_INTERVAL_S,
    IDLE_INTERVAL_S,
    NOTHING,
    CommandResult,
    Heartbeat,
    HeartbeatChange,
    Registration,
)
from edgeshard.domain.errors import NotFoundError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts, HugePages, StageKey, StagePhase, StageStatus
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.proto.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from edgeshard.rpc.channel import CONTROL_KEEPALIVE_S, open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.control import agent_message_from_wire

pytestmark = pytest.mark.timing

FACTS = DeviceFacts("cpu", "x", 1, 100, 50, False, "x")
STAGE = StageStatus(DeploymentName("tale"), Epoch(1), 0, LayerRange(0, 2), StagePhase.ACTIVE)
DEADLINE_S = 60.0


class Site(CoordinatorServiceServicer):
    """Records the nodes' messages, stream by stream, and ends a stream when the test requests
    it."""

    def __init__(self) -> None:
        self.registered: list[float] = []
        self.refuses = False
        self.streams: list[list[Any]] = []
        self.came = asyncio.Condition()
        self.hang_up = asyncio.Event()

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        self.registered.append(asyncio.get_running_loop().time())
        if self.refuses:
            raise NotFoundError("not yet")
        return pb.RegisterResponse()

    async def Control(self, request_iterator: Any, context: Any) -> None:
        said: list[Any] = []
        self.streams.append(said)
        await context.send_initial_metadata(())
        ending = asyncio.create_task(self.hang_up.wait())
        while True:
            reading = asyncio.create_task(context.read())
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                self.hang_up.clear()
                raise NotFoundError("register again", field="node_id")
            message = reading.result()
            if not isinstance(message, pb.ControlRequest):
                return
            async with self.came:
                said.append(agent_message_from_wire(message))
                self.came.notify_all()

    async def until(self, stream: int, count: int) -> list[Any]:
        """At least `count` messages of a stream after its hello."""

        def is_there() -> bool:
            return len(self.streams) > stream and len(self.streams[stream]) > count

        async with asyncio.timeout(DEADLINE_S), self.came:
            await self.came.wait_for(is_there)
        return self.streams[stream][1:]


class Node:
    """A control client of a node that holds `stages`."""

    def __init__(self, address: str) -> None:
        self.stages: tuple[StageStatus, ...] = (STAGE,)
        self.channel = open_channel(address, None, reconnect_s=MAX_RETRY_S)
        registration = Registration(
            NodeId("n"), NodeName("n"), "127.0.0.1:1", WIRE_VERSION, FACTS, "i"
        )
        self.client = ControlClient(
            self.channel,
            address,
            registration,
            lambda i, c: None,
            lambda: self.stages,
            lambda: 1000,
            self._pages,
        )
        self.running = asyncio.create_task(self.client.run())

    async def _pages(self, stages: object) -> HugePages:
        return HugePages(4, 2)

    def hold(self, *stages: StageStatus) -> None:
        self.stages = stages
        self.client.changed()

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.channel.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server("127.0.0.1:0", None)
    yield server
    await server.stop(0)


@pytest.fixture
async def site(server: Server) -> Site:
    site = Site()
    add_CoordinatorServiceServicer_to_server(site, server.grpc)
    return site


@pytest.fixture
async def node(server: Server, site: Site) -> AsyncIterator[Node]:
    node = Node(await server.start())
    yield node
    await node.close()


async def test_the_first_is_whole_and_the_others_say_what_changed(site: Site, node: Node) -> None:
    whole = Heartbeat(NodeId("n"), "i", (STAGE,), 1000, HugePages(4, 2))
    assert await site.until(0, 1) == [whole]
    worked = replace(STAGE, steps_done=5)
    node.hold(worked)
    assert (await site.until(0, 2))[1] == HeartbeatChange((worked,))
    node.hold()
    gone = HeartbeatChange(removed=(StageKey(STAGE.deployment, 0),), urgent=True)
    assert (await site.until(0, 3))[2] == gone
    assert (await site.until(0, 4))[3] == NOTHING, "it still says that it lives"


async def test_a_new_stream_begins_with_a_whole_one(site: Site, node: Node) -> None:
    await site.until(0, 2)
    site.hang_up.set()
    first, *_ = await site.until(1, 2)
    assert isinstance(first, Heartbeat) and first.stages == (STAGE,)
    assert len(site.registered) == 2, "a node that is not known any more registers again"


async def test_a_heartbeat_behind_the_answer_to_a_release_does_not_name_the_stage(
    site: Site, node: Node
) -> None:
    """Also for a change that was pending when the stage was released."""
    await site.until(0, 1)
    for number in range(2, 22):
        node.hold(replace(STAGE, epoch=Epoch(number)))
        await asyncio.sleep(PROMPT_HEARTBEAT_S + 0.001 * (number - 6))
        node.hold()
        node.client.send_results((CommandResult(OperationId(f"release {number}")),))
        async with asyncio.timeout(DEADLINE_S), site.came:
            await site.came.wait_for(lambda: isinstance(site.streams[0][-1], CommandResult))
        node.client.changed()
        said = len(site.streams[0])
        await site.until(0, said)
        assert not site.streams[0][said].stages


@pytest.mark.parametrize("holds", [True, False])
async def test_how_often_a_node_says_that_it_lives_goes_by_whether_it_holds_a_stage(
    site: Site, server: Server, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    """Either is soon enough for no ping to be sent between two of them."""
    assert (HOLDING_INTERVAL_S, IDLE_INTERVAL_S) == (
        0.9,
        1.8,
    ) and IDLE_INTERVAL_S < CONTROL_KEEPALIVE_S
    for name, used in (("HOLDING_INTERVAL_S", holds), ("IDLE_INTERVAL_S", not holds)):
        monkeypatch.setattr(commands, name, 0.005 if used else 1e6)
    node = Node(await server.start())
    node.hold(*(STAGE,) * holds)
    await site.until(0, 20)
    await node.close()


async def test_a_node_that_is_refused_tries_again_twice_a_second(
    site: Site, server: Server
) -> None:
    """However often it was refused before."""
    site.refuses = True
    node = Node(await server.start())
    async with asyncio.timeout(DEADLINE_S):
        while len(site.registered) < 9:  # noqa: ASYNC110 (what is watched has no event)
            await asyncio.sleep(0.01)
    await node.close()
    gaps = [later - earlier for earlier, later in itertools.pairwise(site.registered[-5:])]
    # The least: under load any of them may be longer.
    assert min(gaps) < 1.0


def test_nodes_do_not_come_back_all_at_once() -> None:
    delays = [drawn(MAX_RETRY_S) for _ in range(1000)]
    assert max(delays) <= MAX_RETRY_S and min(delays) >= MAX_RETRY_S / 2
    shares = [
        sum(low <= delay / MAX_RETRY_S < low + 0.1 for delay in delays)
        for low in (0.5, 0.6, 0.7, 0.8, 0.9)
    ]
    assert min(shares) > 100
