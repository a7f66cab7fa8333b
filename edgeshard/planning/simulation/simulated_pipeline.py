"""From a plan's cut and costs to the ring that the simulator runs: times by tokens and context.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.domain.errors import invalid
from edgeshard.domain.requests.step import MAX_STEP_TOKENS
from edgeshard.planning.costs.costs import KV_BLOCK_TOKENS, Costs, Load
from edgeshard.planning.costs.step_budget import (
    prompt_slices,
    rounded_prompt,
    stage_costs,
    step_tokens,
    with_rest,
)
from edgeshard.planning.inputs.problem import PlanProblem, StepShape
from edgeshard.planning.simulation.serving import Schedule, ServingRing, StepSeconds, StepSpan
from edgeshard.planning.simulation.timing import HopTimes, Pipeline, SimulatedTraffic, StageTimes
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stages

Stage = tuple[int, int, int]
"""(node, first layer, end)."""


def ring(costs: Costs, cut: Cut, batch: int) -> Pipeline:
    """The ring of a cut, for micro-batches of `batch` sequences. Nodes are indices of
    `costs.nodes`."""
    problem = costs.problem
    head_apart = problem.head_on_source and len(cut.nodes) > 1
    ring_stages = [
        _stage(costs, stage, batch, costs.has_head(cut, index) and not head_apart)
        for index, stage in enumerate(stages(cut))
    ]
    middle, times = problem.prompt_tokens + problem.new_tokens / 2, costs.times[cut.nodes[0]]
    return Pipeline(
        stages=tuple(ring_stages),
        hops=_hops(costs, cut),
        asynchronous=problem.asynchronous,
        head_s=(lambda sequences: times.head_s(StepShape(sequences, 1, middle, middle)))
        if head_apart
        else None,
        names=tuple(costs.names[node] for node in cut.nodes),
    )


def serving_ring(costs: Costs, cut: Cut) -> ServingRing:
    """The ring of a cut for steps that mix decodes and chunks of prompts. The head is with the last
    stage."""
    if costs.problem.head_on_source:
        why = (
            "is set, but arrivals are simulated with the head on the last node; leave it out, or "
            "simulate together"
        )
        raise invalid("head_on_source", why)
    ring_stages = [
        _mixed_stage(costs, stage, costs.has_head(cut, index))
        for index, stage in enumerate(stages(cut))
    ]
    return ServingRing(tuple(ring_stages), _hops(costs, cut))


def head_schedule(costs: Costs, cut: Cut, load: Load) -> Schedule:
    """The schedule that the head of a cut keeps."""
    stages = stage_costs(costs, cut)
    return Schedule(
        batch=load.batch,
        micro_batches=load.micro_batches,
        token_budget=max(load.batch, step_tokens(stages, KV_BLOCK_TOKENS)),
        window=max(len(stages), load.micro_batches),
        slices=_slices(stages),
        slice_budget=MAX_STEP_TOKENS,
    )


def _slices(stages: Sequence[StageCost]) -> Callable[[int], Sequence[int]]:
    """The slices of long prompts, searched once for each rounded length."""
    cached_slices = cache(lambda tokens: prompt_slices(stages, tokens))

    def lengths(tokens: int) -> Sequence[int]:
        return with_rest(cached_slices(rounded_prompt(tokens)), tokens)

    return lengths


def traffic(
    problem: PlanProblem, batch: int, micro_batches: int, slices: tuple[int, ...] = ()
) -> SimulatedTraffic:
    """The problem's prompts and answers, in `micro_batches` groups of `batch`."""
    return SimulatedTraffic(batch, micro_batches, problem.prompt_tokens, problem.new_tokens, slices)


def _stage(costs: Costs, stage: Stage, batch: int, headed: bool) -> StageTimes:
    work_s = _work(costs, stage)
    times = costs.times[stage[0]]
    prompt = costs.problem.prompt_tokens

    def seconds(phase: StepShape, sampled: bool) -> float:
        return work_s(phase) + (times.head_s(phase) if headed and sampled else 0.0)

    def prefill_s(tokens: int, context: int) -> float:
        # Causal: the slice's queries see the context and half of the slice on average. Only the
        # last is sampled from.
        length = tokens // batch
        is_last = context + length >= prompt
        return seconds(
            StepShape(batch, length, context + (length + 1) / 2, context + length), is_last
        )

    def decode_s(sequences: int, context: int) -> float:
        return seconds(StepShape(sequences, 1, context + 1, context + 1), sampled=True)

    return StageTimes(prefill_s, decode_s)


def _mixed_stage(costs: Costs, stage: Stage, headed: bool) -> StepSeconds:
    work_s, times = _work(costs, stage), costs.times[stage[0]]

    def seconds(spans: Sequence[StepSpan]) -> float:
        phase = StepShape.of_spans([(span.tokens, span.context) for span in spans])
        sampled = sum(span.sample for span in spans) if headed else 0
        return work_s(phase) + (
            times.head_s(replace(phase, batch=sampled, tokens=1)) if sampled else 0.0
        )

    return seconds


def _work(costs: Costs, stage: Stage) -> Callable[[StepShape], float]:
    """Seconds of a stage's step, without the head."""
    node, first, end = stage
    times, width = costs.times[node], costs.hidden_bytes
    blocks = Counter(costs.problem.model.blocks[first:end])

    def seconds(phase: StepShape) -> float:
        total = times.step_s(phase.step_tokens * width) + (
            times.embedding_s(phase) if first == 0 else 0.0
        )
        return total + sum(number * times.block_s(block, phase) for block, number in blocks.items())

    return seconds


def _hops(costs: Costs, cut: Cut) -> tuple[HopTimes, ...]:
    count, hops = len(cut.nodes), list[HopTimes]()
    for index, sender in enumerate(cut.nodes if count > 1 else ()):
        receiver = cut.nodes[(index + 1) % count]
        station_s = partial(
            _station_s, costs, float(costs.bandwidth_bps[sender, receiver]), index == count - 1
        )
        hops.append(HopTimes(station_s, float(costs.delay_s[sender, receiver])))
    return tuple(hops)


def _station_s(costs: Costs, bandwidth_bps: float, returns: bool, count: int) -> float:
    return 8.0 * costs.hop_bytes(count, returns) / bandwidth_bps
