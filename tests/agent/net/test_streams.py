"""Long-lived streams that flap, are replaced or end: they come back, they are ended, and no task
outlives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from edgeshard_agent.net import attach
from edgeshard_agent.net.attach import HeadStream
from edgeshard_agent.net.control import ControlClient
from edgeshard_agent.net.link_receiver import LinkReceiver, StageServicer
from edgeshard_agent.net.streams import Reconnecting

from edgeshard import WIRE_VERSION
from edgeshard.domain.control.commands import CommandResult, Registration
from edgeshard.domain.errors import StaleEpochError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, OperationId, RequestId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.requests.generation import FinishReason, Token
from edgeshard.domain.requests.head import HeadEvent, HeldRequest, RequestEnd, StartRequest
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.proto.v1 import head_pb2, stage_pb2
from edgeshard.proto.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from edgeshard.proto.v1.head_pb2_grpc import HeadServiceServicer, add_HeadServiceServicer_to_server
from edgeshard.proto.v1.stage_pb2_grpc import StageServiceStub, add_StageServiceServicer_to_server
from edgeshard.rpc import link_watch
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.frames import FrameContract, FrameReader
from edgeshard.wire.status import abort
from tests.agent.net import test_ring as ring_module

pytestmark = pytest.mark.timing

CUTS = [LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)]
NAME = DeploymentName("tales")
NODE = NodeName("a")


class Quiet:
    """A head that has nothing to do."""

    head_for_s = 7.5

    def held(self) -> tuple[HeldRequest, ...]:
        return ()

    def stream_lost(self) -> None: ...


class FlappingFront(HeadServiceServicer):
    """Ends every Attach after a few messages."""

    def __init__(self) -> None:
        self.attached = 0

    async def Attach(
        self, request_iterator: AsyncIterator[head_pb2.AttachRequest], context: Any
    ) -> None:
        self.attached += 1
        await context.send_initial_metadata(())
        for _ in range(self.attached % 7):
            await context.read()
        if self.attached % 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "flap")


class CountingFront(HeadServiceServicer):
    """Keeps every message as it came."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[head_pb2.AttachRequest] = asyncio.Queue()

    async def Attach(
        self, request_iterator: AsyncIterator[head_pb2.AttachRequest], context: Any
    ) -> None:
        await context.send_initial_metadata(())
        async for message in request_iterator:
            self.messages.put_nowait(message)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server("127.0.0.1:0", None)
    yield server
    await server.stop(0)


async def test_a_head_attaches_again_however_its_stream_ends_while_tokens_flow(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "RETRY_S", 0.0)
    front = FlappingFront()
    add_HeadServiceServicer_to_server(front, server.grpc)
    stream = HeadStream(
        partial(open_channel, await server.start(), None), NodeId("n"), NAME, Epoch(1)
    )
    stream.start(Quiet())  # type: ignore[arg-type]
    task = stream._task
    assert task is not None
    async with asyncio.timeout(60):
        while front.attached < 150 and not task.done():
            stream.emit(HeadEvent(RequestId("r"), Token(1, 2, "x")))
            await asyncio.sleep(0)
    assert not task.done(), f"the head stream gave up after {front.attached} streams: {task!r}"
    await stream.stop()


class ForgetfulFront(HeadServiceServicer):
    """Knows nothing of the epoch at first, as a coordinator on a wrong disk."""

    def __init__(self) -> None:
        self.refused = 0
        self.taken = asyncio.Event()

    async def Attach(
        self, request_iterator: AsyncIterator[head_pb2.AttachRequest], context: Any
    ) -> None:
        if self.refused < 2:
            self.refused += 1
            await abort(context, StaleEpochError("does not await this head", field="epoch"))
        await context.send_initial_metadata(())
        self.taken.set()
        await asyncio.Event().wait()


