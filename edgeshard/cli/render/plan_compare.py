"""Strategies compared, and plans at many link rates, as tables, JSON, YAML and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgeshard.cli.render.output import (
    TABLES,
    Column,
    Output,
    human_seconds,
    show_list,
    show_text,
    writing,
)
from edgeshard.cli.render.plan_views import number_text
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.energy import without_power
from edgeshard.planning.inputs.devices import with_bandwidth
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.site_cluster import listed
from edgeshard.planning.report.baselines import StrategyRow, compare, strategies
from edgeshard.planning.report.verdict import verdict
from edgeshard.planning.search.plan import PlanResult, figure_of, figures_of, plan
from edgeshard.planning.solvers.linear import Prover

SWEEP_POINTS = 13
SWEPT = ("edge-solo", "cloud-edge-opt", "edgeshard")

ROW_COLUMNS: list[Column[StrategyRow]] = [
    Column("STRATEGY", lambda row: row.strategy),
    Column("PER TOKEN", lambda row: _seconds(row.time_per_token_s), right=True),
    Column("TOKENS/S", lambda row: number_text(row.throughput_tps), right=True),
    Column("TTFT", lambda row: _seconds(row.ttft_s), right=True),
    Column("REQUEST", lambda row: _seconds(row.request_s), right=True),
    Column("J/TOKEN", lambda row: number_text(row.joules_per_token), right=True),
    Column("NODES", lambda row: str(row.nodes) if row.feasible else "-", right=True),
    Column("PLACEMENT", lambda row: row.placement or "-", wide=True),
    Column("GAP", lambda row: "-" if row.gap is None else f"{100 * row.gap:.1f} %", right=True),
    Column("WHY", lambda row: row.reason),
]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One strategy at one link rate; None if it cannot run."""

    bandwidth_bps: float
    strategy: str
    feasible: bool
    time_per_token_s: float | None
    ttft_s: float | None
    request_s: float | None
    throughput_tps: float | None
    joules_per_token: float | None
    placement: str


_LABELS = {
    Objective.REQUEST: "ms per request",
    Objective.TTFT: "ms to first token",
    Objective.LATENCY: "ms per token",
    Objective.THROUGHPUT: "tokens/s",
    Objective.ENERGY: "J per token",
}


def show_comparison(
    problem: PlanProblem, plot: Path | None, output: Output, prover: Prover | None = None
) -> None:
    """Print a row for each strategy and whether to split at all, and draw the figures of the
    objective to `plot`.

    The words go below a table, else to stderr, so that a list stays a list; names come without.
    """
    rows = compare(problem, prover)
    if plot is not None:
        draw(plot, _bars(rows, problem))
    show_list(rows, output, ROW_COLUMNS, lambda row: row.strategy)
    unknown = without_power(Costs(problem))
    if unknown and output in TABLES:
        show_text(
            f"note: no J/TOKEN with {listed(unknown)}, whose power is unknown; a cluster file "
            "gives it as "
            "idle_w and busy_w",
            err=True,
        )
    words = "" if output is Output.NAME else verdict(problem, rows)
    if words and output in TABLES:
        show_text(f"\n{words}")
    elif words:
        show_text(f"note: {words}", err=True)


def draw(path: Path, drawing: str) -> None:
    """Write an SVG. Raises InvalidArgumentError for a path that cannot be written."""
    with writing("--plot", path):
        path.write_text(drawing, encoding="utf-8")


def _bars(rows: Sequence[StrategyRow], problem: PlanProblem) -> str:
    """The objective's figure by strategy."""
    from edgeshard.cli.render.svg import bar_chart

    label = _LABELS[problem.goal]
    values = {row.strategy: _drawn(row, problem.goal) for row in rows}
    if all(value is None for value in values.values()):
        raise InvalidArgumentError(
            "--plot: no strategy has a plan, so there is nothing to draw", field="plot"
        )
    return bar_chart(
        {problem.model.name: values}, f"{problem.model.name}: {label} by strategy", label
    )


