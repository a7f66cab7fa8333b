"""Does the head choose the number of micro-batches well? Its choice beside every fixed number, in turns.

The random Llama of `bench/random_llama.py` is deployed in halves on two real agents of one thread and one core each:
with m = 1, 2 and 3 fixed, and with m left to the head (`micro_batches` 0). At each number of streams the four take
turns, and who begins changes with every round. A rate is of the time at which all streams generate, what the head's
trials of other numbers take included.

`of_theory` is what m = 2 with b = 8 (16 streams) reaches of m b / max(R, m B): B is the longest stage and R the round
of one micro-batch, of a trace within the same run. Clocks of boxes need not agree: a hop is half of what a round takes
beyond computing, waiting and sending.

    python -m bench.micro_batches [--rounds 5] [--profile] [-o FILE]     JSON: a row for each number of streams
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine import hold, site_with
from bench.engine_site import Setup, Site
from bench.engine_streams import Stream, sample_of
from bench.random_llama import RandomWeights
from edgeshard.domain.trace import StageTrace

FIXED = {f"m{m}": Setup(2, micro_batches=m) for m in (1, 2, 3)}
AUTO = Setup(2, micro_batches=0)
SETUPS = {**FIXED, "auto": AUTO}
STREAMS = (1, 2, 4, 8, 12, 16)
PROMPT_TOKENS = 32
TRACED = ("m2", 16)
_TRACE_S = 1.0
_TRACE_AFTER_S = 0.5


async def measure(site: Site, setup: Setup, streams: int, new_tokens: int) -> float:
    """Tokens per second."""
    await site.warm_up(setup)
    return sample_of(await site.streams(setup, streams, PROMPT_TOKENS, new_tokens)).tokens_per_s


async def measure_traced(site: Site, setup: Setup, streams: int, new_tokens: int) -> tuple[float, float]:
    """Tokens per second, and what theory says of the stage and hop times of the same run."""
    await site.warm_up(setup)
    running = asyncio.create_task(site.streams(setup, streams, PROMPT_TOKENS, new_tokens))
    await asyncio.sleep(_TRACE_AFTER_S)
    while not any_full(traces := await site.trace(setup, _TRACE_S), streams // setup.micro_batches):
        if running.done():
            raise RuntimeError("the streams ended before they were traced: ask for more tokens")
    found: list[Stream] = await running
    return sample_of(found).tokens_per_s, theory(traces, streams, setup.micro_batches)


def any_full(traces: Sequence[StageTrace], decodes: int) -> bool:
    return sum(record.tokens == decodes and not record.prompt_tokens for record in traces[0].records) >= 5


def theory(traces: Sequence[StageTrace], streams: int, micro_batches: int) -> float:
    """m b / max(R, m B) of the decode steps of a full micro-batch."""
    size = streams // micro_batches
    steps = [
        {record.step: record for record in trace.records if record.tokens == size and not record.prompt_tokens}
        for trace in traces
    ]
    stage_s = [statistics.median(record.ended_s - record.began_s for record in found.values()) for found in steps]
    both = [(steps[0][step], steps[1][step]) for step in steps[0] if step in steps[1] and steps[0][step].returned_s]
    hops_s = statistics.median(
        (first.returned_s - first.ended_s) - (second.ended_s - second.arrived_s) for first, second in both
    )
    return streams / max(sum(stage_s) + hops_s, micro_batches * max(stage_s))


async def run(rounds: int, new_tokens: int, wanted: Sequence[int], profile: bool) -> list[dict[str, Any]]:
    rates: dict[tuple[int, str], list[float]] = {}
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-micro-") as scratch:
        async with site_with(RandomWeights(), Path(scratch)) as site:
            if profile:
                await site.profile()
            await hold(site, list(SETUPS.values()), ())
            for number in range(rounds):
                for streams in wanted:
                    names = list(SETUPS) if number % 2 == 0 else list(reversed(SETUPS))
                    for name in names:
                        if (name, streams) == TRACED:
                            rate, ideal = await measure_traced(site, SETUPS[name], streams, new_tokens)
                            shares.append(rate / ideal)
                        else:
                            rate = await measure(site, SETUPS[name], streams, new_tokens)
                        rates.setdefault((streams, name), []).append(rate)
                        print(f"{number + 1}/{rounds} {name} x{streams}: {rate:.1f}", file=sys.stderr, flush=True)
    return [row(streams, {name: rates[streams, name] for name in SETUPS}, shares) for streams in wanted]


def row(streams: int, rates: dict[str, list[float]], shares: list[float]) -> dict[str, Any]:
    """`of_best` is the median over the rounds of the automatic rate over that of the number that is best in all."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(FIXED, key=lambda name: medians[name])
    ratios = [auto / fixed for auto, fixed in zip(rates["auto"], rates[best], strict=True)]
    found = {
        "streams": streams,
        "tokens_per_s": medians,
        "best": best,
        "of_best": statistics.median(ratios),
        "load_1_minute": os.getloadavg()[0],
    }
    if streams == TRACED[1] and shares:
        found["of_theory"] = statistics.median(shares)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each stream")
    parser.add_argument("--streams", type=int, action="append", help="this many only; repeat")
    parser.add_argument("--profile", action="store_true", help="have the boxes measure themselves first")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    report = asyncio.run(run(options.rounds, options.tokens, options.streams or STREAMS, options.profile))
    for found in report:
        print(json.dumps(found))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
