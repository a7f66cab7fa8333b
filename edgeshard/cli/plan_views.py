"""Plans, comparisons and sweeps as tables, JSON, YAML and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from edgeshard.cli.output import (
    Column,
    Output,
    gap_text,
    human_seconds,
    plain,
    show_data,
    show_fields,
    show_list,
    stdout_console,
    table,
    visible,
)
from edgeshard.domain.dtypes import weights_text
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.baselines import StrategyRow, compare, strategies
from edgeshard.planning.costs import Costs
from edgeshard.planning.devices import with_bandwidth
from edgeshard.planning.energy import without_power
from edgeshard.planning.explain import bottleneck, explain
from edgeshard.planning.measured import doubtful
from edgeshard.planning.plan import Alternative, PlannedStage, PlanResult, plan
from edgeshard.planning.problem import Objective, PlanProblem
from edgeshard.planning.site import listed
from edgeshard.planning.verdict import advice, verdict

SWEEP_POINTS = 13
SWEPT = ("edge-solo", "cloud-edge-opt", "edgeshard")

STAGE_COLUMNS: list[Column[PlannedStage]] = [
    Column("BOX", lambda stage: stage.node),
    Column("DEVICE", lambda stage: stage.kind),
    Column("LAYERS", lambda stage: str(stage.layers) if len(stage.layers) else "relay"),
    Column("COMPUTES", lambda stage: human_seconds(stage.compute_s), right=True),
    Column("SENDS", lambda stage: human_seconds(stage.send_s), right=True),
    Column("WEIGHTS", lambda stage: _gb(stage.memory.weights), right=True),
    Column("KV CACHE", lambda stage: _gb(stage.memory.kv), right=True),
    Column("WORKSPACE", lambda stage: _gb(stage.memory.workspace), right=True, wide=True),
    Column("LOADING", lambda stage: _gb(stage.memory.loading), right=True, wide=True),
    Column("NEEDS", lambda stage: _gb(stage.memory.needed), right=True),
    Column("USABLE", lambda stage: _gb(stage.memory.usable), right=True),
]

ROW_COLUMNS: list[Column[StrategyRow]] = [
    Column("STRATEGY", lambda row: row.strategy),
    Column("PER TOKEN", lambda row: _seconds(row.time_per_token_s), right=True),
    Column("TOKENS/S", lambda row: _number(row.throughput_tps), right=True),
    Column("TTFT", lambda row: _seconds(row.ttft_s), right=True),
    Column("REQUEST", lambda row: _seconds(row.request_s), right=True),
    Column("J/TOKEN", lambda row: _number(row.joules_per_token), right=True),
    Column("BOXES", lambda row: str(row.nodes) if row.feasible else "-", right=True),
    Column("PLACEMENT", lambda row: row.placement or "-", wide=True),
    Column("GAP", lambda row: "-" if row.gap is None else f"{100 * row.gap:.1f} %", right=True),
    Column("WHY", lambda row: row.reason),
]

ALTERNATIVE_COLUMNS: list[Column[Alternative]] = [
    Column("RUNNER-UP", lambda item: item.placement),
    Column("PER TOKEN", lambda item: human_seconds(item.time_per_token_s), right=True),
    Column("TOKENS/S", lambda item: f"{item.throughput_tps:.2f}", right=True),
    Column("TTFT", lambda item: human_seconds(item.ttft_s), right=True),
    Column("REQUEST", lambda item: human_seconds(item.request_s), right=True),
    Column("J/TOKEN", lambda item: _number(item.joules_per_token), right=True),
]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One strategy at one link rate; None where it cannot run."""

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


def show_plan(problem: PlanProblem, before: PlanProblem | None, with_explanation: bool, output: Output) -> bool:
    """Print the plan; `before` is the problem without what-if changes. Returns whether there is a plan."""
    result = plan(problem)
    earlier = plan(before, alternatives=0) if before is not None else None
    if output in (Output.JSON, Output.YAML):
        data = plan_data(result)
        data["advice"] = advice(result) or None
        if with_explanation:
            data["explanation"] = list(explain(result))
        if earlier is not None:
            data["before"] = _figures(earlier)
        show_data(data, output)
    elif output is Output.NAME:
        if result.feasible:
            typer.echo(result.placement)
    else:
        _show_tables(result, earlier, with_explanation, output)
    if not result.feasible and output is not Output.TABLE and output is not Output.WIDE:
        typer.echo(f"no plan: {bottleneck(result)}", err=True)
    return result.feasible


def _show_tables(result: PlanResult, earlier: PlanResult | None, with_explanation: bool, output: Output) -> None:
    if not with_explanation or not result.feasible:
        show_fields(_fields(result, earlier))
    if result.feasible:
        if with_explanation:
            typer.echo("\n".join(explain(result)))
            if words := advice(result):
                typer.echo(f"{words[0].upper()}{words[1:]}.")
        typer.echo()
        stdout_console().print(table(result.stages, visible(STAGE_COLUMNS, output)))
        if result.alternatives and not with_explanation:
            typer.echo()
            stdout_console().print(table(result.alternatives, ALTERNATIVE_COLUMNS))


