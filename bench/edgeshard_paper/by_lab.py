"""The paper's 7B row by the lab: the same placements in real processes that emulate the test bed's
nodes and links.

The measurements are kept in a file next to the page (`read`, `write`), so that the page is always
the same.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.edgeshard_paper.experiments import TESTBED, Outcome, Row
from bench.edgeshard_paper.paper_numbers import PERFORMANCE, REQUESTS, STRATEGIES, Quoted
from bench.lab import measure_median
from bench.sites import lab_site
from edgeshard.domain.deployments.placement import parse_layers
from edgeshard.local.lab_site import LabFigures, predicted_of
from edgeshard.planning.simulation.lab import LabRun, parse_lab

MODEL = "llama2-7b"
ROUNDS = 3
Measurements = dict[LabRun, LabFigures]


@dataclass(frozen=True, slots=True)
class LabRow:
    """One strategy's plan: a single request under the latency plan, or several under the throughput
    plan.

    `measured` is None until the lab has run this placement; `paper` is the paper's time per token
    or rate.
    """

    strategy: str
    run: LabRun
    predicted: LabFigures
    measured: LabFigures | None
    paper: Quoted | None

    def deviation(self, figure: str) -> float | None:
        """(predicted - measured) / measured of a field of `LabFigures`."""
        if self.measured is None:
            return None
        return float(getattr(self.predicted, figure) / getattr(self.measured, figure) - 1)


def lab_text() -> str:
    """The test bed as a lab file."""
    return f'{TESTBED.read_text(encoding="utf-8")}\n[lab]\nmodel = "{MODEL}"\n'


def lab_rows(table: Sequence[Row], measured: Mapping[LabRun, LabFigures]) -> list[LabRow]:
    """The plans of the 7B table with the lab's prediction, and their measured figures."""
    lab = parse_lab(tomllib.loads(lab_text()), lambda name: {})
    rows = []
    for row in table:
        paper = PERFORMANCE.get((MODEL, row.strategy))
        alone = _run(row.latency, 1)
        rows.append((row.strategy, alone, paper.ms_per_token if paper else None))
        if row.strategy in STRATEGIES:
            rows.append(
                (
                    row.strategy,
                    _run(row.throughput, REQUESTS),
                    paper.tokens_per_s if paper else None,
                )
            )
    return [
        LabRow(strategy, run, predicted_of(lab, run), measured.get(run), quoted)
        for strategy, run, quoted in rows
    ]


def _run(outcome: Outcome, streams: int) -> LabRun:
    return LabRun(
        parse_layers(outcome.placement), "sequential" if streams == 1 else "no-bubbles", streams
    )


def measure_all(runs: Iterable[LabRun]) -> Measurements:
    """Run each placement once, in one site of the test bed's fifteen nodes."""
    return asyncio.run(_measure_all(list(dict.fromkeys(runs))))


async def _measure_all(runs: Sequence[LabRun]) -> Measurements:
    found: Measurements = {}
    async with lab_site(lab_text()) as (lab, client):
        for number, run in enumerate(runs, 1):
            print(f"{number}/{len(runs)}: {run.placement}, {run.streams} at once", file=sys.stderr)
            # Several requests average by themselves.
            found[run] = await measure_median(client, lab, run, ROUNDS if run.streams == 1 else 1)
    return found


def read(path: Path) -> Measurements:
    """The figures measured before; empty without the file."""
    if not path.exists():
        return {}
    return {
        LabRun(parse_layers(item["placement"]), item["mode"], item["streams"]): LabFigures(
            **item["measured"]
        )
        for item in json.loads(path.read_text(encoding="utf-8"))
    }


def write(path: Path, measured: Measurements) -> None:
    items = [
        {
            "placement": run.placement,
            "mode": run.mode,
            "streams": run.streams,
            "measured": asdict(figures),
        }
        for run, figures in measured.items()
    ]
    path.write_text(json.dumps(items, indent=1) + "\n", encoding="utf-8")
