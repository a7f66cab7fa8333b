"""The costs of streaming, in words, and the ways to avoid it. Pure.

A disk must surprise no user: the speed of one request and of many, and the bytes read in a day, are
printed before anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, isfinite

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.tier_costs import StreamTables
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.inputs.what_if import changed
from edgeshard.planning.search.plan import (
    CutPrediction,
    PlannedStage,
    PlanResult,
    plan,
    predict_streaming,
)
from edgeshard.planning.search.tier_search import StreamedLoad, stream_loads
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stages

_DAY_S = 86_400
_MANY = (32, 16, 8, 4, 2)
"""Numbers of concurrent requests that a plan for one also describes; the most that memory holds is
used."""
_BATCH = 8
_MORE_GB = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Memory that one might buy."""
_GB, _MB = 1e9, 1e6
_LEAST_GB = 0.1 * _GB
"""Smaller amounts are printed in MB."""


def describe_streaming(result: PlanResult) -> tuple[str, ...]:
    """The description of a plan whose nodes stream; empty for any other."""
    return (*describe_speed(result), *describe_daily(result))


def describe_speed(result: PlanResult) -> tuple[str, ...]:
    """A line for each node that streams, with the bytes it holds and reads; the last line is the
    plan's speed."""
    if not result.streams or result.prediction is None:
        return ()
    lines = [_holds(stage) for stage in result.streaming]
    alone, many = speeds(result)
    lines[-1] += f": {_seconds(alone.time_per_token_s)} a token for a single request"
    if many is not None:
        lines[-1] += f", {_rate(many.throughput_tps)} at {_requests(many.load.requests)}"
    return tuple(lines)


def describe_daily(result: PlanResult) -> tuple[str, ...]:
    """Bytes read from each disk in a day at full load."""
    if not result.streams:
        return ()
    alone, many = speeds(result)
    busiest = many or alone
    rate = _rate(busiest.throughput_tps)
    reads = [(stage.node, daily_bytes(stage, busiest)) for stage in result.streaming]
    return tuple(
        f"{name} reads {_size(size)} a day from its disk at {rate} all day long"
        for name, size in reads
    )


def advice_without_streaming(result: PlanResult) -> str:
    """The gain by one more node like the largest that streams, and the memory that would do; '' for
    none."""
    streaming = result.streaming
    if not streaming:
        return ""
    now = _figures(result)
    largest = max(streaming, key=lambda stage: stage.memory.usable)
    parts = []
    group = next(node.group for node in result.problem.cluster.nodes if node.name == largest.node)
    more = plan(changed(result.problem, [f"+1 {group}"]), alternatives=0)
    if more.prediction is not None:
        parts.append(
            f"one more node like {largest.node} would bring {_figures(more)} instead of "
            f"{now}{_still(more)}"
        )
    if (upgrade := _enough_memory(result, streaming)) is not None:
        size, after = upgrade
        nodes = " and ".join(stage.node for stage in streaming)
        each = " each" if len(streaming) > 1 else ""
        parts.append(
            f"{size} GB more memory in {nodes}{each} would bring {_figures(after)}, without "
            "reading the disk"
        )
    return "; ".join(parts)


def describe_offer(result: PlanResult) -> str:
    """The plan with streaming if nothing fits; '' if there is none."""
    if result.offer is None:
        return ""
    return f"with --allow-streaming it would run: {'; '.join(describe_streaming(result.offer))}"


def speeds(result: PlanResult) -> tuple[CutPrediction, CutPrediction | None]:
    """A plan's cut with a single request, and with many at once: the planned number, else what
    memory holds.

    The second is None if memory holds only one.
    """
    problem, prediction = result.problem, result.prediction
    assert prediction is not None
    costs = Costs(problem)
    tables = StreamTables(costs)
    alone = predict_streaming(tables, StreamedLoad(Load()), prediction.cut, prediction.load)
    if prediction.load.requests > 1:
        return alone, prediction
    for requests in _MANY:
        variant = replace(
            problem, concurrency=requests, objective=Objective.THROUGHPUT, batch=_BATCH
        )
        predictions = [
            predict_streaming(tables, load, prediction.cut)
            for load in stream_loads(Costs(variant))
            if load.load.requests == requests and _fits(tables, load.load, prediction.cut)
        ]
        if predictions:
            return alone, max(predictions, key=lambda one: one.throughput_tps)
    return alone, None


