"""Measure the cost of a hop: two stages in two processes on loopback, compared with the same layers
in one process.

One site of real processes: a coordinator and the nodes a and b, one compute thread each. The demo
model is deployed twice, whole on a, and in halves on a and b. Both answer the same greedy request
in turns, which of them goes first alternating, so that whatever else the machine does weighs on
both alike. The compared figure is the median time between two tokens, as the client sees it.

A token makes two hops in the split pipeline: its activations from a to b, and the sampled token
back from b to a. So the cost of one is half of what the split adds to a token.

    python -m bench.hop [--rounds 8] [--tokens 64] [--check]

prints JSON. With --check it exits with 1 beyond the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.sites import demo_site
from edgeshard.cli.commands.site.demo import even_layers
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.load import answered

NODES = ("a", "b")
WHOLE, SPLIT = "whole", "split"
STAGES = {WHOLE: 1, SPLIT: 2}
HOPS_PER_TOKEN = STAGES[SPLIT]
LIMIT_MS = 1.5
PROMPT = "Once upon a time there was a king who had three daughters"


@dataclass(frozen=True, slots=True)
class Run:
    """One request: median and 95th percentile of the time between tokens, and each stage's median
    compute time."""

    inter_token_ms: float
    inter_token_p95_ms: float
    stage_compute_ms: tuple[float, ...]
    tokens: tuple[int, ...]


async def measure(client: Client, deployment: str, token_count: int) -> Run:
    """Run the request once. The prefill, and so the time to the first token, is left out."""
    stream = await answered(client, deployment, PROMPT, max_new_tokens=token_count, ignore_eos=True)
    tokens, gaps_ms = stream.tokens, sorted(1000 * gap for gap in stream.gaps_s)
    stages = sorted({timing.stage for token in tokens[1:] for timing in token.timings})
    compute_ms = []
    for stage in stages:
        seconds = [t.compute_s for token in tokens[1:] for t in token.timings if t.stage == stage]
        compute_ms.append(1000 * statistics.median(seconds))
    return Run(
        inter_token_ms=statistics.median(gaps_ms),
        inter_token_p95_ms=gaps_ms[int(0.95 * (len(gaps_ms) - 1))],
        stage_compute_ms=tuple(compute_ms),
        tokens=stream.ids,
    )


async def deploy(client: Client) -> None:
    """The same model twice in the same processes."""
    layer_count = (await client.stored_model("demo")).layer_count
    for name, stage_count in STAGES.items():
        layers = even_layers(layer_count, NODES[:stage_count])
        spec = {
            "name": name,
            "model": "demo",
            "source": NODES[0],
            "dtype": "float32",
            "concurrency": 1,
        }
        spec["speculation"] = "off"  # a step is a token
        await client.deploy(parse_spec({**spec, "layers": layers}), timeout_s=120)


async def compare(rounds: int, token_count: int) -> dict[str, list[Run]]:
    """`rounds` runs of both deployments in turns, after one of each to warm up."""
    runs: dict[str, list[Run]] = {WHOLE: [], SPLIT: []}
    async with demo_site(NODES) as site:
        client = site.client
        await deploy(client)
        for name in runs:
            await measure(client, name, token_count)
        for number in range(rounds):
            for name in (WHOLE, SPLIT) if number % 2 == 0 else (SPLIT, WHOLE):
                runs[name].append(await measure(client, name, token_count))
                print(
                    f"round {number + 1}/{rounds} {name}: {runs[name][-1].inter_token_ms:.2f} ms",
                    file=sys.stderr,
                )
    return runs


def report(runs: dict[str, list[Run]], token_count: int) -> dict[str, Any]:
    """The comparison as JSON types; times in milliseconds. Differences are taken round by round,
    then their median."""
    medians = {name: statistics.median(run.inter_token_ms for run in runs[name]) for name in runs}
    pairs = zip(runs[WHOLE], runs[SPLIT], strict=True)
    added = [split.inter_token_ms - whole.inter_token_ms for whole, split in pairs]
    per_hop = statistics.median(added) / HOPS_PER_TOKEN
    return {
        "benchmark": "hop",
        "ratio": medians[SPLIT] / medians[WHOLE],
        "milliseconds_per_token_and_hop": per_hop,
        "milliseconds_added_per_token": statistics.median(added),
        "hops_per_token": HOPS_PER_TOKEN,
        "limit_milliseconds": LIMIT_MS,
        "within_limit": per_hop <= LIMIT_MS,
        "same_tokens": len({run.tokens for both in runs.values() for run in both}) == 1,
        "inter_token_latency_milliseconds": medians,
        "stage_compute_milliseconds": {name: _stage_medians(runs[name]) for name in runs},
        "tokens_per_run": token_count,
        "samples": {name: [_times_of(run) for run in runs[name]] for name in runs},
        "added_samples": added,
        "machine": {
            "cores": os.cpu_count(),
            "load_1_minute": os.getloadavg()[0],
            "processor": platform.machine(),
            "system": platform.system(),
            "python": platform.python_version(),
        },
    }


def _stage_medians(runs: Sequence[Run]) -> list[float]:
    return [
        statistics.median(times)
        for times in zip(*(run.stage_compute_ms for run in runs), strict=True)
    ]


def _times_of(run: Run) -> dict[str, Any]:
    """The run without its tokens."""
    return {key: value for key, value in asdict(run).items() if key != "tokens"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="runs of each deployment")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each run")
    parser.add_argument(
        "--check", action="store_true", help=f"exit 1 when a hop costs more than {LIMIT_MS} ms"
    )
    options = parser.parse_args()
    if options.rounds < 1 or options.tokens < 3:
        parser.error("--rounds must be 1 or more and --tokens 3 or more")
    result = report(asyncio.run(compare(options.rounds, options.tokens)), options.tokens)
    print(json.dumps(result, indent=2))
    return 0 if result["within_limit"] or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
