"""The steady rate of a site at saturation: simulated beside measured, in the lab and between two real nodes.

As many requests run as the placement holds, and another begins whenever one ends. The lab's nodes are real processes
that take as long as emulated devices would; what is compared is the simulator's rate, with the head's own steps, and
the rate that clients see.

    python -m bench.saturation [-o FILE] [--rounds 1]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.lab import CLUSTER
from bench.sites import lab_site, write_rows
from bench.sizes import sized
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import parse_layers
from edgeshard.local.lab_site import stream
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.simulation.lab import Lab
from edgeshard.planning.simulation.saturation import played_rate, saturating, steady_rate
from edgeshard.planning.solvers.instance import Cut

LIMIT = 0.10
WAVES = sized(3, 2)
# Links in Mb/s and s, prompt and answer in tokens, the placement, b and m.
SITES = (
    (50, 0.002, 256, 32, "agx-1=0:18,agx-2=18:32", 4, 2),
    (200, 0.0005, 512, 24, "agx-1=0:10,agx-2=10:20,nx-1=20:26,nx-2=26:32", 2, 4),
    (20, 0.005, 96, 48, "agx-1=0:14,nx-1=14:20,agx-2=20:32", 3, 3),
)[: sized(3, 1)]


async def measured_rate(client: Client, layers: str, load: Load, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens a second that clients see of a placement at saturation."""
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
    requests = saturating(load.requests, prompt_tokens, new_tokens, WAVES)
    await client.deploy(parse_spec(spec), timeout_s=180)
    try:
        streams = [
            stream(client, "saturated", index, one.prompt_tokens, one.new_tokens) for index, one in enumerate(requests)
        ]
        arrivals = await asyncio.gather(*streams)
    finally:
        await client.delete_deployment("saturated")
    return steady_rate(arrivals, load.requests)


def simulated_rate(lab: Lab, layers: str, load: Load) -> float:
    costs, placed = Costs(lab.problem()), parse_layers(layers)
    cut = Cut(tuple(costs.names.index(stage.node) for stage in placed), tuple(stage.layers.end for stage in placed))
    return played_rate(costs, cut, load)


async def measure_site(site: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    bandwidth, latency, prompt_tokens, new_tokens, layers, batch, micro_batches = site
    text = CLUSTER.format(bandwidth=bandwidth * 1e6, latency=latency, new_tokens=new_tokens)
    text = text.replace("prompt_tokens = 32", f"prompt_tokens = {prompt_tokens}").replace('"float32"', '"float16"')
    load = Load(batch, micro_batches)
    async with lab_site(text) as (lab, client):
        simulated = simulated_rate(lab, layers, load)
        began = time.perf_counter()
        rates = [await measured_rate(client, layers, load, prompt_tokens, new_tokens) for _ in range(rounds)]
    row = {
        "links": f"{bandwidth} Mb/s, {1000 * latency:g} ms",
        "placement": layers,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "batch": batch,
        "micro_batches": micro_batches,
        "simulated_tps": simulated,
        "measured_tps": statistics.median(rates),
        "off": simulated / statistics.median(rates) - 1,
        "seconds": time.perf_counter() - began,
    }
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    rows = [asyncio.run(measure_site(site, arguments.rounds)) for site in SITES]
    write_rows(arguments.output, rows)
    return 0 if all(abs(row["off"]) <= LIMIT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