def _drawn(figures: StrategyRow | SweepPoint, goal: Objective) -> float | None:
    """The figure in the unit of `_LABELS`; None if the strategy cannot run."""
    value = figure_of(figures, goal)
    in_seconds = goal not in (Objective.THROUGHPUT, Objective.ENERGY)
    return 1000 * value if in_seconds and value is not None else value


def show_sweep(
    problem: PlanProblem, text: str, plot: Path | None, output: Output, prover: Prover | None = None
) -> None:
    """Plan at many link rates; print the figures, and draw them to `plot`."""
    pair, rates = parse_sweep(text)
    points = []
    for rate in rates:
        at_rate = replace(problem, cluster=with_bandwidth(problem.cluster, rate, pair))
        results = strategies(at_rate, plan(at_rate, alternatives=0, prover=prover), SWEPT)
        points += [_point(rate, name, results[name]) for name in SWEPT]
    if plot is not None:
        draw(plot, _lines(points, problem))
    show_list(
        points, output, SWEEP_COLUMNS, lambda point: f"{point.bandwidth_bps:g}/{point.strategy}"
    )


def parse_sweep(text: str) -> tuple[tuple[str, str] | None, list[float]]:
    """`bandwidth=1:100` or `bandwidth:NODE,NODE=1:100`: the pair (None: every link), and rates in
    bits a second."""
    what, _, span = text.partition("=")
    name, _, ends = what.partition(":")
    low, _, high = span.partition(":")
    try:
        first, last = float(low), float(high)
    except ValueError:
        first = last = math.nan
    nodes = tuple(ends.split(",")) if ends else ()
    if name != "bandwidth" or len(nodes) not in (0, 2) or not (0 < first < last < math.inf):
        raise InvalidArgumentError(
            f"--sweep {text!r}: give bandwidth=1:100 for all links, or bandwidth:NODE,NODE=1:100 "
            "for one, in Mb/s",
            field="sweep",
        )
    ratio = (last / first) ** (1 / (SWEEP_POINTS - 1))
    rates = [1e6 * first * ratio**step for step in range(SWEEP_POINTS - 1)] + [1e6 * last]
    return (nodes[0], nodes[1]) if len(nodes) == 2 else None, rates


def _point(rate: float, name: str, result: PlanResult) -> SweepPoint:
    return SweepPoint(
        bandwidth_bps=rate,
        strategy=name,
        feasible=result.feasible,
        placement=result.placement,
        **figures_of(result.prediction),
    )


SWEEP_COLUMNS: list[Column[SweepPoint]] = [
    Column("LINK", lambda point: f"{point.bandwidth_bps / 1e6:.3g} Mb/s", right=True),
    Column("STRATEGY", lambda point: point.strategy),
    Column("PER TOKEN", lambda point: _seconds(point.time_per_token_s), right=True),
    Column("TTFT", lambda point: _seconds(point.ttft_s), right=True),
    Column("REQUEST", lambda point: _seconds(point.request_s), right=True),
    Column("TOKENS/S", lambda point: number_text(point.throughput_tps), right=True),
    Column("J/TOKEN", lambda point: number_text(point.joules_per_token), right=True, wide=True),
    Column("PLACEMENT", lambda point: point.placement or "-"),
]


def _lines(points: Sequence[SweepPoint], problem: PlanProblem) -> str:
    """The objective's figure by link rate."""
    from edgeshard.cli.render.svg import line_chart

    series: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        value = _drawn(point, problem.goal)
        if value is not None:
            series.setdefault(point.strategy, []).append((point.bandwidth_bps / 1e6, value))
    if not series:
        raise InvalidArgumentError(
            "--plot: no strategy has a plan at any rate, so there is nothing to draw", field="plot"
        )
    label = _LABELS[problem.goal]
    return line_chart(
        series, f"{problem.model.name}: {label} by link rate", "Mb/s", label, log_x=True
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else human_seconds(value)