def daily_bytes(stage: PlannedStage, prediction: CutPrediction) -> float:
    """Bytes that a stage reads in a day of steady decoding at the plan's rate."""
    one, batch = stage.streaming, prediction.load.batch
    assert one is not None
    tokens = batch if one.caches else batch * prediction.sweep  # a layer is read once for a sweep
    return one.step_bytes(batch) * prediction.throughput_tps / tokens * _DAY_S


def _fits(tables: StreamTables, load: Load, cut: Cut) -> bool:
    """Whether the nodes have room for this load, though they may have to stream more for its KV."""
    read = tables.streamed(load).streamed
    return all(isfinite(read[node, first, end]) for node, first, end in stages(cut))


def _enough_memory(
    result: PlanResult, streaming: Sequence[PlannedStage]
) -> tuple[int, PlanResult] | None:
    """The least memory among purchasable sizes with which nothing streams, and the plan then."""
    lacking = max(
        stage.streaming.streamed_bytes for stage in streaming if stage.streaming is not None
    )
    for size in _MORE_GB:
        if size * _GB < 0.5 * lacking:
            continue
        changes = [f"{stage.node} memory=+{size}GB" for stage in streaming]
        after = plan(
            replace(changed(result.problem, changes), allow_streaming=False), alternatives=0
        )
        if after.feasible:
            return size, after
        if size * _GB > 4 * lacking:
            return None
    return None


def _still(result: PlanResult) -> str:
    names = [stage.node for stage in result.streaming]
    return f" ({' and '.join(names)} would still stream)" if names else ", without reading a disk"


def _figures(result: PlanResult) -> str:
    assert result.prediction is not None
    figures = result.prediction
    if figures.load.requests == 1:
        return f"{_seconds(figures.time_per_token_s)} a token"
    return f"{_rate(figures.throughput_tps)} at {_requests(figures.load.requests)}"


def _holds(stage: PlannedStage) -> str:
    one = stage.streaming
    assert one is not None
    whole = one.weight_bytes
    read = one.streamed_bytes
    rate = one.disk_bytes_per_s
    disk = (
        f"from its disk at {rate / _GB:.2g} GB/s"
        if rate >= _LEAST_GB
        else f"from its disk at {rate / _MB:.2g} MB/s"
    )
    if one.caches:
        return (
            f"{stage.node} holds {_part(whole - one.expert_bytes, whole)}, caches "
            f"{_part(one.expert_bytes - read, one.expert_bytes)} of experts and reads the others "
            f"{disk}"
        )
    streams = _in_unit(read, _unit(whole))
    return f"{stage.node} holds {_part(whole - read, whole)} and streams {streams} {disk}"


def _part(size: float, whole: float) -> str:
    """Both in one unit, unless the first is too small for it."""
    unit, name = _unit(whole), "GB" if _unit(whole) == _GB else "MB"
    return f"{_in_unit(size, unit) if size else _amount(0)} of {_amount(whole / unit)} {name}"


def _in_unit(size: float, unit: float) -> str:
    """A size in this unit, unless it is too small for it."""
    return _amount(size / unit) if _unit(size) == unit else f"{_amount(size / _MB)} MB"


def _unit(size: float) -> float:
    return _GB if size >= _LEAST_GB else _MB


def _amount(size: float) -> str:
    return f"{size:.1f}" if size < 9.95 else f"{size:.0f}"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{ceil(size)} PB"


def _seconds(seconds: float) -> str:
    return (
        f"{1000 * seconds:.0f} ms"
        if seconds < 0.1
        else f"{seconds:.2g} s"
        if seconds < 10
        else f"{seconds:.0f} s"
    )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.2g} tokens/s" if tokens_per_s < 10 else f"{tokens_per_s:.0f} tokens/s"


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