def plan_words(problem: PlanProblem) -> str:
    """The model, how its weights are kept, and the lengths that are planned for."""
    tokens = f"{problem.prompt_tokens} tokens in, {problem.new_tokens} out"
    return f"{problem.model.name}, {weights_text(problem.dtype, problem.quantisation)}, {tokens}"


def _fields(result: PlanResult, earlier: PlanResult | None) -> dict[str, str]:
    problem, prediction = result.problem, result.prediction
    fields = {
        "model": plan_words(problem),
        "objective": problem.objective.value,
    }
    if prediction is None:
        return fields | {"plan": "none", "why": bottleneck(result)}
    fields |= {
        "time per token": human_seconds(prediction.time_per_token_s),
        "throughput": f"{prediction.throughput_tps:.2f} tokens/s with {load_words(result)}",
        "time to first token": human_seconds(prediction.ttft_s),
        "whole request": human_seconds(prediction.request_s),
        "bottleneck": bottleneck(result),
        "gap": f"{gap_text(result.gap or 0.0)}, in {result.gap_objective}",
    }
    if prediction.joules_per_token is not None:
        fields["energy"] = f"{prediction.joules_per_token:.2f} J per token, that of these boxes alone"
    if words := advice(result):
        fields["advice"] = words
    measured, estimated = _measured_nodes(result)
    if measured:
        sheets = f"; data sheets for {', '.join(estimated)}" if estimated else ""
        fields["figures"] = f"measured on {', '.join(measured)}{sheets}"
    if earlier is not None:
        was = earlier.prediction
        fields["before"] = (
            f"none: {bottleneck(earlier)}"
            if was is None
            else f"{human_seconds(was.time_per_token_s)} per token, {was.throughput_tps:.2f} tokens/s"
        )
    return fields


def load_words(result: PlanResult) -> str:
    """The requests at once of a feasible plan."""
    assert result.prediction is not None
    load = result.prediction.load
    if load.requests == 1:
        return "one request"
    return f"{load.requests} requests ({load.micro_batches} micro-batches of {load.batch})"


def _measured_nodes(result: PlanResult) -> tuple[list[str], list[str]]:
    """The plan's boxes that were measured, and the others."""
    nodes, times = [stage.node for stage in result.stages], result.problem.times
    return [node for node in nodes if node in times], [node for node in nodes if node not in times]


def plan_data(result: PlanResult) -> dict[str, Any]:
    """A plan as plain data for programs."""
    problem = result.problem
    kinds = {node.device.kind: node.device.source for node in problem.cluster.nodes if node.name not in problem.times}
    used = {stage.kind for stage in result.stages}
    stages = [
        {
            "node": stage.node,
            "device": stage.kind,
            "layers": str(stage.layers),
            "compute_s": stage.compute_s,
            "send_s": stage.send_s,
            "memory_bytes": plain(stage.memory) | {"needed": stage.memory.needed},
            "power": plain(stage.power),
        }
        for stage in result.stages
    ]
    alternatives = [
        {
            "placement": item.placement,
            "batch": item.load.batch,
            "micro_batches": item.load.micro_batches,
            "time_per_token_s": item.time_per_token_s,
            "throughput_tps": item.throughput_tps,
            "ttft_s": item.ttft_s,
            "request_s": item.request_s,
            "joules_per_token": item.joules_per_token,
        }
        for item in result.alternatives
    ]
    return {
        "model": problem.model.name,
        "dtype": problem.dtype.value,
        "quantisation": problem.quantisation,
        "objective": problem.objective.value,
        **_figures(result),
        "gap": result.gap,
        "gap_objective": result.gap_objective,
        "bottleneck": bottleneck(result),
        "stages": stages,
        "alternatives": alternatives,
        "shortage": plain(result.shortage),
        "measured": _measured_nodes(result)[0],
        "doubtful": doubtful(problem),
        "figures": {kind: source for kind, source in kinds.items() if kind in used},
    }


def _figures(result: PlanResult) -> dict[str, Any]:
    prediction = result.prediction
    return {
        "feasible": result.feasible,
        "time_per_token_s": prediction.time_per_token_s if prediction else None,
        "throughput_tps": prediction.throughput_tps if prediction else None,
        "ttft_s": prediction.ttft_s if prediction else None,
        "request_s": prediction.request_s if prediction else None,
        "joules_per_token": prediction.joules_per_token if prediction else None,
        "batch": prediction.load.batch if prediction else None,
        "micro_batches": prediction.load.micro_batches if prediction else None,
        "nodes": len(result.stages),
        "placement": result.placement,
    }


