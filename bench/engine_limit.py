"""A long prompt that arrives among streams with a promised time between tokens."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from bench.engine_site import PROMPT_CUT, PinnedSite, Setup, prompt_of
from bench.engine_streams import percentile
from bench.sizes import sized
from edgeshard.domain.requests.generation import GenerateOptions
from tests.support.load import Stream

STREAMS = sized(8, 2)
PROMPT_TOKENS = sized(4096, 64)
_FIRST_TOKENS = 6
_SHORT = sized(128, 16)


async def measure_limit(site: PinnedSite, limit_s: float, max_context: int) -> dict[str, Any]:
    """A row: the time between tokens of 8 streams while the prompt is run, and its time to first
    token.

    `ttft_alone_s` is the time to first token with only a single stream running: its chunks are
    sized by the same promise, and next to nothing else delays it.
    """
    setup = Setup(
        2,
        micro_batches=2,
        concurrency=STREAMS + 1,
        max_context=max_context,
        max_inter_token_latency_s=limit_s,
        cut=PROMPT_CUT,
    )
    await site.deploy(setup)
    alone_s, _ = await _among(site, setup, 1)
    ttft_s, gaps = await _among(site, setup, STREAMS)
    await site.delete(setup)
    return {
        "engine": "edgeshard",
        "stages": 2,
        "mode": setup.mode,
        "dtype": setup.dtype,
        "streams": STREAMS + 1,
        "micro_batches": 2,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens_per_s": len(gaps) / ttft_s,
        "inter_token_latency_s": percentile(gaps, 0.5),
        "ttft_s": ttft_s,
        "stage_s": [],
        "hop_s": [],
        "efficiency": None,
        "bubble_share": None,
        "section": "limit",
        "max_inter_token_latency_s": limit_s,
        "p99_inter_token_latency_s": percentile(gaps, 0.99),
        "largest_inter_token_latency_s": max(gaps),
        "ttft_alone_s": alone_s,
    }


async def _has_begun(stream: Stream) -> None:
    """Wait for its first tokens. Raises what ended it before."""
    await stream.has(_FIRST_TOKENS)
    stream.raise_error()


async def _among(site: PinnedSite, setup: Setup, streams: int) -> tuple[float, list[float]]:
    """The prompt's time to first token, and the times between the streams' tokens meanwhile."""
    options = GenerateOptions(max_new_tokens=setup.max_context - _SHORT, ignore_eos=True)
    running = [Stream(setup.name, prompt_of(number, _SHORT), options) for number in range(streams)]
    tasks = [asyncio.create_task(stream.run(site.client)) for stream in running]
    try:
        for stream in running:
            await _has_begun(stream)
        prompt = await site.stream(setup, prompt_of(99, PROMPT_TOKENS), 1)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first = prompt.arrivals[0].at_s
    gaps = [
        later - earlier
        for stream in running
        for earlier, later in pairwise(stream.times[1:])
        if prompt.began_s < later <= first
    ]
    return first - prompt.began_s, gaps
