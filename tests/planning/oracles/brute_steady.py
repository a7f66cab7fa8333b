"""The steady rate of any placement, and the best of all, without the planner's costs, tables or
closed formula.

Steps are computed independently from data sheets (`brute_plans.Counted`). The number of requests
that decode depends on the rate and the rate on it, so it is found by bisection.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, floor, inf

from edgeshard.planning.inputs.problem import PlanProblem
from tests.planning.oracles.brute_plans import (
    IN_FLIGHT,
    KV_BLOCK,
    PER_PART,
    TOKEN,
    Counted,
    Rate,
    frame_of,
)

STEP = 512
LONGEST_S = 1.0
HALVINGS = 60
TOGETHER = 8


def best_steady(problem: PlanProblem) -> Rate:
    """The highest steady rate of all placements at all loads; 0 when nothing fits."""
    counted, best = Counted(problem), Rate(0.0)
    for nodes, counts in counted.placements():
        if not counted.may_share(nodes, counts):
            continue
        for batch in range(1, problem.batch_limit + 1):
            limit = problem.request_limit
            for m in range(1, (IN_FLIGHT if limit is None else min(IN_FLIGHT, limit // batch)) + 1):
                if (counted.free(nodes, counts, batch, m) < 0).any():
                    break
                rate, gap_s = steady(counted, nodes, counts, batch, m)
                most_s = problem.max_time_per_token_s
                if rate > best.tokens_per_s and (most_s is None or gap_s <= most_s):
                    names = [counted.nodes[node].name for node in nodes]
                    best = Rate(rate, tuple(zip(names, counts, strict=True)), batch, m)
    return best


def steady(
    counted: Counted, nodes: tuple[int, ...], counts: tuple[int, ...], batch: int, m: int
) -> tuple[float, float]:
    """Tokens a second, and the mean seconds between two tokens of a request."""
    problem = counted.problem
    rounds = problem.new_tokens - 1
    requests = batch * m
    prompt = problem.prompt_tokens
    room = room_of(counted, nodes, batch)
    chunks = ceil(prompt / room)
    round_s, alone = _step(counted, nodes, counts, batch, 0)
    full_round_s, full = _step(counted, nodes, counts, batch, room)
    rest_round_s, rest = _step(counted, nodes, counts, batch, prompt - (chunks - 1) * room)
    if round_s == inf:
        return 0.0, inf
    window = max(m, len(nodes))
    full_s, rest_s = max(*full, full_round_s / window), max(*rest, rest_round_s / window)
    prompt_s = rest_round_s if chunks == 1 else full_round_s + (chunks - 2) * full_s + rest_s
    beside, turn_s = 1 + (chunks - 1) / window, max(round_s, m * max(alone))
    fulls, rests = (chunks - 1, 1.0) if rounds / batch >= chunks else (prompt / room, 0.0)
    busy_s = max(
        fulls * a + rests * b + max(0.0, rounds / batch - fulls - rests) * c
        for a, b, c in zip(full, rest, alone, strict=True)
    )

    steps = m * beside

    with_prompts = []
    for prompts in range(1, TOGETHER + 1):
        each = (fulls * one + rests * other for one, other in zip(full, rest, strict=True))
        left = max(0.0, steps - prompts * (fulls + rests))
        with_prompts.append(
            max(prompt_s, *(prompts * one + left * c for one, c in zip(each, alone, strict=True)))
        )

    def between_s(decoding: float) -> float:
        turns, round_s = rounds / decoding, with_prompts[0]
        if turns >= beside:
            return round_s + (turns - beside) * turn_s
        # the number of prompts in a round is whole, their average lies between two such numbers
        if chunks == rests == 1:
            for prompts, (here, more) in enumerate(pairwise(with_prompts), 1):
                round_s = max(round_s, here + (1 / turns - prompts) * (more - here))
        return round_s * turns / beside

    low, high = 0.0, float(requests)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if rounds and middle and middle + prompt_s / between_s(middle) < requests:
            low = middle
        else:
            high = middle
    found_s = between_s(low) if rounds and low else prompt_s / requests
    found_s = max(found_s, busy_s, fulls * full_s + rests * rest_s)
    gap_s = max(0.0, requests * found_s - prompt_s) / rounds if rounds else turn_s
    return problem.new_tokens / found_s, gap_s


def room_of(counted: Counted, nodes: tuple[int, ...], batch: int) -> int:
    """Tokens of a prompt in a step: the rest of 512 after its decodes, or the number that a link
    carries within a second.
    """
    width = counted.problem.model.shape.frame_width * counted.item
    budget = float(STEP)
    for sender, receiver in pairwise(nodes):
        rate, _ = counted.link(sender, receiver)
        if rate:
            budget = min(
                budget, max(KV_BLOCK, floor((LONGEST_S - 8 * PER_PART / rate) * rate / (8 * width)))
            )
        else:
            budget = KV_BLOCK
    return int(max(max(batch, budget) - batch, min(KV_BLOCK, ceil(budget / 2))))


def _step(
    counted: Counted, nodes: tuple[int, ...], counts: tuple[int, ...], batch: int, piece: int
) -> tuple[float, list[float]]:
    """Seconds around the ring and at each station of a step of `batch` decodes and a piece of a
    prompt."""
    problem = counted.problem
    prompt, middle = problem.prompt_tokens, problem.prompt_tokens + problem.new_tokens / 2
    before = (prompt - piece) / 2
    tokens, rows = batch + piece, batch + (piece > 0)
    seen = (batch * middle + piece * (before + (piece + 1) / 2)) / tokens
    read_back = (batch * middle + (before + piece) * (piece > 0)) / rows
    stages = [
        counted.stage_s(nodes, counts, index, tokens, seen, read_back, batch, rows)
        for index in range(len(nodes))
    ]
    if len(nodes) == 1:
        return stages[0], stages
    width = problem.model.shape.frame_width * counted.item
    back = frame_of(batch * width) if problem.head_on_source else PER_PART + TOKEN * batch
    hops, delays = list[float](), 0.0
    for index, node in enumerate(nodes):
        rate, delay = counted.link(node, nodes[(index + 1) % len(nodes)])
        size = back if index == len(nodes) - 1 else frame_of(tokens * width)
        hops.append(8 * size / rate if rate else inf)
        delays += delay
    total = sum(stages) + sum(hops) + delays
    both = [stage + hop for stage, hop in zip(stages, hops, strict=True)]
    return total, [*stages, *hops] if problem.asynchronous else both
