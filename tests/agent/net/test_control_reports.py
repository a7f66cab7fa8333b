"""A node's measurements on their way to a listening coordinator: progress, the report, and only
then the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_agent.net.control import ControlClient
from edgeshard_agent.net.streams import Reconnecting

from edgeshard import WIRE_VERSION
from edgeshard.domain.control.commands import (
    CommandProgress,
    CommandResult,
    ControlMessage,
    MeasureCompute,
    ProbeLinks,
    ProfileReport,
    Registration,
)
from edgeshard.domain.errors import InternalError, InvalidArgumentError, UnavailableError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts, StagePhase, StageStatus
from edgeshard.domain.nodes.profile import Effort, LinkProfile, MeasuredLink
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.proto.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.control import agent_message_from_wire, command_to_wire

pytestmark = pytest.mark.timing

FACTS = DeviceFacts("cpu", "x", 1, 100, 50, False, "x")
LINK = MeasuredLink(NodeId("n"), NodeId("m"), LinkProfile(1e-3, 1e8, 0.0, 9, 1 << 20))
PROBE = ProbeLinks(())


class Site(CoordinatorServiceServicer):
    """Sends one command on each stream, and ends the stream when the node answers or `hang_up` is
    set."""

    def __init__(self, command: ControlMessage) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.heartbeats: list[tuple[str, Any]] = []
        self.registered: list[pb.RegisterRequest] = []
        self.hang_up = asyncio.Event()
        self._command = command

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        self.registered.append(request)
        return pb.RegisterResponse()

    async def ReportProfile(
        self, request: pb.ReportProfileRequest, context: Any
    ) -> pb.ReportProfileResponse:
        if request.node_id != "n":
            raise InvalidArgumentError("node_id is not known here", field="node_id")
        self.heard.append(("report", request))
        return pb.ReportProfileResponse()

    async def Control(self, request_iterator: Any, context: Any) -> None:
        await context.read()
        await context.write(command_to_wire(OperationId("op"), self._command))
        hang_up = asyncio.create_task(self.hang_up.wait())
        while True:
            reading = asyncio.create_task(context.read())
            await asyncio.wait({reading, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return
            message = reading.result()
            if not isinstance(message, pb.ControlRequest):
                return
            kind = message.WhichOneof("message") or ""
            (self.heartbeats if "heartbeat" in kind else self.heard).append((kind, message))


async def no_huge_pages(stages: object) -> None:
    """As on a system that does not tell."""


class Node:
    """A control client that answers each command as `answer` does."""

    def __init__(self, address: str, starting: bool = False) -> None:
        self.channel = open_channel(address, None)
        self.lost = 0
        self.commands: asyncio.Queue[ControlMessage] = asyncio.Queue()
        registration = Registration(
            NodeId("n"), NodeName("n"), "127.0.0.1:1", WIRE_VERSION, FACTS, "i", starting
        )
        self.client = ControlClient(
            self.channel,
            address,
            registration,
            self._command,
            lambda: (),
            lambda: 1,
            no_huge_pages,
            self._on_lost,
        )
        self.running = asyncio.create_task(self.client.run())

    def _command(self, operation_id: OperationId, command: ControlMessage) -> None:
        self.commands.put_nowait(command)

    def _on_lost(self) -> None:
        self.lost += 1

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.channel.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (what is watched has no event)
            await asyncio.sleep(0.002)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server("127.0.0.1:0", None)
    yield server
    await server.stop(0)


@pytest.fixture
async def site(server: Server) -> Site:
    site = Site(PROBE)
    add_CoordinatorServiceServicer_to_server(site, server.grpc)
    return site


@pytest.fixture
async def node(server: Server, site: Site) -> AsyncIterator[Node]:
    node = Node(await server.start())
    node.client._reconnecting = Reconnecting(0.0)
    yield node
    await node.close()


async def test_progress_the_report_and_the_result_arrive_in_this_order(
    node: Node, site: Site
) -> None:
    assert await asyncio.wait_for(node.commands.get(), 30) == PROBE
    node.client.send(CommandProgress(OperationId("op"), 0, 2, "link to m"))
    await until(lambda: site.heard)
    await node.client.report(ProfileReport(NodeId("n"), links=(LINK,)))
    node.client.send_results((CommandResult(OperationId("op")),))
    await until(lambda: len(site.heard) == 3)
    assert [kind for kind, _ in site.heard] == ["progress", "report", "result"]
    progress, report, result = (message for _, message in site.heard)
    assert (progress.progress.what, progress.progress.total) == ("link to m", 2)
    assert report.links[0].receiver_id == "m" and not report.HasField("facts")
    assert result.result.operation_id == "op" and not result.result.HasField("failure")


async def test_a_suspicion_and_its_end_arrive_as_they_were_said(node: Node, site: Site) -> None:
    suspected = LinkSuspected(
        DeploymentName("tales"), Epoch(3), 2, 0, recovered=False, why="nothing came back"
    )
    recovered = replace(suspected, recovered=True, why="")
    for said in (suspected, recovered):
        node.client.send(said)
    await until(lambda: len(site.heard) == 2)
    assert [agent_message_from_wire(message) for _, message in site.heard] == [suspected, recovered]


async def test_reported_facts_are_what_the_node_registers_with_later(
    node: Node, site: Site
) -> None:
    await asyncio.wait_for(node.commands.get(), 30)
    await node.client.report(ProfileReport(NodeId("n"), replace(FACTS, memory_budget_bytes=70)))
    assert site.heard[-1][1].facts.memory_budget_bytes == 70
    site.hang_up.set()
    await until(lambda: len(site.registered) > 1)
    assert [request.facts.memory_budget_bytes for request in site.registered[:2]] == [50, 70]


async def test_a_node_counts_as_registered_once_its_stream_has_been_answered(
    server: Server,
) -> None:
    """Between the call and the stream the coordinator refuses to deploy to it."""
    site = Site(PROBE)
    hello = asyncio.Event()
    answer = asyncio.Event()

    async def control(request_iterator: Any, context: Any) -> None:
        await context.read()
        hello.set()
        await answer.wait()
        await context.send_initial_metadata(())
        await site.hang_up.wait()

    site.Control = control  # type: ignore[method-assign]
    add_CoordinatorServiceServicer_to_server(site, server.grpc)
    node = Node(await server.start())
    await asyncio.wait_for(hello.wait(), 30)
    assert len(site.registered) == 1 and not node.client.joined.is_set()
    answer.set()
    await asyncio.wait_for(node.client.joined.wait(), 30)
    await node.close()


async def test_what_no_message_holds_ends_neither_the_node_nor_the_stream(
    node: Node, site: Site
) -> None:
    node.client.send(CommandProgress(OperationId("op"), 2**70, 2, "more than a number on the wire"))
    node.client.send_results(
        (CommandResult(OperationId("op"), InternalError("no text", field="caf\udce9")),)
    )
    large = StageStatus(
        DeploymentName("x" * (17 << 20)), Epoch(1), 0, LayerRange(0, 1), StagePhase.READY
    )
    node.client.send_results((CommandResult(OperationId("large"), stage=large),))
    await until(lambda: len(site.heard) == 2 or node.lost)
    results = [(kind, m.result.operation_id, m.result.failure.reason) for kind, m in site.heard]
    assert results == [("result", "op", "INTERNAL"), ("result", "large", "INTERNAL")]
    assert not node.running.done() and not node.lost


async def test_dumps_of_a_stream_that_ended_are_not_sent_on_the_next(
    node: Node, site: Site
) -> None:
    """Written without a pause in between, so that nothing is sent before the stream ends."""
    await until(node.client.joined.is_set)
    node.client.send_dump(OperationId("dump"), b"{}")
    node.client.send_results((CommandResult(OperationId("op")),))
    node.client._drop_dumps()
    await until(lambda: site.heard)
    assert [kind for kind, _ in site.heard] == ["result"]


async def test_a_refused_report_is_a_typed_error(node: Node) -> None:
    await node.client.joined.wait()
    with pytest.raises(InvalidArgumentError) as refusal:
        await node.client.report(ProfileReport(NodeId("stranger")))
    assert refusal.value.field == "node_id"


async def test_every_stream_that_ends_is_told(node: Node, site: Site) -> None:
    await asyncio.wait_for(node.commands.get(), 30)
    assert node.lost == 0
    site.hang_up.set()
    await until(lambda: node.lost >= 1 and len(site.registered) > 1)


async def test_a_command_to_measure_arrives_whole(server: Server) -> None:
    config = {"model_type": "llama", "rope_theta": 1e4}
    measure = MeasureCompute(config, DType.BFLOAT16, effort=Effort.QUICK, again=True)
    add_CoordinatorServiceServicer_to_server(Site(measure), server.grpc)
    node = Node(await server.start())
    assert await asyncio.wait_for(node.commands.get(), 30) == measure
    await node.close()


async def test_a_node_that_has_started_says_so_over_the_stream_it_has(
    server: Server, site: Site
) -> None:
    node = Node(await server.start(), starting=True)
    await asyncio.wait_for(node.client.joined.wait(), 30)
    assert [request.starting for request in site.registered] == [
        True
    ] and not node.client.placeable.is_set()
    node.client.started(replace(FACTS, memory_budget_bytes=70))
    await asyncio.wait_for(node.client.placeable.wait(), 30)
    assert [(r.starting, r.facts.memory_budget_bytes) for r in site.registered] == [
        (True, 50),
        (False, 70),
    ]
    assert node.lost == 0
    await node.close()


async def test_a_node_that_starts_while_it_has_no_coordinator_says_it_with_its_next_registration(
    server: Server, site: Site
) -> None:
    node = Node(await server.start(), starting=True)
    node.client._reconnecting = Reconnecting(0.0)
    await asyncio.wait_for(node.client.joined.wait(), 30)
    refused: list[bool] = []
    real = site.Register

    async def register(request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        if not request.starting and not refused:
            refused.append(True)
            raise UnavailableError("the coordinator restarts")
        return await real(request, context)

    site.Register = register  # type: ignore[method-assign]
    node.client.started(FACTS)
    site.hang_up.set()
    await asyncio.wait_for(node.client.placeable.wait(), 30)
    assert not site.registered[-1].starting
    await node.close()
