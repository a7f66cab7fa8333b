"""Accuracy of plans: predicted and measured figures in the lab, over placements, links and modes.

Every run is real processes on this machine: agents that take as long as an emulated Jetson would,
over links shaped to the setting. The emulator knows devices and links only; the placements are the
planner's, an even one, one with its cuts elsewhere, and two at random. Each is measured a few times
and has its medians, because what else the machine does delays a token now and then.

    python -m bench.lab [-o FILE] [--table docs/lab-accuracy.md] [--new-tokens 16] [--rounds 3]
                        [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

from bench.pages import figures_comment, markdown_table, table_file, with_trees
from bench.sites import lab_site, write_rows
from bench.sizes import sized
from edgeshard.client import Client
from edgeshard.domain.deployments.placement import ExplicitStage
from edgeshard.domain.ids import NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.local.lab_site import Comparison, LabFigures, measure, predicted_of
from edgeshard.planning.search.plan import plan
from edgeshard.planning.simulation.lab import Lab, LabRun

LINKS_MBIT = sized(((10, 0.005), (50, 0.002), (200, 0.0005)), ((200, 0.0005),))
LIMITS = {"time_per_token_s": 0.10, "throughput_tps": 0.10, "ttft_s": 0.15}

HEADING = """# Compare the lab with the planner

`python -m bench.lab --table docs/lab-accuracy.md` on a machine with 2 cores, medians of {rounds} runs. Deviations are
(predicted - measured) / measured; `lab-accuracy.json` has all runs.

{measured}

"""  # noqa: E501

CLUSTER = """
source = "agx-1"
[[device]]
name = "agx"
kind = "agx-orin"
count = 2
[[device]]
name = "nx"
kind = "orin-nx"
count = 2
[[link]]
bandwidth_bps = {bandwidth}
latency_s = {latency}
[model]
dtype = "float32"
[workload]
prompt_tokens = 32
new_tokens = {new_tokens}
[lab]
model = "llama2-7b"
"""


def stages_of(names: list[str], ends: list[int]) -> tuple[ExplicitStage, ...]:
    firsts = [0, *ends[:-1]]
    return tuple(
        ExplicitStage(NodeName(name), LayerRange(first, end))
        for name, first, end in zip(names, firsts, ends, strict=True)
    )


def placements(lab: Lab, seed: int) -> list[tuple[str, tuple[ExplicitStage, ...]]]:
    """Five placements by name. Every stage holds at least four layers, so that it takes at least 10
    ms."""
    rng = random.Random(seed)
    layers, names = lab.model.layer_count, [node.name for node in lab.cluster.nodes]
    planned = plan(lab.problem(), alternatives=0).stages
    found = [("planned", tuple(ExplicitStage(NodeName(s.node), s.layers) for s in planned))]
    found.append(("even", stages_of(names, [layers * (i + 1) // 4 for i in range(4)])))
    found.append(("two nodes", stages_of(names[:2], [12, layers])))
    for number in (1, 2):
        count = rng.choice([3, 4])
        others = rng.sample(names[1:], count - 1)
        while True:
            ends = [*sorted(rng.sample(range(4, layers - 3), count - 1)), layers]
            if all(b - a >= 4 for a, b in zip([0, *ends[:-1]], ends, strict=True)):
                break
        found.append((f"random {number}", stages_of([names[0], *others], ends)))
    return found


async def measure_median(client: Client, lab: Lab, run: LabRun, rounds: int) -> LabFigures:
    """The median of each figure over several runs."""
    samples = [await measure(client, lab, run) for _ in range(rounds)]
    return LabFigures(
        *(statistics.median(values) for values in zip(*map(astuple, samples), strict=True))
    )


async def measure_setting(text: str, label: str, rounds: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    async with lab_site(text) as (lab, client):
        for name, stages in placements(lab, seed)[: sized(5, 1)]:
            for run in (LabRun(stages, "sequential", 1), LabRun(stages, "no-bubbles", len(stages))):
                measured = await measure_median(client, lab, run, rounds)
                result = Comparison(
                    run.placement, run.mode, run.streams, predicted_of(lab, run), measured
                )
                rows.append({"links": label, "name": name, **result.as_row()})
                print(describe(label, name, result), file=sys.stderr)
    return rows


def describe(label: str, name: str, result: Comparison) -> str:
    off = ", ".join(f"{key} {100 * value:+.1f} %" for key, value in result.deviation.items())
    return f"{label}, {name}, {result.mode}: {off}"


def within(row: dict[str, Any]) -> bool:
    """Whether a row's deviations are inside the promised limits."""
    return all(abs(row[f"deviation_{name}"]) <= limit for name, limit in LIMITS.items())


def table(rows: list[dict[str, Any]]) -> str:
    """The largest deviations, (predicted - measured) / measured, by link and mode, as a Markdown
    table."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["links"], row["mode"]), []).append(row)
    cells = []
    for (links, mode), found in groups.items():
        worst = [max((row[f"deviation_{name}"] for row in found), key=abs) for name in LIMITS]
        cells.append([links, mode, str(len(found)), *(f"{100 * value:+.1f} %" for value in worst)])
    inside = (
        f"{sum(within(row) for row in rows)} of {len(rows)} runs are within 10 % (time per "
        "token, tokens/s)"
    )
    head = ["links", "mode", "runs", "time per token off by at most", "tokens/s", "TTFT"]
    return f"{inside} and 15 % (TTFT).\n\n{markdown_table(head, cells)}"


def all_rows(rows: list[dict[str, Any]]) -> str:
    """Each run, for the file next to the page."""
    head = ["links", "placement", "mode", "streams", "ms per token, predicted", "measured", "off"]
    cells = []
    for row in rows:
        predicted, measured = (
            1000 * row[f"{kind}_time_per_token_s"] for kind in ("predicted", "measured")
        )
        off = [f"{100 * row[f'deviation_{name}']:+.1f} %" for name in LIMITS]
        placed = [
            row["links"],
            f"{row['name']}: {row['placement']}",
            row["mode"],
            str(row["streams"]),
        ]
        cells.append([*placed, f"{predicted:.1f}", f"{measured:.1f}", *off])
    return table_file({"runs": ([*head, "tokens/s off", "TTFT off"], cells)})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--table", type=Path, help="write the rows as a Markdown table")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for bandwidth, latency in LINKS_MBIT:
        text = CLUSTER.format(
            bandwidth=bandwidth * 1e6, latency=latency, new_tokens=arguments.new_tokens
        )
        label = f"{bandwidth} Mb/s, {1000 * latency:g} ms"
        rows += asyncio.run(measure_setting(text, label, arguments.rounds, arguments.seed))
    write_rows(arguments.output, rows)
    if arguments.table is not None:
        measured = figures_comment("python -m bench.lab", with_trees(rows))
        heading = HEADING.format(rounds=arguments.rounds, measured=measured)
        arguments.table.write_text(heading + table(rows), encoding="utf-8")
        arguments.table.with_suffix(".json").write_text(all_rows(rows), encoding="utf-8")
    print(table(rows))
    return 0 if all(within(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