async def test_a_head_that_is_refused_comes_back_for_a_coordinator_that_awaits_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its activate was answered long ago, so that no command would have it dial again."""
    monkeypatch.setattr(attach, "STALE_RETRY_S", 0.01)
    front = ForgetfulFront()
    add_HeadServiceServicer_to_server(front, server.grpc)
    stream = HeadStream(
        partial(open_channel, await server.start(), None), NodeId("n"), NAME, Epoch(1)
    )
    stream.start(Quiet())  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await front.taken.wait()
    await stream.stop()


async def test_tokens_that_are_there_together_go_in_one_message_in_order(server: Server) -> None:
    front = CountingFront()
    add_HeadServiceServicer_to_server(front, server.grpc)
    stream = HeadStream(
        partial(open_channel, await server.start(), None), NodeId("n"), NAME, Epoch(1)
    )
    stream.start(Quiet())  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await stream.attached.wait()
        for number in range(3):
            stream.emit(HeadEvent(RequestId(f"r{number}"), Token(1, number, "x")))
        stream.emit(HeadEvent(RequestId("r0"), RequestEnd(FinishReason.LENGTH, "")))
        stream.emit(HeadEvent(RequestId("r1"), Token(2, 3, "x")))
        kinds = [(await front.messages.get()) for _ in range(4)]
    assert [message.WhichOneof("message") for message in kinds] == [
        "hello",
        "tokens",
        "finished",
        "token",
    ]
    assert kinds[0].hello.head_for_s == Quiet.head_for_s
    assert [token.request_id for token in kinds[1].tokens.tokens] == ["r0", "r1", "r2"]
    await stream.stop()


class Starting(Quiet):
    """A head that records the requests it receives."""

    def __init__(self) -> None:
        self.started: list[StartRequest] = []

    def start(self, start: StartRequest) -> None:
        self.started.append(start)


async def test_an_answer_that_grpc_would_refuse_fails_its_request_and_no_other(
    server: Server,
) -> None:
    front = CountingFront()
    add_HeadServiceServicer_to_server(front, server.grpc)
    stream = HeadStream(
        partial(open_channel, await server.start(), None), NodeId("n"), NAME, Epoch(1)
    )
    stream.start(Quiet())  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await stream.attached.wait()
        # Each of these can be sent, and all together cannot.
        for number in range(3):
            stream.emit(HeadEvent(RequestId(f"r{number}"), Token(1, 7, "x" * (3 << 20))))
        stream.emit(HeadEvent(RequestId("large"), Token(1, 7, "x" * (17 << 20))))
        stream.emit(HeadEvent(RequestId("large"), RequestEnd(FinishReason.LENGTH, "")))
        stream.emit(HeadEvent(RequestId("small"), Token(1, 7, "x")))
        messages = [(await front.messages.get()) for _ in range(6)]
    kinds = [message.WhichOneof("message") for message in messages]
    assert kinds == ["hello", "token", "token", "token", "failed", "token"]
    assert (messages[4].failed.request_id, messages[4].failed.failure.reason) == (
        "large",
        "ANSWER_TOO_LARGE",
    )
    assert messages[5].token.request_id == "small"
    await stream.stop()


async def test_a_request_that_the_head_cannot_read_is_refused_and_the_next_is_served(
    server: Server,
) -> None:
    front = ring_module.Front()
    add_HeadServiceServicer_to_server(front, server.grpc)
    stream = HeadStream(
        partial(open_channel, await server.start(), None), NodeId("n"), NAME, Epoch(1)
    )
    head = Starting()
    stream.start(head)  # type: ignore[arg-type]
    both = head_pb2.Generation(prompt="text", prompt_tokens=[1])
    refused = front.ended["both"] = asyncio.get_running_loop().create_future()
    front.down.put_nowait(
        head_pb2.AttachResponse(start=head_pb2.StartRequest(request_id="both", generation=both))
    )
    front.start("next", [1])
    async with asyncio.timeout(60):
        assert await refused == "failed"
        while not head.started:  # noqa: ASYNC110 (a head has no event for it)
            await asyncio.sleep(0.001)
    assert head.started[0].request_id == "next"
    await stream.stop()


class BeaconFront(HeadServiceServicer):
    """Sends keepalives unless it is `silent`, none after a `last` one, and counts streams and
    messages."""

    def __init__(self) -> None:
        self.streams = 0
        self.answers = self.tokens = self.beacons = 0
        self.silent = self.last = False

    async def Attach(
        self, request_iterator: AsyncIterator[head_pb2.AttachRequest], context: Any
    ) -> None:
        self.streams += 1
        await context.send_initial_metadata(())
        reading = asyncio.create_task(self._read(request_iterator))
        while not self.last:
            if not self.silent:
                await context.write(
                    head_pb2.AttachResponse(beacon=head_pb2.HeadBeacon(follows=True))
                )
                self.beacons += 1
            await asyncio.sleep(0.02)
        await context.write(head_pb2.AttachResponse(beacon=head_pb2.HeadBeacon()))
        await reading

    async def _read(self, messages: AsyncIterator[head_pb2.AttachRequest]) -> None:
        async for message in messages:
            self.answers += message.WhichOneof("message") == "beacon"
            self.tokens += message.WhichOneof("message") == "token"


@asynccontextmanager
async def beaconing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[BeaconFront, HeadStream]]:
    """A head that suspects after 0.5 s of silence, at a coordinator whose first keepalives it has
    answered."""
    monkeypatch.setattr(link_watch, "SUSPECT_S", 0.5)
    front = BeaconFront()
    add_HeadServiceServicer_to_server(front, server.grpc)
    stream = HeadStream(
        partial(open_channel, await server.start(), None), NodeId("n"), NAME, Epoch(1)
    )
    stream.start(Quiet())  # type: ignore[arg-type]
    await until(lambda: front.answers >= 3)
    yield front, stream
    await stream.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (nobody has an event for it)
            await asyncio.sleep(0.01)


async def test_a_head_notices_a_coordinator_that_is_silent_and_dials_anew_only_if_it_stays_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beaconing(server, monkeypatch) as (front, stream):
        front.silent = True
        await until(lambda: stream.suspicions == 1)
        assert front.streams == 1 and stream.attached.is_set(), "it may only stand still"
        await until(lambda: front.streams == 2 and stream.attached.is_set())
        assert stream.suspicions == 1, "one incident is told once"


async def test_a_stream_goes_on_with_a_coordinator_that_stood_still(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beaconing(server, monkeypatch) as (front, stream):
        front.silent = True
        await until(lambda: stream.suspicions == 1)
        front.silent = False
        answers = front.answers
        await until(lambda: front.answers >= answers + 80)
        assert (front.streams, stream.suspicions) == (1, 1)


async def test_tokens_are_answer_enough_to_beacons(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beaconing(server, monkeypatch) as (front, stream):
        monkeypatch.setattr(attach, "BEACON_S", 60.0)
        stream.emit(HeadEvent(RequestId("r"), Token(5, 7, "word")))
        await until(lambda: front.tokens == 1)
        seen = front.beacons
        await until(lambda: front.beacons >= seen + 2)  # an answer may have been in flight
        answers = front.answers
        await until(lambda: front.beacons >= seen + 12)
        assert front.answers == answers and stream.suspicions == 0
        monkeypatch.setattr(attach, "BEACON_S", 0.0)
        await until(lambda: front.answers >= answers + 3)


async def test_a_head_without_requests_waits_for_no_beacon(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beaconing(server, monkeypatch) as (front, stream):
        front.last = True
        await asyncio.sleep(1.6)
        assert front.streams == 1 and stream.suspicions == 0


@pytest.mark.parametrize(
    "fault", [asyncio.InvalidStateError("RPC already finished."), ValueError("?")], ids=repr
)
async def test_a_write_on_a_finished_call_is_a_lost_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """The error that grpc raises if a write meets the end of its call before the reader has seen
    it."""
    monkeypatch.setattr(attach, "RETRY_S", 0.0)
    front = ring_module.Front()
    add_HeadServiceServicer_to_server(front, server.grpc)
    stream = HeadStream(
        partial(open_channel, await server.start(), None), NodeId("n"), NAME, Epoch(1)
    )
    faults, again = [fault], asyncio.Event()

    async def write(call: Any) -> None:
        if faults:
            raise faults.pop()
        again.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(stream, "_write", write)
    stream.start(Quiet())  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await again.wait()
    await stream.stop()


class Site(CoordinatorServiceServicer):
    """A coordinator that knows everybody."""

    def __init__(self) -> None:
        self.streams = 0
        self.results: list[str] = []

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        return pb.RegisterResponse()

    async def Control(
        self, request_iterator: AsyncIterator[pb.ControlRequest], context: Any
    ) -> Any:
        self.streams += 1
        async for message in request_iterator:
            if message.WhichOneof("message") == "result":
                self.results.append(message.result.operation_id)


async def no_huge_pages(stages: object) -> None:
    """As on a system that does not tell."""


async def test_a_node_survives_a_write_on_a_finished_control_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    add_CoordinatorServiceServicer_to_server(site, server.grpc)
    address = await server.start()
    channel = open_channel(address, None)
    facts = DeviceFacts("cpu", "x", 1, 1, 1, False, "x")
    registration = Registration(NodeId("n"), NodeName("n"), "127.0.0.1:1", WIRE_VERSION, facts, "i")
    client = ControlClient(
        channel, address, registration, lambda i, c: None, lambda: (), lambda: 1, no_huge_pages
    )
    client._reconnecting = Reconnecting(0.0)
    broken = [True]
    write_out = client._write

    async def write(call: Any) -> None:
        if broken:
            broken.pop()
            raise asyncio.InvalidStateError("RPC already finished.")
        await write_out(call)

    monkeypatch.setattr(client, "_write", write)
    running = asyncio.create_task(client.run())
    client.send_results((CommandResult(OperationId("op"), None),))
    async with asyncio.timeout(60):
        while not site.results and not running.done():  # noqa: ASYNC110 (either may happen)
            await asyncio.sleep(0.001)
    assert not running.done() and site.results == ["op"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await channel.close()


@asynccontextmanager
async def receiving(server: Server) -> AsyncIterator[tuple[StageServicer, Callable[[], Any]]]:
    """A servicer that receives for stage 1, and a function for a neighbour's dial: each call makes
    a stream and sends a hello.
    """
    servicer = StageServicer()
    add_StageServiceServicer_to_server(servicer, server.grpc)
    channel = open_channel(await server.start(), None)
    contract = FrameContract(NAME, 1, DType.FLOAT32, 4, 8, 2)
    servicer.open(NAME, 1, LinkReceiver(0, NODE, contract, lambda step: None, lambda step: None))
    hello = stage_pb2.LinkHello(
        deployment=NAME,
        epoch=1,
        from_stage=0,
        to_stage=1,
        dialler_sends=True,
        wire_version=WIRE_VERSION,
    )

    async def dial() -> Any:
        call = StageServiceStub(channel).Exchange()
        await call.write(stage_pb2.ExchangeRequest(message=stage_pb2.LinkMessage(hello=hello)))
        return call

    async with asyncio.timeout(60):
        yield servicer, dial
    await channel.close()


async def read_out(call: Any) -> None:
    """To the end of the call, which it raises."""
    while isinstance(await call.read(), stage_pb2.ExchangeResponse):
        pass


async def test_a_closed_or_replaced_link_is_ended_and_not_left_hanging(server: Server) -> None:
    async with receiving(server) as (servicer, dial):
        first = await dial()
        assert isinstance(await first.read(), stage_pb2.ExchangeResponse)
        second = await dial()
        assert isinstance(await second.read(), stage_pb2.ExchangeResponse)
        with pytest.raises(grpc.aio.AioRpcError) as replaced:
            await read_out(first)
        servicer.close(NAME, 1)
        with pytest.raises(grpc.aio.AioRpcError) as closed:
            await read_out(second)
    assert {replaced.value.code(), closed.value.code()} == {grpc.StatusCode.UNAVAILABLE}


async def test_a_link_that_is_closed_while_it_is_welcomed_ends_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving(server) as (servicer, dial):
        # The reader starts again just before the welcome is written: the stage closes in the midst
        # of that.
        monkeypatch.setattr(
            FrameReader,
            "restart_stream",
            lambda _: asyncio.get_running_loop().call_soon(servicer.close, NAME, 1),
        )
        call = await dial()
        with pytest.raises(grpc.aio.AioRpcError) as closed:
            await read_out(call)
    assert closed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stopped_ring_leaves_no_task(tiny_llama: Path, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with ring_module.open_ring(tiny_llama, CUTS, tmp_path) as ring:
        await ring.front.start("r", [3, 4, 5], 8)

    def left() -> list[asyncio.Task[Any]]:
        tasks = asyncio.all_tasks() - before
        return [
            task for task in tasks if "edgeshard_agent" in repr(task) or "Event.wait" in repr(task)
        ]

    # gRPC ends the handlers of its calls in its own time; a task of a link or a head would stay for
    # ever.
    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:  # noqa: ASYNC110 (tasks that end have no event in common)
        await asyncio.sleep(0.005)
    assert not left(), left()


@pytest.mark.parametrize(("prompt", "new"), [(200, 56), (255, 1), (1, 255)])
async def test_a_request_may_fill_the_context_to_its_last_position(
    tiny_llama: Path, tmp_path: Path, prompt: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that are no multiple of a block, more of them than the window holds."""
    import torch
    from transformers import LlamaForCausalLM

    from edgeshard.planning.costs import step_budget

    monkeypatch.setattr(step_budget, "STEP_TOKENS", 23)
    ids = [(7 * i) % 90 for i in range(prompt)]
    model: Any = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        tensor = torch.tensor([ids])
        made = model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    async with ring_module.open_ring(tiny_llama, CUTS, tmp_path) as ring:
        for name, wanted in (("over", new + 1), ("r", new)):
            await ring.front.start(name, ids, wanted)
            assert ring.front.tokens[name] == made[0, prompt:].tolist()
        await ring.until(lambda: all(s.status().kv_bytes_in_use == 0 for s in ring.stages))
