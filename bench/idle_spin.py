"""Does the idle spin cost anybody? One stream with default settings beside the same with `idle_spin_s` 0, in turns.

Sites of real agents serve the random Llama of `bench/random_llama.py`, cut evenly: two agents pinned to a core each,
two that may run anywhere, and three that may run anywhere, all with one thread. Both sites of a case are up all the
while; who begins changes with every round. Each case is measured quiet and beside two busy loops, which take the cores
from everybody.

    python -m bench.idle_spin [--rounds 8] [--tokens 64] [-o FILE]     JSON: a row a case

`ms` is the mean time between tokens, `p99_ms` the 99th percentile, each by default and switched off; `ms_ratio` is the
median of the rounds' ratios, default over off, `p99_ratio` that of all gaps together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.engine_site import LAYERS, MODEL, prompt_of, write_model
from bench.pages import with_trees
from bench.pinning import started
from bench.random_llama import RandomWeights
from bench.site_calls import arrivals, gaps_s, write_rows
from bench.sizes import sized
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.local.cluster import LocalCluster

DEFAULT, OFF = "default", "off"
CASES: tuple[tuple[str, int, tuple[int, ...] | None], ...] = (
    ("2 pinned", 2, (0, 1)),
    ("2 unpinned", 2, None),
    ("3 unpinned", 3, None),
)[: sized(3, 1)]
NAME = "m"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def deploy(client: Client, nodes: Sequence[str], model: Path) -> None:
    await client.add_model(model, MODEL)
    edges = [LAYERS * i // len(nodes) for i in range(len(nodes) + 1)]
    layers = ",".join(f"{name}={first}:{end}" for name, (first, end) in zip(nodes, pairwise(edges), strict=True))
    spec = {"name": NAME, "model": MODEL, "source": nodes[0], "layers": layers, "dtype": "bfloat16", "max_context": 256}
    await client.deploy(parse_spec(spec), timeout_s=180)


async def gaps(client: Client, tokens: int) -> list[float]:
    """Seconds between the tokens of one stream."""
    return gaps_s(await arrivals(client, NAME, prompt_of(0, 16), tokens))


def report(case: str, beside: str, found: dict[str, list[list[float]]]) -> dict[str, Any]:
    means = {key: [statistics.mean(run) for run in runs] for key, runs in found.items()}
    p99 = {key: statistics.quantiles([gap for run in runs for gap in run], n=100)[98] for key, runs in found.items()}
    ratios = [on / off for on, off in zip(means[DEFAULT], means[OFF], strict=True)]
    return {
        "case": case,
        "beside": beside,
        "ms": {key: round(statistics.median(value) * 1e3, 2) for key, value in means.items()},
        "ms_ratio": round(statistics.median(ratios), 3),
        "p99_ms": {key: round(value * 1e3, 2) for key, value in p99.items()},
        "p99_ratio": round(p99[DEFAULT] / p99[OFF], 3),
    }


async def measure(
    case: str, count: int, cores: Sequence[int] | None, rounds: int, tokens: int, scratch: Path, model: Path
) -> list[dict[str, Any]]:
    nodes, rows = [f"n{i}" for i in range(count)], list[dict[str, Any]]()
    async with AsyncExitStack() as stack:
        clients = {}
        for key, arguments in ((DEFAULT, ()), (OFF, ("--idle-spin-s", "0"))):
            folder = scratch / f"{case}-{key}".replace(" ", "-")
            folder.mkdir()
            cluster = LocalCluster(folder, nodes, agent_arguments=arguments, threads=1)
            await stack.enter_async_context(started(cluster, cores))
            clients[key] = await stack.enter_async_context(Client(cluster.address, plaintext=True))
            await deploy(clients[key], nodes, model)
        for loops in (0, 2):
            found: dict[str, list[list[float]]] = {DEFAULT: [], OFF: []}
            with busy_loops(loops):
                for number in range(rounds):
                    for key in (DEFAULT, OFF) if number % 2 else (OFF, DEFAULT):
                        await gaps(clients[key], 4)
                        found[key].append(await gaps(clients[key], tokens))
            rows.append(report(case, f"{loops} busy loops" if loops else "quiet", found))
            print(json.dumps(rows[-1]), flush=True)
    return rows


async def run(rounds: int, tokens: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-spin-") as directory:
        scratch = Path(directory)
        write_model(scratch / "model", RandomWeights())
        rows = []
        for case, count, cores in CASES:
            rows += await measure(case, count, cores, rounds, tokens, scratch, scratch / "model")
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = with_trees(asyncio.run(run(options.rounds, options.tokens)))
    write_rows(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
