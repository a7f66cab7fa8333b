"""The lab's links: bytes take turns, delays overlap."""

from __future__ import annotations

import asyncio

import pytest
from edgeshard_agent.emulation import EmulatedLink, LinkShape
from edgeshard_agent.net.link_sender import OpenStream, Outbox

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.link import LinkPadding
from edgeshard.domain.requests.step import ForwardStep, Span, StepPlan
from edgeshard.wire.frames import Frame
from edgeshard.wire.link import LinkMessage


def test_frames_queue_for_bandwidth_and_share_the_delay() -> None:
    link = LinkShape(bandwidth_bps=8000, latency_s=0.5)
    assert link.arrival(10.0, 1000) == pytest.approx(11.5)
    assert link.arrival(10.0, 1000) == pytest.approx(12.5), (
        "behind the first, its delay in parallel"
    )
    assert link.arrival(20.0, 500) == pytest.approx(21.0), "an idle link owes nothing"


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0, 0), (-1, 0), (float("nan"), 0), (1, -1), (1, float("inf"))]
)
def test_impossible_links_are_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(InvalidArgumentError):
        LinkShape(bandwidth, latency)


async def test_a_step_is_padded_at_once_and_written_when_it_has_arrived() -> None:
    link = EmulatedLink(
        bandwidth_bps=8e6, latency_s=0.05, activation_bytes=lambda tokens: 10_000 * tokens, window=2
    )
    loop = asyncio.get_running_loop()
    outbox = Outbox(2)
    wake = asyncio.Event()
    written: list[tuple[str, float]] = []

    async def write_step(step: int, frames: list[Frame]) -> None:
        written.append((f"step {step}", loop.time() - began))

    async def write(message: LinkMessage) -> None:
        assert isinstance(message, LinkPadding)
        written.append((f"padding {message.size_bytes}", loop.time() - began))

    link.note(ForwardStep(0, StepPlan(spans=(Span(1, 0, 1),)), None))
    outbox.put(0, [])
    began = loop.time()
    carrying = asyncio.create_task(
        link.carry(OpenStream(outbox, wake, lambda: len(written) == 2, write_step, write))
    )
    async with asyncio.timeout(10):
        while len(written) < 2:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.001)
        wake.set()
        await carrying
    assert [what for what, _ in written] == ["padding 10000", "step 0"]
    assert written[0][1] < 0.05 and written[1][1] >= 0.06, "10 ms for its bytes, then the delay"
