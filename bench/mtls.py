"""Measure the cost of mutual TLS: `python -m bench.mtls`.

Two sites of three nodes run on this machine, one over mutual TLS and one in plaintext, with the
demo model split over the nodes. They generate in turns, `--rounds` times each, first in one order
and then in the other: one stream, then `--streams` at a time. Prints the tokens a second and the
processor time a token of each, client and daemons together. Also prints the median ratios of the
pairs, with the range that holds the true median in 19 of 20 cases.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from contextlib import AsyncExitStack

from bench.sites import Rate, demo_site, rate_of
from bench.sizes import sized
from edgeshard.cli.commands.site.demo import even_layers
from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.site import Site

NODES = sized(("a", "b", "c"), ("a",))
KINDS = {"plaintext": False, "mTLS": True}
TOKENS = sized(300, 8)


async def main(rounds: int, streams: int) -> int:
    spec = {
        "name": "tales",
        "model": "tales",
        "source": "a",
        "layers": even_layers(12, NODES),
        "max_context": 512,
    }
    async with AsyncExitStack() as stack:
        sites = {}
        for kind, secure in KINDS.items():
            sites[kind] = await stack.enter_async_context(demo_site(NODES, "tales", secure=secure))
            deployed = parse_spec({**spec, "dtype": "float32", "concurrency": streams})
            await sites[kind].client.deploy(deployed, timeout_s=120.0)
        for count in (1, streams):
            await _compare(sites, count, rounds)
    return 0


async def _compare(sites: dict[str, Site], streams: int, rounds: int) -> None:
    samples: dict[str, list[Rate]] = {kind: [] for kind in sites}
    for turn in range(-1, rounds):
        for kind in sorted(sites, reverse=bool(turn % 2)):
            sample = await rate_of([sites[kind]], "tales", streams, TOKENS)
            samples[kind] += [sample] if turn >= 0 else []  # the first warms up
    pairs = list(zip(samples["mTLS"], samples["plaintext"], strict=True))
    for kind, found in samples.items():
        rate = statistics.median(sample.tokens_per_s for sample in found)
        spent = statistics.median(sample.processor_s for sample in found)
        print(
            f"{streams:2} streams, {kind:9}: {rate:7.1f} tokens/s, {1000 * spent:.3f} ms of "
            "processor time a token"
        )
    for what, ratios in {
        "tokens/s": [secure.tokens_per_s / plain.tokens_per_s for secure, plain in pairs],
        "processor time": [secure.processor_s / plain.processor_s for secure, plain in pairs],
    }.items():
        low, high = _range_of_median(ratios)
        print(
            f"{streams:2} streams, mTLS / plaintext, {what}: {statistics.median(ratios):.3f} "
            f"({low:.3f} to {high:.3f})"
        )
    sys.stdout.flush()


def _range_of_median(values: list[float]) -> tuple[float, float]:
    """By ranks, with no assumption about how the values are distributed."""
    ordered, count = sorted(values), len(values)
    below, rank = 0.0, 0
    while rank < count // 2 and (below := below + math.comb(count, rank) / 2**count) < 0.025:
        rank += 1
    first = max(rank - 1, 0)
    return ordered[first], ordered[count - 1 - first]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.rounds, arguments.streams)))
