"""Links over real streams and a proxy that fails silently: the suspicions, and how soon they
arise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from edgeshard_agent.net import link_sender
from edgeshard_agent.net.link_receiver import LinkReceiver, StageServicer
from edgeshard_agent.net.link_sender import Hop, LinkSender

from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.domain.requests.step import ForwardStep, Span, StepPlan, Tensor, WireStep
from edgeshard.proto.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from edgeshard.rpc.link_watch import BEACON_S, SUSPECT_S, TICK_S
from edgeshard.rpc.server import Server
from edgeshard.wire.frames import FrameContract, encode_step
from tests.support.stalling_proxy import StallingProxy, Way

pytestmark = pytest.mark.timing

NAME = DeploymentName("tales")
NODE = NodeName("a")
WIDTH = 1024
WINDOW = 64
SOON_S = 60.0
NOTICED_S = 2.5


class Line:
    """A sender and a receiver with a proxy between them, and how late this loop was so far."""

    def __init__(self, sender: LinkSender, proxy: StallingProxy) -> None:
        self.sender = sender
        self.proxy = proxy
        self.arrived: asyncio.Queue[WireStep] = asyncio.Queue()
        self.suspected: asyncio.Queue[LinkSuspected] = asyncio.Queue()
        self.failures: list[EdgeShardError] = []
        self.late_s = 0.0
        self._steps = 0

    def send(self, size_bytes: int = 4 * WIDTH) -> None:
        tokens = size_bytes // (4 * WIDTH)
        hidden = Tensor(DType.FLOAT32, (tokens, WIDTH), bytes(4 * WIDTH * tokens))
        step = ForwardStep(self._steps, StepPlan(spans=(Span(1, 0, tokens),)), hidden)
        self._steps += 1
        self.sender.send(step, encode_step(NAME, 1, step, self.sender.part_bytes))

    async def received(self, count: int = 1) -> list[int]:
        async with asyncio.timeout(SOON_S):
            return [(await self.arrived.get()).number for _ in range(count)]

    async def told(self) -> LinkSuspected:
        async with asyncio.timeout(SOON_S):
            return await self.suspected.get()

    async def count_lateness(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            self.late_s += max(0.0, time.monotonic() - began - 0.02)


@asynccontextmanager
async def line(bits_per_s: float = 0.0) -> AsyncIterator[Line]:
    server, servicer = Server("127.0.0.1:0", None), StageServicer()
    add_StageServiceServicer_to_server(servicer, server.grpc)
    async with StallingProxy(await server.start(), bits_per_s).running() as proxy:
        sender = LinkSender(
            Hop(NAME, Epoch(1), 0, 1, proxy.address, NODE),
            WINDOW,
            None,
            lambda error: made.failures.append(error),
            on_suspect=lambda suspected: made.suspected.put_nowait(suspected),
        )
        made = Line(sender, proxy)
        contract = FrameContract(NAME, 1, DType.FLOAT32, WIDTH, 4096, WINDOW)
        servicer.open(
            NAME, 1, LinkReceiver(0, NODE, contract, made.arrived.put_nowait, lambda step: None)
        )
        counting = asyncio.create_task(made.count_lateness())
        sender.start()
        try:
            async with asyncio.timeout(SOON_S):
                await sender.connected.wait()
            yield made
            assert not made.failures
        finally:
            counting.cancel()
            proxy.resume()
            await sender.stop()
            await server.stop(0)


@pytest.mark.parametrize("owing", [False, True], ids=["idle", "owing"])
async def test_a_link_that_stalls_is_suspect_soon_and_recovers_without_a_lost_step(
    owing: bool,
) -> None:
    async with line() as link:
        link.send()
        assert await link.received() == [0]
        link.proxy.stall()
        began, late_s = time.monotonic(), link.late_s
        if owing:
            link.send()
        suspected = await link.told()
        assert time.monotonic() - began - (link.late_s - late_s) <= NOTICED_S
        assert suspected == LinkSuspected(
            NAME, Epoch(1), 0, 1, False, f"nothing came back for {SUSPECT_S:.1f} s"
        )
        for _ in range(2):
            link.send()
        await asyncio.sleep(1.0)
        assert link.suspected.empty() and link.arrived.empty()
        link.proxy.resume()
        assert await link.told() == LinkSuspected(NAME, Epoch(1), 0, 1, True, "")
        assert await link.received(2 + owing) == [1, 2, 3][: 2 + owing]
        assert link.suspected.empty() and link.arrived.empty() and link.proxy.connections >= 2


async def test_a_connection_that_died_alone_is_replaced_by_another() -> None:
    async with line() as link:
        link.send()
        assert await link.received() == [0]
        link.proxy.strand()
        link.send()
        assert not (await link.told()).recovered
        began, late_s = time.monotonic(), link.late_s
        assert (await link.told()).recovered and await link.received() == [1]
        assert time.monotonic() - began - (link.late_s - late_s) <= 2 * BEACON_S, (
            "it was not dialled at once"
        )


async def test_a_receiver_that_answers_but_gets_nothing_is_noticed_while_the_sender_waits() -> None:
    """More data than all buffers hold is in flight, so a write waits; keepalives are read all the
    same."""
    async with line() as link:
        link.send()
        assert await link.received() == [0]
        link.proxy.stall(Way.THERE)
        for _ in range(16):
            link.send(4 << 20)
        suspected = await link.told()
        assert "nothing that was sent was received" in suspected.why and not suspected.recovered
        link.proxy.resume()
        assert (await link.told()).recovered
        assert await link.received(16) == list(range(1, 17))


async def test_a_large_step_on_a_slow_link_raises_no_suspicion() -> None:
    """1 MiB at 1 Mbit/s takes more than eight seconds."""
    async with line(bits_per_s=1e6) as link:
        began = time.monotonic()
        link.send(1 << 20)
        assert await link.received() == [0]
        assert time.monotonic() - began > 3 * SUSPECT_S, "the link is not slow"
        await asyncio.sleep(2 * BEACON_S)
        assert link.suspected.empty() and link.proxy.connections == 1
        assert link.sender.part_bytes < 40_000, "a quarter of a second of this link is 31 kB"


async def test_a_sender_that_stood_still_itself_suspects_nobody() -> None:
    async with line() as link:
        for _ in range(2):
            await asyncio.sleep(5 * TICK_S)
            time.sleep(1.5 * SUSPECT_S)  # noqa: ASYNC251 - the event loop is what stands still
        await asyncio.sleep(2 * BEACON_S)
        link.send()
        assert await link.received() == [0]
        assert link.suspected.empty() and link.proxy.connections == 1


async def test_a_link_that_crashes_fails_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line() as link:

        async def crash(call: object, message: object) -> None:
            raise ValueError("not foreseen")

        monkeypatch.setattr(link_sender, "_write", crash)
        link.send()
        async with asyncio.timeout(SOON_S):
            while not link.failures:  # noqa: ASYNC110 (a failure has no event)
                await asyncio.sleep(0.01)
        assert isinstance(link.failures.pop(), InternalError)


async def test_a_stall_of_a_second_and_a_half_harms_nothing() -> None:
    async with line() as link:
        link.proxy.stall()
        link.send()
        await asyncio.sleep(1.5)
        link.proxy.resume()
        assert await link.received() == [0]
        await asyncio.sleep(SUSPECT_S)
        assert link.suspected.empty() and link.proxy.connections == 1
