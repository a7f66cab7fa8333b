"""How long a node's own tokens wait while it loads a standby: `python -m bench.standby_steps`.

Node a generates with the demo model, alone. Meanwhile the weights of a random model of 316 M parameters, which node b
runs, come into a's memory and go again, `--times` times. Prints the waits between two tokens without and during that.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from bench.engine_site import write_model
from bench.random_llama import RandomWeights
from bench.site_calls import arrivals
from bench.sizes import sized
from edgeshard import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.nodes.device import StagePhase
from edgeshard.local.cluster import LocalCluster
from tests.chaos.site import DEMO_MODEL

TALES, BIG = "tales", "big"


async def listen(client: Client, gaps: list[tuple[float, float]], stop: asyncio.Event) -> None:
    """Append (when, seconds since the token before) for each token of one answer after the other."""
    while not stop.is_set():
        came = await arrivals(client, TALES, "Once upon a time", 400)
        gaps += [(later, later - earlier) for (earlier, _), (later, _) in pairwise(came)]


async def until(client: Client, condition: Callable[[int], bool], timeout_s: float = 120.0) -> None:
    """Wait until the bytes that node a has as a standby are as wanted."""
    async with asyncio.timeout(timeout_s):
        while not condition(await _standby_bytes(client)):  # noqa: ASYNC110 - what is watched has no event
            await asyncio.sleep(0.05)


async def _standby_bytes(client: Client) -> int:
    stages = [stage for node in await client.nodes() if node.name == "a" for stage in node.stages]
    return sum(stage.parameter_bytes for stage in stages if stage.phase is StagePhase.STANDBY)


async def measure(times: int) -> None:
    with tempfile.TemporaryDirectory(prefix="standby-") as scratch:
        write_model(Path(scratch) / "model", RandomWeights())
        async with (
            LocalCluster(Path(scratch), ("a", "b"), threads=1, agent_arguments=("--memory", "4GiB")) as cluster,
            Client(cluster.address, plaintext=True) as client,
        ):
            await client.add_model(DEMO_MODEL, TALES)
            await client.add_model(Path(scratch) / "model", BIG)
            common = {"dtype": "bfloat16", "concurrency": 1, "max_context": 512}
            await client.deploy(
                parse_spec({"name": TALES, "model": TALES, "source": "a", "layers": "a=0:12", **common})
            )
            gaps: list[tuple[float, float]] = []
            loading: list[tuple[float, float]] = []
            stop = asyncio.Event()
            listening = asyncio.create_task(listen(client, gaps, stop))
            for _ in range(times):
                await asyncio.sleep(sized(5.0, 0.5))
                spec = {"name": BIG, "model": BIG, "source": "b", "layers": "b=0:24", "standby": ["a"], **common}
                await client.deploy(parse_spec(spec), timeout_s=120.0)
                began = time.perf_counter()
                await until(client, bool)
                loading.append((began, time.perf_counter()))
                await client.delete_deployment(BIG)
                await until(client, lambda size: not size)
            stop.set()
            await listening
    report(gaps, loading)


def report(gaps: list[tuple[float, float]], loading: list[tuple[float, float]]) -> None:
    during = [gap for at, gap in gaps if any(first <= at <= last for first, last in loading)]
    # Node b loads too, beside them: those are neither.
    calm = [gap for at, gap in gaps if any(first - 8.0 <= at <= first - 4.0 for first, _ in loading)]
    seconds = statistics.median(last - first for first, last in loading)
    print(f"a standby of 316 M parameters took {seconds:.1f} s (median of {len(loading)})")
    for name, values in (("without", calm), ("during", during)):
        if not values:
            print(f"{name:8} no waits")
            continue
        ordered = sorted(values)
        print(
            f"{name:8} {len(ordered):5} waits: median {1000 * statistics.median(ordered):5.1f} ms, "
            f"p99 {1000 * ordered[int(0.99 * len(ordered))]:6.1f} ms, longest {1000 * ordered[-1]:6.1f} ms"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    sys.exit(asyncio.run(measure(parser.parse_args().times)))
