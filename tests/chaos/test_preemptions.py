"""Requests are preempted while a node is killed: every client gets the tokens of an undisturbed
run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import native_available

from tests.chaos.failpoints import Action, Failpoint, Place
from tests.chaos.matrix import Ask
from tests.chaos.site import DEPLOYMENT, ChaosSite
from tests.chaos.trial import stream_of
from tests.support.checker import check, reference_of
from tests.support.forms import one_in
from tests.support.load import Stream

pytestmark = pytest.mark.skipif(
    not native_available(), reason="torch's operators do not promise the bits"
)

ASKS = [Ask(seed, prompt_tokens=20, new_tokens=90, sampled=seed % 2 == 0) for seed in range(5)]


async def answers(site: ChaosSite, at_once: int) -> Sequence[Stream]:
    """The answers to all requests, `at_once` at a time."""
    places = asyncio.Semaphore(at_once)

    async def answer(ask: Ask) -> Stream:
        async with places:
            stream = stream_of(ask)
            await asyncio.wait_for(stream.run(site.client), 90)
            assert stream.error is None
            return stream

    return await asyncio.gather(*map(answer, ASKS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("swap_bytes", one_in(2, [0, 16 << 20]))
async def test_a_preempted_request_continues_with_its_tokens_while_a_node_is_killed(
    tmp_path: Path, swap_bytes: int
) -> None:
    async with ChaosSite(tmp_path) as site:
        await site.deploy(speculation="off")
        wanted = [reference_of(stream.events) for stream in await answers(site, 1)]
        tight = {
            "concurrency": 2,
            "prompt_tokens": 16,
            "new_tokens": 8,
            "kv_swap_bytes": swap_bytes,
        }

        async def check_all() -> None:
            for stream, right in zip(await answers(site, len(ASKS)), wanted, strict=True):
                assert not check(stream.events, right, whole=True).problems

        async def has_preempted() -> bool:
            """Whether KV was set aside, or positions were run again."""
            head = (await site.client.deployment(DEPLOYMENT)).stages[0]
            once = sum(ask.prompt_tokens + ask.new_tokens - 1 for ask in ASKS)
            return (
                head.swap is not None and head.swap.swapped_out > 0
                if swap_bytes
                else head.tokens_done > once
            )

        await site.deploy(speculation="off", **tight)
        await check_all()
        await site.until(has_preempted)
        for stage, time in ((1, 40), (0, 60), (2, 80)):
            victim = (await site.stages())[stage]
            point = Failpoint(f"stage {stage}", Place.BEFORE_COMPUTE, time=time, action=Action.KILL)
            site.arm(victim, [point])
            await check_all()
            assert point.id in site.marks(), "nobody was killed"
            await site.killed({point.id: Action.KILL})
            await site.restore()
