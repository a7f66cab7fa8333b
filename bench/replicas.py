"""Measure the cost of one name for two replicas: `python -m bench.replicas`.

One site has two replicas of the demo model, on two nodes pinned to a core each. Two further sites
have one such node each, with the model on it, as if somebody had shared out the clients by hand.
Both generate in turns, `--rounds` times each, first in one order and then in the other: `--streams`
answers at once, by halves if there are two sites. The client's process is not pinned, and is the
same for both. Prints tokens a second, processor time a token (client and daemons together), the
median ratios of the pairs, and the load of the machine before it began.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple

from bench.sites import Rate, demo_site, rate_of
from bench.sizes import sized
from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.site import Site

TOKENS = sized(300, 8)


async def main(rounds: int, streams: int) -> None:
    print(f"load of the machine: {os.getloadavg()[0]:.2f}")
    async with AsyncExitStack() as stack:
        together = [await _site(stack, ("a", "b"), 0, streams)]
        apart = [await _site(stack, (name,), core, streams) for core, name in enumerate("ab")]
        sides = {"two replicas": together, "two sites": apart}
        samples: dict[str, list[Rate]] = {name: [] for name in sides}
        for turn in range(-1, rounds):
            for name in sorted(sides, reverse=bool(turn % 2)):
                sample = await rate_of(sides[name], "tales", streams, TOKENS)
                samples[name] += [sample] if turn >= 0 else []  # the first warms up
    for name, found in samples.items():
        rates, spent = zip(*(astuple(rate) for rate in found), strict=True)
        print(
            f"{name:12}: {statistics.median(rates):7.1f} tokens/s, "
            f"{1000 * statistics.median(spent):.3f} ms a token"
        )
    pairs = list(zip(samples["two replicas"], samples["two sites"], strict=True))
    for index, what in enumerate(("tokens/s", "processor time a token")):
        ratios = sorted(astuple(one)[index] / astuple(other)[index] for one, other in pairs)
        print(
            f"replicas / sites, {what}: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f})"
        )


async def _site(stack: AsyncExitStack, nodes: Sequence[str], first_core: int, streams: int) -> Site:
    """A site whose nodes hold the whole model each."""
    site = await stack.enter_async_context(demo_site(nodes, "tales", first_core=first_core))
    spec = {
        "name": "tales",
        "model": "tales",
        "dtype": "float32",
        "max_context": 512,
        "replicas": len(nodes),
    }
    await site.client.deploy(parse_spec({**spec, "concurrency": streams}), timeout_s=120.0)
    return site


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--streams", type=int, default=8)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.rounds, arguments.streams))
