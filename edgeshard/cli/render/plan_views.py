"""A plan as tables, JSON and YAML."""

from __future__ import annotations

from typing import Any

from edgeshard.cli.render.output import (
    TABLES,
    Column,
    Output,
    gap_text,
    human_bytes,
    human_seconds,
    plain,
    show_data,
    show_fields,
    show_text,
    stdout_console,
    table,
    visible,
)
from edgeshard.cli.render.views import speculation_text
from edgeshard.domain.models.dtypes import weights_text
from edgeshard.planning.inputs.measured import doubtful
from edgeshard.planning.inputs.problem import PlanProblem
from edgeshard.planning.report.describe_tiers import (
    advice_without_streaming,
    daily_bytes,
    describe_daily,
    describe_offer,
    describe_speed,
    describe_streaming,
    speeds,
)
from edgeshard.planning.report.explain import bottleneck, describe_locality, explain
from edgeshard.planning.report.speculation import SiteGuesses
from edgeshard.planning.report.verdict import advice
from edgeshard.planning.search.plan import (
    Alternative,
    CutPrediction,
    PlannedStage,
    PlanResult,
    figures_of,
    plan,
)
from edgeshard.planning.search.verify import verify
from edgeshard.planning.solvers.linear import Prover

STAGE_COLUMNS: list[Column[PlannedStage]] = [
    Column("NODE", lambda stage: stage.node),
    Column("DEVICE", lambda stage: stage.kind),
    Column("LAYERS", lambda stage: str(stage.layers)),
    Column("COMPUTES", lambda stage: human_seconds(stage.compute_s), right=True),
    Column("SENDS", lambda stage: human_seconds(stage.send_s), right=True),
    Column("WEIGHTS", lambda stage: human_bytes(stage.memory.weights), right=True),
    Column("KV CACHE", lambda stage: human_bytes(stage.memory.kv), right=True),
    Column("WORKSPACE", lambda stage: human_bytes(stage.memory.workspace), right=True, wide=True),
    Column("LOADING", lambda stage: human_bytes(stage.memory.loading), right=True, wide=True),
    Column("NEEDS", lambda stage: human_bytes(stage.memory.needed), right=True),
    Column("USABLE", lambda stage: human_bytes(stage.memory.usable), right=True),
]

ALTERNATIVE_COLUMNS: list[Column[Alternative]] = [
    Column("RUNNER-UP", lambda item: item.placement),
    Column("PER TOKEN", lambda item: human_seconds(item.time_per_token_s), right=True),
    Column("TOKENS/S", lambda item: f"{item.throughput_tps:.2f}", right=True),
    Column("TTFT", lambda item: human_seconds(item.ttft_s), right=True),
    Column("REQUEST", lambda item: human_seconds(item.request_s), right=True),
    Column("J/TOKEN", lambda item: number_text(item.joules_per_token), right=True),
]


def show_plan(
    problem: PlanProblem,
    before: PlanProblem | None,
    with_explanation: bool,
    output: Output,
    prover: Prover | None = None,
    verifier: Prover | None = None,
    guesses: SiteGuesses | None = None,
) -> bool:
    """Print the plan; `before` is the problem without what-if changes, `guesses` the site's
    knowledge of them. Returns whether there is a plan, and no better one as far as the `verifier`
    knows."""
    result = plan(problem, prover=prover)
    earlier = plan(before, alternatives=0, prover=prover) if before is not None else None
    verified = verify(result, verifier) if verifier is not None else None
    guessed = guesses.of(result) if guesses is not None and result.feasible else None
    if output in (Output.JSON, Output.YAML):
        data = plan_data(result)
        data["advice"] = _advice(result) or None
        if guessed is not None:
            data |= {"speculation": guessed[0].value, "guesses": plain(guessed[1])}
        if with_explanation:
            data["explanation"] = list(explain(result))
        if earlier is not None:
            data["before"] = _figures(earlier)
        if verified is not None:
            data["verified"] = plain(verified) | {"text": verified.text}
        show_data(data, output)
    elif output is Output.NAME:
        if result.feasible:
            _warn_of_streaming(result)
            show_text(result.placement)
    else:
        extra_fields = {} if guessed is None else {"speculation": speculation_text(*guessed)}
        _show_tables(result, earlier, with_explanation, output, extra_fields)
    if verified is not None and output not in (Output.JSON, Output.YAML):
        show_text(f"verified: {verified.text}", err=output is Output.NAME)
    if not result.feasible and output not in TABLES:
        show_text(f"no plan: {bottleneck(result)}", err=True)
    return result.feasible and (verified is None or not verified.better)


def _show_tables(
    result: PlanResult,
    earlier: PlanResult | None,
    with_explanation: bool,
    output: Output,
    extra_fields: dict[str, str],
) -> None:
    """`extra_fields` are further fields."""
    if not with_explanation or not result.feasible:
        show_fields(_fields(result, earlier) | extra_fields)
    if result.feasible:
        if with_explanation:
            lines = (
                *explain(result),
                *(f"Streaming: {line}." for line in describe_streaming(result)),
            )
            show_text("\n".join(lines))
            for words in filter(None, (describe_locality(result), _advice(result))):
                show_text(f"{words[0].upper()}{words[1:]}.")
        show_text()
        stdout_console().print(table(result.stages, visible(STAGE_COLUMNS, output)))
        if result.alternatives and not with_explanation:
            show_text()
            stdout_console().print(table(result.alternatives, ALTERNATIVE_COLUMNS))


