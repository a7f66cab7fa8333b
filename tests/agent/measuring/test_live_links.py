"""Real frames measure a link: measured on arrival, sent to the sender, sometimes to the
coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from edgeshard_agent.measuring.live_links import LiveLinks
from edgeshard_agent.net.link_receiver import LinkReceiver, StageServicer
from edgeshard_agent.net.link_sender import Hop, LinkSender

from edgeshard.domain.control.commands import ProfileReport
from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import LinkProfile, LinkSample, MeasuredLink
from edgeshard.domain.requests.step import ForwardStep, Span, StepPlan, Tensor, WireStep
from edgeshard.profiles import links
from edgeshard.profiles.links import REPORT_INTERVAL_S, TELLING_S, Arrivals, LiveLink, refreshed
from edgeshard.proto.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from edgeshard.rpc.server import Server
from edgeshard.wire.frames import PART_BYTES, FrameContract, encode_step

pytestmark = pytest.mark.timing

KNOWN = LinkProfile(0.05, 1e8, 0.01, 20, 4 << 20)
NAME = DeploymentName("tales")
NODE = NodeName("a")
WIDTH = 1024
MIB = 1 << 20


def sample(bandwidth_bps: float, size_bytes: int = 3 * MIB) -> LinkSample:
    return LinkSample(size_bytes, 8 * size_bytes / bandwidth_bps)


def test_the_parts_behind_the_first_give_the_rate() -> None:
    arrivals = Arrivals()
    assert arrivals.part(10.0, MIB, False) is None, (
        "what came before the first part is not the link's time"
    )
    assert arrivals.part(10.1, MIB, False) is None
    found = arrivals.part(10.3, 1000, True)
    assert (
        found is not None and found.size_bytes == MIB + 1000 and found.seconds == pytest.approx(0.3)
    )
    assert arrivals.part(99.0, MIB, False) is None
    assert arrivals.part(99.5, 7, True) == LinkSample(7, 0.5), "a step before is over"


def test_a_step_of_one_part_or_on_a_fast_link_tells_nothing() -> None:
    arrivals = Arrivals()
    assert arrivals.part(1.0, MIB, True) is None
    arrivals.part(2.0, MIB, False)
    assert arrivals.part(2.0 + 0.9 * TELLING_S, MIB, True) is None


def test_traffic_changes_the_bandwidth_and_nothing_else() -> None:
    assert refreshed(KNOWN, [sample(5e7)] * 4) == KNOWN, "four steps are an accident"
    now = refreshed(KNOWN, [sample(5e7)] * 5 + [sample(1e6)] * 2)
    assert now is not None and now.bandwidth_bps == pytest.approx(5e7)
    assert replace(now, bandwidth_bps=5e7) == LinkProfile(0.05, 5e7, 0.01, 27, 4 << 20)


def test_a_changed_link_is_told_once_a_minute_at_most() -> None:
    link = LiveLink(KNOWN, 0.0)
    told = [
        (now, news)
        for now in range(200)
        if (news := link.heard(sample(5e7), float(now))) is not None
    ]
    assert [now for now, _ in told] == [REPORT_INTERVAL_S], "the same change is told once"
    assert told[0][1].bandwidth_bps == pytest.approx(5e7)
    told = [
        (now, news)
        for now in range(200, 400)
        if (news := link.heard(sample(8e7), float(now))) is not None
    ]
    assert [now for now, _ in told] == [207], "as soon as most of what is remembered says so"


def test_a_link_that_hardly_changed_is_not_told() -> None:
    link = LiveLink(KNOWN, 0.0)
    assert not any(
        link.heard(sample(1e8 * (1.09 if now % 2 else 0.91)), float(now)) for now in range(500)
    )


class Ticking:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


async def test_the_coordinator_is_told_of_probed_links_only() -> None:
    reports: list[ProfileReport] = []
    clock, refuse = Ticking(), [True]

    async def report(what: ProfileReport) -> None:
        if refuse:
            refuse.pop()
            raise UnavailableError("gone")
        reports.append(what)

    live = LiveLinks(NodeId("me"), report, clock)
    live.probed((MeasuredLink(NodeId("me"), NodeId("you"), KNOWN),))

    async def hear(receiver: str, bandwidth_bps: float) -> None:
        clock.time += REPORT_INTERVAL_S
        for _ in range(5):
            live.heard(NodeId(receiver), sample(bandwidth_bps))
        await asyncio.gather(*live._reporting)

    await hear("stranger", 1e6)
    await hear("you", 5e7)
    assert not reports, "the coordinator was away"
    await hear("you", 2e7)
    (told,) = reports
    (link,) = told.links
    assert (told.node_id, link.sender, link.receiver) == (NodeId("me"), NodeId("me"), NodeId("you"))
    assert (
        link.profile.bandwidth_bps == pytest.approx(2e7)
        and link.profile.latency_s == KNOWN.latency_s
    )
    await live.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server("127.0.0.1:0", None)
    yield server
    await server.stop(0)


async def test_a_receiver_tells_the_sender_how_a_large_step_came(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "TELLING_S", 0.0)  # loopback is fast
    servicer, arrived = StageServicer(), list[WireStep]()
    add_StageServiceServicer_to_server(servicer, server.grpc)
    contract = FrameContract(NAME, 1, DType.FLOAT32, WIDTH, 2048, 8)
    servicer.open(NAME, 1, LinkReceiver(0, NODE, contract, arrived.append, lambda step: None))
    heard, failures = asyncio.Queue[LinkSample](), list[EdgeShardError]()
    hop = Hop(NAME, Epoch(1), 0, 1, await server.start(), NODE)
    sender = LinkSender(hop, 8, None, failures.append, on_timing=heard.put_nowait)
    sender.start()
    try:
        for number, tokens in enumerate((1, 700, 1, 1024)):
            data = bytes(tokens * WIDTH * 4)
            step = ForwardStep(
                number,
                StepPlan(spans=(Span(1, 0, tokens),)),
                Tensor(DType.FLOAT32, (tokens, WIDTH), data),
            )
            sender.send(step, list(encode_step(NAME, 1, step)))
        async with asyncio.timeout(30):
            first, second = await heard.get(), await heard.get()
    finally:
        await sender.stop()
    assert [one.size_bytes for one in (first, second)] == [
        700 * WIDTH * 4 - PART_BYTES,
        3 * PART_BYTES,
    ]
    assert 0 < first.seconds < 10 and heard.empty(), "a step of one part says nothing"
    assert len(arrived) == 4 and not failures
