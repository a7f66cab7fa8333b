"""A long prompt over three equal nodes of the lab: in slices that follow each other, beside chunk after chunk.

Three processes pretend to be AGX Orins with a third of Llama-2 7B each, over links of 1 Gb/s. They are profiled first,
as a site would be: slices are chosen by what the nodes say they take. The prompt fills the model's context but for one
token. Unsliced is the mode `sequential`: each chunk goes through all stages before the next begins.

    python -m bench.lab_prompt [--rounds 3]     JSON on stdout
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from bench.lab import stages_of
from bench.site_calls import profiled
from edgeshard.client import Client
from edgeshard.local.lab_site import lab_cluster, make_stand_in, measure
from edgeshard.planning.simulation.lab import Lab, LabRun, parse_lab

NODES = 3
LIMIT = 0.50
SLICED, UNSLICED = "no-bubbles", "sequential"

LAB = """
source = "agx-1"
[[device]]
name = "agx"
kind = "agx-orin"
count = 3
[[link]]
bandwidth_bps = 1e9
latency_s = 0.0003
[model]
dtype = "float16"
[workload]
prompt_tokens = 4095
new_tokens = 1
[lab]
model = "llama2-7b"
"""


async def run(lab: Lab, lab_file: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token by mode, in turns."""
    directory, seconds = lab_file.parent, dict[str, list[float]]()
    layers, names = lab.model.layer_count, [node.name for node in lab.cluster.nodes]
    stages = stages_of(names, [round(layers * (index + 1) / NODES) for index in range(NODES)])
    make_stand_in(lab, directory / "stand-in")
    async with lab_cluster(lab, lab_file, directory) as site, Client(site.address, plaintext=True) as client:
        await client.add_model(directory / "stand-in", "stand-in")
        await profiled(client, "stand-in", quick=True)
        for number in range(rounds):
            for mode in (SLICED, UNSLICED):
                measured = await measure(client, lab, LabRun(stages, mode, 1))
                seconds.setdefault(mode, []).append(measured.ttft_s)
                print(f"round {number + 1}/{rounds} {mode}: {measured.ttft_s:.2f} s", file=sys.stderr)
    return seconds


def report(lab: Lab, seconds: dict[str, list[float]]) -> dict[str, Any]:
    sliced, unsliced = (statistics.median(seconds[mode]) for mode in (SLICED, UNSLICED))
    return {
        "benchmark": "lab_prompt",
        "prompt_tokens": lab.cluster.workload.prompt_tokens,
        "stages": NODES,
        "ttft_s": {"sliced": sliced, "unsliced": unsliced},
        "ratio": sliced / unsliced,
        "limit": LIMIT,
        "within_limit": sliced <= LIMIT * unsliced,
        "samples_ttft_s": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-lab-prompt-") as scratch:
        lab_file = Path(scratch) / "lab.toml"
        lab_file.write_text(LAB, encoding="utf-8")
        lab = parse_lab(tomllib.loads(LAB), lambda name: {})
        print(json.dumps(report(lab, asyncio.run(run(lab, lab_file, rounds))), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
