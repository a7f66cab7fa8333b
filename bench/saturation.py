"""Simulated and measured steady rate of a site at saturation, in the lab and between two real
nodes.

As many requests run as the placement holds, and another begins whenever one ends. The lab's nodes
are real processes that take as long as emulated devices would. Compared are the simulator's rate,
with the head's own steps, and the rate that clients see. Between two agents of one pinned core
each, which the product measures and plans, it is the deployment's promise.

    python -m bench.saturation [-o FILE] [--rounds 1]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.engine_site import MODEL, NODES, PinnedSite
from bench.lab import CLUSTER
from bench.sites import lab_site, profiled, write_rows
from bench.sizes import sized
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import parse_layers
from edgeshard.domain.models.dtypes import DType
from edgeshard.local.lab_site import stream
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.simulation.forecast import saturating, steady_rate
from edgeshard.planning.simulation.lab import Lab
from edgeshard.planning.simulation.serving import serve
from edgeshard.planning.simulation.simulated_pipeline import head_schedule, serving_ring
from edgeshard.planning.solvers.instance import Cut

LIMIT, REAL_LIMIT = 0.10, 0.15
REAL_PROMPT, REAL_NEW, REAL_REQUESTS = sized((256, 48, 8), (32, 4, 4))
WAVES = sized(3, 2)
# Links in Mb/s and s, prompt and answer in tokens, the placement, b and m.
SITES = (
    (50, 0.002, 256, 32, "agx-1=0:18,agx-2=18:32", 4, 2),
    (200, 0.0005, 512, 24, "agx-1=0:10,agx-2=10:20,nx-1=20:26,nx-2=26:32", 2, 4),
    (20, 0.005, 96, 48, "agx-1=0:14,nx-1=14:20,agx-2=20:32", 3, 3),
)[: sized(3, 1)]


async def rate_of(
    client: Client, deployment: str, running: int, prompt_tokens: int, new_tokens: int
) -> float:
    """Tokens a second that clients see of a deployment at saturation."""
    requests = saturating(running, prompt_tokens, new_tokens, WAVES)
    streams = [
        stream(client, deployment, index, one.prompt_tokens, one.new_tokens)
        for index, one in enumerate(requests)
    ]
    return steady_rate(await asyncio.gather(*streams), running)


async def measure_real(rounds: int) -> dict[str, Any]:
    """Two agents of one core each: the plan's promise of its steady rate, and the served rate."""
    spec = {
        "name": "saturated",
        "model": MODEL,
        "speculation": "off",  # nothing predicts guesses
        "source": NODES[0],
        "dtype": "bfloat16",
        "objective": "throughput",
        "concurrency": REAL_REQUESTS,
        "prompt_tokens": REAL_PROMPT,
        "new_tokens": REAL_NEW,
        "max_context": REAL_PROMPT + REAL_NEW,
    }
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-saturation-") as scratch:
        async with PinnedSite(Path(scratch)) as site:
            client = site.client
            await profiled(client, MODEL, quick=True, dtype=DType.BFLOAT16)
            deployment = await client.deploy(parse_spec(spec), timeout_s=180)
            predicted, placement = deployment.placement.predicted, deployment.placement
            assert predicted is not None, "both nodes were measured"
            running = placement.micro_batch * placement.micro_batches
            rates = [
                await rate_of(client, "saturated", running, REAL_PROMPT, REAL_NEW)
                for _ in range(rounds)
            ]
    return told(
        {
            "links": "two real nodes",
            "placement": ",".join(
                f"{stage.node_name}={stage.layers}" for stage in placement.stages
            ),
            "prompt_tokens": REAL_PROMPT,
            "new_tokens": REAL_NEW,
            "batch": placement.micro_batch,
            "micro_batches": placement.micro_batches,
            "expected_tps": predicted.throughput_tps,
            "measured_tps": statistics.median(rates),
        }
    )


def told(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its deviation, (expected - measured) / measured, shown."""
    row["off"] = row["expected_tps"] / row["measured_tps"] - 1
    print(row, file=sys.stderr, flush=True)
    return row


async def measured_rate(
    client: Client, layers: str, load: Load, prompt_tokens: int, new_tokens: int
) -> float:
    """The same of a placement in the lab."""
    spec = {
        "name": "saturated",
        "model": "stand-in",
        "source": parse_layers(layers)[0].node,
        "dtype": "float32",
        "layers": layers,
        "concurrency": load.requests,
        "micro_batches": load.micro_batches,
        "max_context": prompt_tokens + new_tokens,
        "max_new_tokens": new_tokens,
    }
    await client.deploy(parse_spec(spec), timeout_s=180)
    try:
        return await rate_of(client, "saturated", load.requests, prompt_tokens, new_tokens)
    finally:
        await client.delete_deployment("saturated")


def played_rate(costs: Costs, cut: Cut, load: Load) -> float:
    """Tokens a second of a cut at saturation, with the problem's prompts and answers, by
    simulation.

    Raises InvalidArgumentError for `head_on_source`, whose arrivals are not simulated.
    """
    problem = costs.problem
    requests = saturating(load.requests, problem.prompt_tokens, problem.new_tokens)
    return steady_rate(
        serve(serving_ring(costs, cut), requests, head_schedule(costs, cut, load)).token_s,
        load.requests,
    )


def simulated_rate(lab: Lab, layers: str, load: Load) -> float:
    costs, placed = Costs(lab.problem()), parse_layers(layers)
    cut = Cut(
        tuple(costs.names.index(stage.node) for stage in placed),
        tuple(stage.layers.end for stage in placed),
    )
    return played_rate(costs, cut, load)


async def measure_site(site: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    bandwidth, latency, prompt_tokens, new_tokens, layers, batch, micro_batches = site
    text = CLUSTER.format(bandwidth=bandwidth * 1e6, latency=latency, new_tokens=new_tokens)
    text = text.replace("prompt_tokens = 32", f"prompt_tokens = {prompt_tokens}").replace(
        '"float32"', '"float16"'
    )
    load = Load(batch, micro_batches)
    async with lab_site(text) as (lab, client):
        simulated = simulated_rate(lab, layers, load)
        rates = [
            await measured_rate(client, layers, load, prompt_tokens, new_tokens)
            for _ in range(rounds)
        ]
    return told(
        {
            "links": f"{bandwidth} Mb/s, {1000 * latency:g} ms",
            "placement": layers,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "batch": batch,
            "micro_batches": micro_batches,
            "expected_tps": simulated,
            "measured_tps": statistics.median(rates),
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    rows = [asyncio.run(measure_site(site, arguments.rounds)) for site in SITES]
    real = asyncio.run(measure_real(arguments.rounds))
    write_rows(arguments.output, [*rows, real])
    return (
        0 if all(abs(row["off"]) <= LIMIT for row in rows) and abs(real["off"]) <= REAL_LIMIT else 1
    )


if __name__ == "__main__":
    sys.exit(main())