def show_comparison(problem: PlanProblem, plot: Path | None, output: Output) -> None:
    """Print a row for each strategy and whether to split at all, and draw the figures of the objective to `plot`.

    The words go below a table, else to stderr, so that a list stays a list; names come without.
    """
    rows = compare(problem)
    if plot is not None:
        draw(plot, _bars(rows, problem))
    show_list(rows, output, ROW_COLUMNS, lambda row: row.strategy)
    unknown = without_power(Costs(problem))
    if unknown and output in (Output.TABLE, Output.WIDE):
        typer.echo(
            f"note: no J/TOKEN with {listed(unknown)}, whose power is not known; a cluster file gives it as idle_w and "
            "busy_w",
            err=True,
        )
    words = "" if output is Output.NAME else verdict(problem, rows)
    if words and output in (Output.TABLE, Output.WIDE):
        typer.echo(f"\n{words}")
    elif words:
        typer.echo(f"note: {words}", err=True)


def draw(path: Path, drawing: str) -> None:
    """Write an SVG. Raises InvalidArgumentError naming the option for a path that cannot be written."""
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write --plot {path}: {error.strerror}", field="plot") from None


def _bars(rows: Sequence[StrategyRow], problem: PlanProblem) -> str:
    """What the objective is about, by strategy."""
    from edgeshard.planning.svg import bar_chart

    label = _LABELS[problem.goal]
    values = {row.strategy: _drawn(row, problem.goal) for row in rows}
    if all(value is None for value in values.values()):
        raise InvalidArgumentError("--plot: no strategy has a plan, so there is nothing to draw", field="plot")
    return bar_chart({problem.model.name: values}, f"{problem.model.name}: {label} by strategy", label)


def _drawn(figures: StrategyRow | SweepPoint, goal: Objective) -> float | None:
    """In the unit of `_LABELS`; None where the strategy cannot run."""
    if goal is Objective.THROUGHPUT:
        return figures.throughput_tps
    if goal is Objective.ENERGY:
        return figures.joules_per_token
    seconds = {
        Objective.REQUEST: figures.request_s,
        Objective.TTFT: figures.ttft_s,
        Objective.LATENCY: figures.time_per_token_s,
    }[goal]
    return None if seconds is None else 1000 * seconds


def show_sweep(problem: PlanProblem, text: str, plot: Path | None, output: Output) -> None:
    """Plan at many link rates; print the figures, and draw them to `plot`."""
    pair, rates = parse_sweep(text)
    points = []
    for rate in rates:
        at_rate = replace(problem, cluster=with_bandwidth(problem.cluster, rate, pair))
        results = strategies(at_rate, plan(at_rate, alternatives=0), SWEPT)
        points += [_point(rate, name, results[name]) for name in SWEPT]
    if plot is not None:
        draw(plot, _lines(points, problem))
    show_list(points, output, _sweep_columns(), lambda point: f"{point.bandwidth_bps:g}/{point.strategy}")


def parse_sweep(text: str) -> tuple[tuple[str, str] | None, list[float]]:
    """`bandwidth=1:100` or `bandwidth:NODE,NODE=1:100`: the pair (None: every link), and rates in bits a second."""
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
            f"--sweep {text!r}: say bandwidth=1:100 for all links, or bandwidth:NODE,NODE=1:100 for one, in Mb/s",
            field="sweep",
        )
    ratio = (last / first) ** (1 / (SWEEP_POINTS - 1))
    rates = [1e6 * first * ratio**step for step in range(SWEEP_POINTS - 1)] + [1e6 * last]
    return (nodes[0], nodes[1]) if len(nodes) == 2 else None, rates


def _point(rate: float, name: str, result: PlanResult) -> SweepPoint:
    prediction = result.prediction
    return SweepPoint(
        bandwidth_bps=rate,
        strategy=name,
        feasible=result.feasible,
        time_per_token_s=prediction.time_per_token_s if prediction else None,
        ttft_s=prediction.ttft_s if prediction else None,
        request_s=prediction.request_s if prediction else None,
        throughput_tps=prediction.throughput_tps if prediction else None,
        joules_per_token=prediction.joules_per_token if prediction else None,
        placement=result.placement,
    )


def _sweep_columns() -> list[Column[SweepPoint]]:
    return [
        Column("LINK", lambda point: f"{point.bandwidth_bps / 1e6:.3g} Mb/s", right=True),
        Column("STRATEGY", lambda point: point.strategy),
        Column("PER TOKEN", lambda point: _seconds(point.time_per_token_s), right=True),
        Column("TTFT", lambda point: _seconds(point.ttft_s), right=True),
        Column("REQUEST", lambda point: _seconds(point.request_s), right=True),
        Column("TOKENS/S", lambda point: _number(point.throughput_tps), right=True),
        Column("J/TOKEN", lambda point: _number(point.joules_per_token), right=True, wide=True),
        Column("PLACEMENT", lambda point: point.placement or "-"),
    ]


def _lines(points: Sequence[SweepPoint], problem: PlanProblem) -> str:
    """What the objective is about, by link rate."""
    from edgeshard.planning.svg import line_chart

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
    return line_chart(series, f"{problem.model.name}: {label} by link rate", "Mb/s", label, log_x=True)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _seconds(value: float | None) -> str:
    return "-" if value is None else human_seconds(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
