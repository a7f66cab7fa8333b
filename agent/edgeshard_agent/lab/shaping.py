"""The lab's links in user space: bandwidth and delay of one direction, with frames in flight."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.link import LinkPadding
from edgeshard.domain.requests.step import ForwardStep, WireStep
from edgeshard.wire.frames import PART_BYTES, Frame, frame_bytes
from edgeshard_agent.net.link_sender import OpenStream

TIMER_S = 0.001
"""The most that timers of the event loop come late. The lab's links take milliseconds, so the rest is slept in the
loop: nothing that it keeps waiting is due sooner."""


class LinkShape:
    """The bandwidth and delay of a link: when bytes put on it now are all at the other end.

    The bytes occupy the link one frame after the other, at `bandwidth_bps` bits per second, and then travel for
    `latency_s` seconds without keeping the next frame waiting.
    """

    def __init__(self, bandwidth_bps: float, latency_s: float) -> None:
        if not 0 < bandwidth_bps < float("inf"):
            raise InvalidArgumentError(f"bandwidth_bps {bandwidth_bps} must be above 0", field="bandwidth_bps")
        if not 0 <= latency_s < float("inf"):
            raise InvalidArgumentError(f"latency_s {latency_s} must be 0 or more", field="latency_s")
        self.bandwidth_bps = bandwidth_bps
        self.latency_s = latency_s
        self._free_at = float("-inf")

    def arrival(self, now: float, size_bytes: int) -> float:
        """Time of arrival of a frame of `size_bytes` sent at `now`; takes its place on the link."""
        self._free_at = max(now, self._free_at) + 8 * size_bytes / self.bandwidth_bps
        return self._free_at + self.latency_s


@asynccontextmanager
async def shaped_way(there: LinkShape, back_latency_s: float, size_bytes: int) -> AsyncIterator[None]:
    """The way of a probe's payload over a shaped link, and of its acknowledgement back."""
    now = time.perf_counter()
    await asyncio.sleep(there.arrival(now, size_bytes) - now)
    yield
    await asyncio.sleep(back_latency_s)


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    due: float
    frames: list[Frame]


class EmulatedLink(LinkShape):
    """A shaped link that pads steps to the size of the emulated model's, and holds each until it would have arrived.

    `activation_bytes` returns the bytes of the hidden states of a number of tokens; a returned step
    has none.
    """

    def __init__(
        self, bandwidth_bps: float, latency_s: float, activation_bytes: Callable[[int], int], window: int
    ) -> None:
        super().__init__(bandwidth_bps, latency_s)
        self._activation_bytes = activation_bytes
        self._window = window
        self._tokens: dict[int, int] = {}

    def note(self, step: WireStep) -> None:
        self._tokens[step.number] = step.plan.token_count if isinstance(step, ForwardStep) else 0
        self._tokens.pop(step.number - 2 * self._window, None)

    async def carry(self, stream: OpenStream) -> None:
        loop, flight = asyncio.get_running_loop(), deque[_InFlight]()
        while not stream.ended():
            stream.wake.clear()
            while (item := stream.outbox.take()) is not None:
                await self._put(stream, flight, *item)
            while flight and flight[0].due <= loop.time() + TIMER_S:
                arrived = flight.popleft()
                time.sleep(max(0.0, arrived.due - loop.time()))  # noqa: ASYNC251 (see TIMER_S)
                await stream.write_step(arrived.step, arrived.frames)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(flight[0].due - TIMER_S if flight else None):
                    await stream.wake.wait()

    async def _put(self, stream: OpenStream, flight: deque[_InFlight], step: int, frames: list[Frame]) -> None:
        """A step's padding is sent while the emulated link is busy with the step, so that none is
        left when it is due.
        """
        size = sum(frame_bytes(frame) for frame in frames)
        padding = max(0, self._activation_bytes(self._tokens.get(step, 0)) - size)
        flight.append(_InFlight(step, self.arrival(asyncio.get_running_loop().time(), size + padding), frames))
        while padding:
            piece = min(padding, PART_BYTES)
            await stream.write(LinkPadding(piece))
            padding -= piece