def _advice(result: PlanResult) -> str:
    return advice_without_streaming(result) if result.streams else advice(result)


def _warn_of_streaming(result: PlanResult) -> None:
    """On stderr, if only the placement is printed."""
    for line in describe_streaming(result):
        show_text(f"streaming: {line}", err=True)


def describe_plan(problem: PlanProblem) -> str:
    """The model, how its weights are kept, and the lengths that are planned for."""
    tokens = f"{problem.prompt_tokens} tokens in, {problem.new_tokens} out"
    return f"{problem.model.name}, {weights_text(problem.dtype, problem.quantisation)}, {tokens}"


def _fields(result: PlanResult, earlier: PlanResult | None) -> dict[str, str]:
    problem, prediction = result.problem, result.prediction
    fields = {"model": describe_plan(problem), "objective": problem.objective.value}
    if prediction is None:
        offer = {"offer": words} if (words := describe_offer(result)) else {}
        return fields | {"plan": "none", "why": bottleneck(result)} | offer
    fields |= {
        "time per token": human_seconds(prediction.time_per_token_s),
        "throughput": f"{prediction.throughput_tps:.2f} tokens/s with "
        f"{describe_load(result)}{_rates(prediction)}",
        "time to first token": human_seconds(prediction.ttft_s),
        "whole request": human_seconds(prediction.request_s),
        "bottleneck": bottleneck(result),
        "gap": f"{gap_text(result.gap or 0.0)}, in {result.gap_objective}",
    }
    if prediction.joules_per_token is not None:
        fields["energy"] = f"{prediction.joules_per_token:.2f} J per token, of these nodes only"
    if result.streams:
        fields |= {
            "streaming": "; ".join(describe_speed(result)),
            "disk": "; ".join(describe_daily(result)),
        }
    if problem.rules:
        fields["rules"] = "; ".join(dict.fromkeys(rule.text for rule in problem.rules))
    remarks = {"packed": describe_locality(result), "advice": _advice(result)}
    fields |= {name: words for name, words in remarks.items() if words}
    measured, estimated = _measured_nodes(result)
    if measured:
        sheets = f"; data sheets for {', '.join(estimated)}" if estimated else ""
        fields["figures"] = f"measured on {', '.join(measured)}{sheets}"
    if earlier is not None:
        was = earlier.prediction
        fields["before"] = (
            f"none: {bottleneck(earlier)}"
            if was is None
            else f"{human_seconds(was.time_per_token_s)} per token, {was.throughput_tps:.2f} "
            "tokens/s"
        )
    return fields


def _rates(prediction: CutPrediction) -> str:
    """The kind of rate, if there are two."""
    if prediction.together_tps is None:
        return ""
    return f" all the time; {prediction.together_tps:.2f} where all start together"


def describe_load(result: PlanResult) -> str:
    """The requests at once of a feasible plan."""
    assert result.prediction is not None
    load = result.prediction.load
    if load.requests == 1:
        return "one request"
    return f"{load.requests} requests ({load.micro_batches} micro-batches of {load.batch})"


def _measured_nodes(result: PlanResult) -> tuple[list[str], list[str]]:
    """The plan's nodes that were measured, and the others."""
    nodes, times = [stage.node for stage in result.stages], result.problem.times
    return [node for node in nodes if node in times], [node for node in nodes if node not in times]


def plan_data(result: PlanResult) -> dict[str, Any]:
    """A plan as plain data for programs."""
    problem = result.problem
    kinds = {
        node.device.kind: node.device.source
        for node in problem.cluster.nodes
        if node.name not in problem.times
    }
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
    if result.streams:
        for data, stage in zip(stages, result.stages, strict=True):
            data["streaming"] = plain(stage.streaming)
    alternatives = [
        {
            "placement": item.placement,
            "batch": item.load.batch,
            "micro_batches": item.load.micro_batches,
            **figures_of(item),
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
        "locality": plain(result.locality),
        "bottleneck": bottleneck(result),
        "stages": stages,
        "alternatives": alternatives,
        "shortage": plain(result.shortage),
        "measured": _measured_nodes(result)[0],
        "doubtful": doubtful(problem),
        "figures": {kind: source for kind, source in kinds.items() if kind in used},
        **_streaming_data(result),
    }


def _streaming_data(result: PlanResult) -> dict[str, Any]:
    """Fields of a plan that streams, or in whose place streaming is offered."""
    if result.offer is not None:
        return {"offer": plan_data(result.offer)}
    if not result.streams or result.prediction is None:
        return {}
    alone, many = speeds(result)
    figures = many or alone
    return {
        "sweep": result.prediction.sweep,
        "alone_time_per_token_s": alone.time_per_token_s,
        "daily_read_bytes": {
            stage.node: daily_bytes(stage, figures)
            for stage in result.stages
            if stage.streaming is not None
        },
        "streaming": list(describe_streaming(result)),
    }


def _figures(result: PlanResult) -> dict[str, Any]:
    prediction = result.prediction
    return {
        "feasible": result.feasible,
        **figures_of(prediction),
        "batch": prediction.load.batch if prediction else None,
        "micro_batches": prediction.load.micro_batches if prediction else None,
        "nodes": len(result.stages),
        "placement": result.placement,
    }


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
