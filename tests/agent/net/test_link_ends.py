"""How a stream of a hop ends at its receiver: with a typed error, soon, and with no operation of
gRPC cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from edgeshard_agent.net import link_receiver, streams
from edgeshard_agent.net.link_receiver import LinkReceiver, StageServicer

from edgeshard import WIRE_VERSION
from edgeshard.domain.errors import DeadlineError, EdgeShardError, UnavailableError
from edgeshard.domain.ids import DeploymentName, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.proto.v1.stage_pb2_grpc import StageServiceStub, add_StageServiceServicer_to_server
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.frames import FrameContract
from edgeshard.wire.status import from_rpc_error

pytestmark = pytest.mark.timing

NAME = DeploymentName("tales")
NODE = NodeName("a")
SOON_S = 30.0
NARROW = [
    ("grpc.http2.lookahead_bytes", 1 << 16),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
"""A caller's flow control that lets 64 KiB through until the caller reads."""
HELLO = pb.LinkHello(
    deployment=NAME,
    epoch=1,
    from_stage=0,
    to_stage=1,
    dialler_sends=True,
    wire_version=WIRE_VERSION,
)


class Watched:
    """A call's context that records which operations were cut off by a cancel, or begun while
    another one ran."""

    def __init__(self, context: Any, wrong: list[str]) -> None:
        self._context = context
        self._wrong = wrong
        self.running: set[str] = set()
        self.writing = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        return await self._run("read", self._context.read())

    async def write(self, message: Any) -> None:
        self.writing.set()
        await self._run("write", self._context.write(message))

    async def _run(self, what: str, operation: Any) -> Any:
        if what in self.running:
            self._wrong.append(f"two of {what}")
        self.running.add(what)
        try:
            return await operation
        except asyncio.CancelledError:
            self._wrong.append(what)
            raise
        finally:
            self.running.discard(what)


class WatchedServicer(StageServicer):
    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.contexts: asyncio.Queue[Watched] = asyncio.Queue()

    async def Exchange(self, request_iterator: object, context: Any) -> None:
        watched = Watched(context, self.wrong)
        self.contexts.put_nowait(watched)
        await super().Exchange(request_iterator, watched)  # type: ignore[arg-type]


class Neighbour:
    """A stage with a real server, and its dialling neighbours."""

    def __init__(
        self, servicer: WatchedServicer, channel: grpc.aio.Channel, narrow: grpc.aio.Channel
    ) -> None:
        self.servicer = servicer
        self.stub = StageServiceStub(channel)
        self.narrow = StageServiceStub(narrow)
        contract = FrameContract(NAME, 1, DType.FLOAT32, 4, 8, 2)
        servicer.open(
            NAME, 1, LinkReceiver(0, NODE, contract, lambda step: None, lambda step: None)
        )

    async def dial(self, stub: StageServiceStub | None = None) -> Any:
        call = (stub or self.stub).Exchange()
        await call.write(pb.ExchangeRequest(message=pb.LinkMessage(hello=HELLO)))
        return call


@asynccontextmanager
async def listening() -> AsyncIterator[Neighbour]:
    server, servicer = Server("127.0.0.1:0", None), WatchedServicer()
    add_StageServiceServicer_to_server(servicer, server.grpc)
    address = await server.start()
    channel, narrow = open_channel(address, None), grpc.aio.insecure_channel(address, NARROW)
    try:
        async with asyncio.timeout(SOON_S):
            yield Neighbour(servicer, channel, narrow)
    finally:
        await channel.close()
        await narrow.close()
        await server.stop(0)


async def end_of(call: Any) -> EdgeShardError:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while isinstance(await call.read(), pb.ExchangeResponse | pb.ProbeResponse):
            pass
    return from_rpc_error(ended.value)


@asynccontextmanager
async def stuck_in_a_write(
    neighbour: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Any, Watched]]:
    """A stream whose receiver writes more than the flow control of a caller that does not read lets
    through."""
    with monkeypatch.context() as patch:
        large = pb.ExchangeResponse(message=pb.LinkMessage(padding=bytes(1 << 20)))
        patch.setattr(link_receiver, "exchange_response", lambda message: large)
        call = await neighbour.dial(neighbour.narrow)
        watched = await neighbour.servicer.contexts.get()
        await watched.writing.wait()
    yield call, watched
    call.cancel()


async def test_a_newer_stream_is_served_at_once_beside_one_that_is_stuck_in_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        listening() as neighbour,
        stuck_in_a_write(neighbour, monkeypatch) as (stuck, watched),
    ):
        newer = await neighbour.dial()
        welcome = await newer.read()
        assert welcome.message.WhichOneof("message") == "welcome"
        assert not neighbour.servicer.wrong, "an operation was cut off"
        assert "write" in watched.running, "it was not stuck"
        ended = await end_of(stuck)
        assert (
            isinstance(ended, UnavailableError)
            and ended.reason == "LINK_ENDED"
            and "newer" in ended.message
        )
        newer.cancel()


async def test_a_stage_that_closes_ends_a_stream_that_is_stuck_in_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as neighbour, stuck_in_a_write(neighbour, monkeypatch) as (stuck, _):
        neighbour.servicer.close(NAME, 1)
        ended = await end_of(stuck)
        assert ended.reason == "LINK_ENDED" and "closed" in ended.message
        assert not neighbour.servicer.wrong


async def test_streams_that_replace_each_other_all_the_time_end_all_but_the_last() -> None:
    async with listening() as neighbour:
        calls = [await neighbour.dial() for _ in range(30)]
        ends = [asyncio.create_task(end_of(call)) for call in calls]
        while sum(not end.done() for end in ends) > 1:
            await asyncio.wait(
                [end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED
            )
        (left,) = (end for end in ends if not end.done())
        assert {end.result().reason for end in ends if end is not left} == {"LINK_ENDED"}
        assert not neighbour.servicer.wrong
        neighbour.servicer.close(NAME, 1)
        assert "closed" in (await left).message


async def test_a_stage_that_closes_between_a_hello_and_its_welcome_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when it enters its next epoch at that moment. The stream would belong to no stage, and
    stay."""
    async with listening() as neighbour:
        find = neighbour.servicer._find

        def found_just_before_it_closes(hello: Any, context: Any) -> LinkReceiver:
            receiver = find(hello, context)
            neighbour.servicer.close(NAME, 1)
            return receiver

        monkeypatch.setattr(neighbour.servicer, "_find", found_just_before_it_closes)
        assert (await end_of(await neighbour.dial())).reason == "LINK_ENDED"


@pytest.mark.parametrize("kind", ["Exchange", "Probe"])
async def test_a_stream_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(streams, "FIRST_REQUEST_S", 0.2)
    async with listening() as neighbour:
        ended = await end_of(getattr(neighbour.stub, kind)())
        assert isinstance(ended, DeadlineError) and ended.reason == "NOTHING_SAID"
        assert not neighbour.servicer.wrong
