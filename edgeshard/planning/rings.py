"""From a plan's cut and costs to the ring that the simulator runs: times by tokens and context. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from edgeshard.planning.costs import (
    FRAME_OVERHEAD_BYTES,
    RETURNED_TOKEN_BYTES,
    Costs,
    frame_bytes,
    link_matrices,
)
from edgeshard.planning.instance import Cut
from edgeshard.planning.problem import ComputeTimes, Phase, PlanProblem
from edgeshard.planning.scoring import stages
from edgeshard.planning.shapes import BlockSpec
from edgeshard.planning.timing import HopTimes, Pipeline, StageTimes, Traffic


def ring(costs: Costs, cut: Cut, batch: int) -> Pipeline:
    """The ring of a cut, for micro-batches of `batch` sequences. Boxes are indices of `costs.boxes`."""
    problem = costs.problem
    count = len(cut.boxes)
    head_apart = problem.head_on_source and count > 1
    found = []
    for index, (box, first, end) in enumerate(stages(cut)):
        times = costs.times_of(costs.boxes[box])
        blocks = Counter(problem.model.blocks[first:end])
        headed = costs.has_head(cut, index) and not head_apart
        found.append(_stage(times, blocks, batch, index == 0, headed))
    head = _head(costs.times_of(costs.boxes[cut.boxes[0]]), problem) if head_apart else None
    return Pipeline(
        stages=tuple(found),
        hops=_hops(costs, cut),
        asynchronous=problem.asynchronous,
        head_s=head,
        names=tuple(costs.names[box] for box in cut.boxes),
    )


def traffic(problem: PlanProblem, batch: int, micro_batches: int, slices: tuple[int, ...] = ()) -> Traffic:
    """The problem's prompts and answers, in `micro_batches` groups of `batch`."""
    return Traffic(batch, micro_batches, problem.prompt_tokens, problem.new_tokens, slices)


def _stage(times: ComputeTimes, blocks: Counter[BlockSpec], batch: int, first: bool, headed: bool) -> StageTimes:
    def seconds(phase: Phase) -> float:
        total = sum(number * times.block_s(block, phase) for block, number in blocks.items())
        total += times.embedding_s(phase) if first else 0.0
        return total + (times.head_s(phase) if headed else 0.0)

    def prefill_s(tokens: int, context: int) -> float:
        # Causal: the slice's queries see the context and half of the slice on average.
        length = tokens // batch
        return seconds(Phase(batch, length, context + (length + 1) / 2, context + length))

    def decode_s(sequences: int, context: int) -> float:
        return seconds(Phase(sequences, 1, context + 1, context + 1))

    return StageTimes(prefill_s, decode_s, times.step_s())


def _head(times: ComputeTimes, problem: PlanProblem) -> Callable[[int], float]:
    middle = problem.prompt_tokens + problem.new_tokens / 2
    return lambda batch: times.head_s(Phase(batch, 1, middle, middle))


def _hops(costs: Costs, cut: Cut) -> tuple[HopTimes, ...]:
    problem, count = costs.problem, len(cut.boxes)
    if count == 1:
        return ()
    bandwidth, latency = link_matrices(problem, costs.boxes)
    width = problem.model.shape.frame_width * problem.dtype.itemsize
    found = []
    for index, sender in enumerate(cut.boxes):
        receiver = cut.boxes[(index + 1) % count]
        rate_bps = float(bandwidth[sender, receiver])
        returns_tokens = index == count - 1 and not problem.head_on_source
        station_s = _tokens_s(rate_bps) if returns_tokens else _states_s(rate_bps, width)
        found.append(HopTimes(station_s, float(latency[sender, receiver])))
    return tuple(found)


def _states_s(bandwidth_bps: float, width_bytes: int) -> Callable[[int], float]:
    return lambda tokens: 8.0 * frame_bytes(tokens * width_bytes) / bandwidth_bps


def _tokens_s(bandwidth_bps: float) -> Callable[[int], float]:
    return lambda sequences: 8.0 * (FRAME_OVERHEAD_BYTES + sequences * RETURNED_TOKEN_BYTES) / bandwidth_bps
