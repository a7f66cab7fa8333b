"""Measure the cost of one name for two replicas: `python -m bench.replicas`.

One site has two replicas of the demo model, on two nodes pinned to a core each. Two further sites have one such node
each, with the model on it, as if somebody had shared out the clients by hand. Both generate in turns, `--rounds` times
each, first in one order and then in the other: `--streams` answers at once, by halves if there are
two sites. The client's process is not pinned, and is the same for both. Prints tokens a second,
processor time a token (client and daemons together), the median ratios of the pairs, and the load
of the machine before it began.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from bench.sites import pinned
from bench.sizes import sized
from edgeshard.cli.commands.site.demo import model_directory
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.local.cluster import LocalCluster

TOKENS = sized(300, 8)
Side = Sequence[tuple[LocalCluster, Client]]


async def main(rounds: int, streams: int) -> None:
    print(f"load of the machine: {os.getloadavg()[0]:.2f}")
    async with AsyncExitStack() as stack:
        together = [await _site(stack, ("a", "b"), 0, streams)]
        apart = [await _site(stack, (name,), core, streams) for core, name in enumerate("ab")]
        sides: dict[str, Side] = {"two replicas": together, "two sites": apart}
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(-1, rounds):
            for name in sorted(sides, reverse=bool(turn % 2)):
                sample = await _sample(sides[name], streams)
                samples[name] += [sample] if turn >= 0 else []  # the first warms up
    for name, found in samples.items():
        rates, spent = zip(*found, strict=True)
        print(f"{name:12}: {statistics.median(rates):7.1f} tokens/s, {1000 * statistics.median(spent):.3f} ms a token")
    pairs = list(zip(samples["two replicas"], samples["two sites"], strict=True))
    for index, what in enumerate(("tokens/s", "processor time a token")):
        ratios = sorted(one[index] / other[index] for one, other in pairs)
        print(f"replicas / sites, {what}: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


async def _site(
    stack: AsyncExitStack, nodes: Sequence[str], first_core: int, streams: int
) -> tuple[LocalCluster, Client]:
    """A site whose nodes hold the whole model each."""
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeshard-bench-"))
    cluster = await stack.enter_async_context(pinned(LocalCluster(Path(scratch), nodes), first_core))
    client = await stack.enter_async_context(cluster.client())
    with model_directory(None) as directory:
        await client.add_model(directory, "tales")
    spec = {"name": "tales", "model": "tales", "dtype": "float32", "max_context": 512, "replicas": len(nodes)}
    await client.deploy(parse_spec({**spec, "concurrency": streams}), timeout_s=120.0)
    return cluster, client


async def _sample(side: Side, streams: int) -> tuple[float, float]:
    """Tokens a second of `streams` answers at once, and seconds of processor time for each token."""
    daemons = [daemon for cluster, _ in side for daemon in (cluster.coordinator, *cluster.agents.values())]
    processes = [psutil.Process(pid) for pid in (os.getpid(), *(daemon.pid for daemon in daemons if daemon.pid))]
    spent, began = _processor_s(processes), time.monotonic()
    answers = [
        side[number % len(side)][1].complete(
            "tales", f"Once upon a time there were {number} kings", max_new_tokens=TOKENS, ignore_eos=True
        )
        for number in range(streams)
    ]
    tokens = sum(len(answer.token_ids) for answer in await asyncio.gather(*answers))
    return tokens / (time.monotonic() - began), (_processor_s(processes) - spent) / tokens


def _processor_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--streams", type=int, default=8)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.rounds, arguments.streams))
