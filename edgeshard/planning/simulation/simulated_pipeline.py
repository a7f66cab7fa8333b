"""From a plan's cut and costs to the ring that the simulator runs: times by tokens and context. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from edgeshard.planning.costs.costs import (
    FRAME_OVERHEAD_BYTES,
    RETURNED_TOKEN_BYTES,
    Costs,
    frame_bytes,
)
from edgeshard.planning.inputs.fields import invalid
from edgeshard.planning.inputs.problem import ComputeTimes, PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec
from edgeshard.planning.simulation.serving import ServingRing, StepSeconds, StepSpan
from edgeshard.planning.simulation.timing import HopTimes, Pipeline, StageTimes, Traffic
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stages


def ring(costs: Costs, cut: Cut, batch: int) -> Pipeline:
    """The ring of a cut, for micro-batches of `batch` sequences. Nodes are indices of `costs.nodes`."""
    problem = costs.problem
    count = len(cut.nodes)
    head_apart = problem.head_on_source and count > 1
    found = []
    for index, (node, first, end) in enumerate(stages(cut)):
        times = costs.times_of(costs.nodes[node])
        blocks = Counter(problem.model.blocks[first:end])
        headed = costs.has_head(cut, index) and not head_apart
        found.append(_stage(problem, times, blocks, batch, index == 0, headed))
    head = _head(costs.times_of(costs.nodes[cut.nodes[0]]), problem) if head_apart else None
    return Pipeline(
        stages=tuple(found),
        hops=_hops(costs, cut),
        asynchronous=problem.asynchronous,
        head_s=head,
        names=tuple(costs.names[node] for node in cut.nodes),
    )


def serving_ring(costs: Costs, cut: Cut) -> ServingRing:
    """The ring of a cut for steps that mix decodes and chunks of prompts. The head is with the last stage."""
    problem = costs.problem
    if problem.head_on_source:
        why = "is set, but arrivals are simulated with the head on the last node; leave it out, or simulate together"
        raise invalid("head_on_source", why)
    found = []
    for index, (node, first, end) in enumerate(stages(cut)):
        blocks = Counter(problem.model.blocks[first:end])
        found.append(
            _mixed_stage(problem, costs.times_of(costs.nodes[node]), blocks, index == 0, costs.has_head(cut, index))
        )
    return ServingRing(tuple(found), _hops(costs, cut))


def hidden_width(problem: PlanProblem) -> int:
    """Bytes of one position's hidden states between two stages."""
    return problem.model.shape.frame_width * problem.dtype.itemsize


def traffic(problem: PlanProblem, batch: int, micro_batches: int, slices: tuple[int, ...] = ()) -> Traffic:
    """The problem's prompts and answers, in `micro_batches` groups of `batch`."""
    return Traffic(batch, micro_batches, problem.prompt_tokens, problem.new_tokens, slices)


def _stage(
    problem: PlanProblem, times: ComputeTimes, blocks: Counter[BlockSpec], batch: int, first: bool, headed: bool
) -> StageTimes:
    work_s = _work(problem, times, blocks, first)

    def seconds(phase: StepShape, sampled: bool) -> float:
        return work_s(phase) + (times.head_s(phase) if headed and sampled else 0.0)

    def prefill_s(tokens: int, context: int) -> float:
        # Causal: the slice's queries see the context and half of the slice on average. Only the last is sampled from.
        length = tokens // batch
        is_last = context + length >= problem.prompt_tokens
        return seconds(StepShape(batch, length, context + (length + 1) / 2, context + length), is_last)

    def decode_s(sequences: int, context: int) -> float:
        return seconds(StepShape(sequences, 1, context + 1, context + 1), sampled=True)

    return StageTimes(prefill_s, decode_s)


def _mixed_stage(
    problem: PlanProblem, times: ComputeTimes, blocks: Counter[BlockSpec], first: bool, headed: bool
) -> StepSeconds:
    work_s = _work(problem, times, blocks, first)

    def seconds(spans: Sequence[StepSpan]) -> float:
        phase = StepShape.of_spans([(span.tokens, span.context) for span in spans])
        sampled = sum(span.sample for span in spans) if headed else 0
        return work_s(phase) + (times.head_s(replace(phase, batch=sampled, tokens=1)) if sampled else 0.0)

    return seconds


def _work(
    problem: PlanProblem, times: ComputeTimes, blocks: Counter[BlockSpec], first: bool
) -> Callable[[StepShape], float]:
    """Seconds of a stage's step but for the head."""
    width = hidden_width(problem)

    def seconds(phase: StepShape) -> float:
        total = times.step_s(phase.step_tokens * width) + (times.embedding_s(phase) if first else 0.0)
        return total + sum(number * times.block_s(block, phase) for block, number in blocks.items())

    return seconds


def _head(times: ComputeTimes, problem: PlanProblem) -> Callable[[int], float]:
    middle = problem.prompt_tokens + problem.new_tokens / 2
    return lambda batch: times.head_s(StepShape(batch, 1, middle, middle))


def _hops(costs: Costs, cut: Cut) -> tuple[HopTimes, ...]:
    problem, count = costs.problem, len(cut.nodes)
    if count == 1:
        return ()
    width = hidden_width(problem)
    found = []
    for index, sender in enumerate(cut.nodes):
        receiver = cut.nodes[(index + 1) % count]
        rate_bps = float(costs.bandwidth_bps[sender, receiver])
        returns_tokens = index == count - 1 and not problem.head_on_source
        station_s = _tokens_s(rate_bps) if returns_tokens else _states_s(rate_bps, width)
        found.append(HopTimes(station_s, float(costs.delay_s[sender, receiver])))
    return tuple(found)


def _states_s(bandwidth_bps: float, width_bytes: int) -> Callable[[int], float]:
    return lambda tokens: 8.0 * frame_bytes(tokens * width_bytes) / bandwidth_bps


def _tokens_s(bandwidth_bps: float) -> Callable[[int], float]:
    return lambda sequences: 8.0 * (FRAME_OVERHEAD_BYTES + sequences * RETURNED_TOKEN_BYTES) / bandwidth_bps
