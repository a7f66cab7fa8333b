"""One request over a cut from first principles, for tests: no solver, no slicer and no simulator of the planner.

Boxes are rooflines. The only thing taken from the planner are the slices that a head would cut, which are not what is
tested here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from edgeshard.planning.costs import Costs, Load
from edgeshard.planning.instance import Cut
from edgeshard.planning.problem import PlanProblem
from edgeshard.planning.prompt_time import PromptTimes


def every_cut(problem: PlanProblem) -> Iterator[Cut]:
    """Every order of distinct boxes from the source on with every split of the layers that their memory holds."""
    costs = Costs(problem)
    layers, source = problem.model.layer_count, costs.source
    others = [node for node in range(len(costs.nodes)) if node != source]
    for count in range(1, len(others) + 2):
        if not problem.min_nodes <= count <= (problem.max_nodes or count):
            continue
        for rest in itertools.permutations(others, count - 1):
            for ends in itertools.combinations(range(1, layers), count - 1):
                cut = Cut((source, *rest), (*ends, layers))
                if all(use.needed <= use.usable for use in costs.memory(Load(), cut)):
                    yield cut


def step_seconds(problem: PlanProblem, cut: Cut, tokens: int, before: int, sampled: bool) -> list[float]:
    """Seconds on each stage of a step of one request's `tokens` after `before` others."""
    costs, model = Costs(problem), problem.model
    item, kv = problem.dtype.itemsize, model.kv_bytes_per_token(problem.effective_kv_dtype)
    found, start = [], 0
    for index, (node, end) in enumerate(zip(cut.nodes, cut.ends, strict=True)):
        device = costs.nodes[node].device
        flops, rate = device.flops[problem.dtype], device.bandwidth_bytes_per_s
        seconds = device.step_overhead_s
        for block in model.blocks[start:end]:
            read = block.read_bytes(tokens, problem.dtype, problem.quantisation) + (before + tokens) * kv
            work = 2.0 * block.active_parameters * tokens + model.attention_flops(tokens, before + (tokens + 1) / 2)
            seconds += max(read / rate, work / flops)
        if index == 0:
            seconds += 2.0 * tokens * model.shape.hidden_size * item / rate
        if sampled and index == len(cut.nodes) - 1:
            head = model.head_bytes(problem.dtype, problem.quantisation) / rate
            seconds += max(head, 2.0 * model.head_parameters / flops)
        found.append(seconds)
        start = end
    return found


def link(problem: PlanProblem, sender: int, receiver: int) -> tuple[float, float]:
    """Bits a second and seconds of delay between two boxes without access links of their own."""
    nodes = Costs(problem).nodes
    found = problem.cluster.link(nodes[sender], nodes[receiver])
    return found.bandwidth_bps, found.latency_s


def frame_bits(payload: int) -> float:
    return 8.0 * (payload + max(1, -(-payload // (1 << 20))) * 128)


def first_token_s(problem: PlanProblem, cut: Cut) -> float:
    """Slices one behind the other, each box and each link serving one at a time; as many at once as stages."""
    width = problem.model.shape.frame_width * problem.dtype.itemsize
    slices = PromptTimes(Costs(problem)).first_token(cut).slices
    assert sum(slices) == problem.prompt_tokens
    count, before = len(cut.nodes), 0
    free, sent, back = [0.0] * count, [0.0] * count, list[float]()
    for number, tokens in enumerate(slices):
        last, at = number == len(slices) - 1, back[number - count] if number >= count else 0.0
        for stage, seconds in enumerate(step_seconds(problem, cut, tokens, before, last)):
            at = free[stage] = max(at, free[stage]) + seconds
            if stage < count - 1:
                rate, delay = link(problem, cut.nodes[stage], cut.nodes[stage + 1])
                sent[stage] = max(at, sent[stage]) + frame_bits(tokens * width) / rate
                at = sent[stage] + delay
        before += tokens
        if count > 1:
            rate, delay = link(problem, cut.nodes[-1], cut.nodes[0])
            sent[-1] = max(at, sent[-1]) + 8.0 * (128 + 16 * last) / rate
            at = sent[-1] + delay
        back.append(at)
    return back[-1]


def returning_s(problem: PlanProblem, cut: Cut) -> float:
    if len(cut.nodes) == 1:
        return 0.0
    rate, delay = link(problem, cut.nodes[-1], cut.nodes[0])
    return 8.0 * (128 + 16) / rate + delay


def token_s(problem: PlanProblem, cut: Cut) -> float:
    """One token in the middle of the answer, once around."""
    width = problem.model.shape.frame_width * problem.dtype.itemsize
    middle = problem.prompt_tokens + problem.new_tokens / 2
    costs, model = Costs(problem), problem.model
    kv = model.kv_bytes_per_token(problem.effective_kv_dtype)
    total, start = returning_s(problem, cut), 0
    for index, (node, end) in enumerate(zip(cut.nodes, cut.ends, strict=True)):
        device = costs.nodes[node].device
        rate, flops = device.bandwidth_bytes_per_s, device.flops[problem.dtype]
        total += device.step_overhead_s
        for block in model.blocks[start:end]:
            read = block.read_bytes(1, problem.dtype, problem.quantisation) + middle * kv
            total += max(read / rate, (2.0 * block.active_parameters + model.attention_flops(1, middle)) / flops)
        if index == 0:
            total += 2.0 * model.shape.hidden_size * problem.dtype.itemsize / rate
        if index == len(cut.nodes) - 1:
            head = model.head_bytes(problem.dtype, problem.quantisation) / rate
            total += max(head, 2.0 * model.head_parameters / flops)
        else:
            bandwidth, delay = link(problem, node, cut.nodes[index + 1])
            total += frame_bits(width) / bandwidth + delay
        start = end
    return total
