"""From a plan's costs to the figures that its head needs at run time: a few numbers a stage, and
slices for long prompts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.domain.models.model import attended_pairs
from edgeshard.domain.requests.step import STEP_TOKENS
from edgeshard.planning.costs.costs import (
    FRAME_OVERHEAD_BYTES,
    KV_BLOCK_TOKENS,
    RETURNED_TOKEN_BYTES,
    Costs,
)
from edgeshard.planning.costs.slicing import SliceTimes, best_slices
from edgeshard.planning.inputs.problem import ComputeTimes, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec
from edgeshard.planning.solvers.instance import Cut, Floats
from edgeshard.planning.solvers.scoring import stages

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of a step for which a stage's seconds are sampled."""
_STEPS = tuple(
    (rows, StepShape.of_spans([(1, 0)] * rows), StepShape.of_spans([(rows, 0)])) for rows in ROWS
)
"""The same with their decodes, and as one chunk."""
_PAIRS_AT = 8
"""Sequences of the decode step, and 32 times as many tokens of the prompt, that show what a pair
costs."""
MAX_TRANSFER_S = 1.0
"""Longest time that a step occupies a link, even if more was promised: other steps wait for it."""
SLICE_TOKENS = 64
MOST_UNITS = 24
"""A prompt is cut in multiples of SLICE_TOKENS; the multiple is larger if there were too many units
to be quick."""


Blocks = tuple[tuple[BlockSpec, int], ...]
"""Kinds of blocks, each with its number."""


class StageCosts:
    """The StageCosts of any cut of one problem. Stages of one kind of node with the same number of
    blocks are computed once."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[tuple[object, ...], StageCost] = {}
        self._kinds: dict[tuple[int, int], Blocks] = {}

    def of(self, cut: Cut) -> tuple[StageCost, ...]:
        """A StageCost for each stage of the cut, in its order."""
        costs, costs_of_stages = self._costs, []
        for index, (node, first, end) in enumerate(stages(cut)):
            returns = index == len(cut.nodes) - 1
            receiver = cut.nodes[0] if returns else cut.nodes[index + 1]
            rate_bps = float(costs.bandwidth_bps[node, receiver])
            back = returns and not costs.problem.head_on_source
            costs_of_stages.append(
                replace(
                    self._without_hop(
                        costs.times[node],
                        self.kinds(first, end),
                        index == 0,
                        costs.has_head(cut, index),
                    ),
                    hop_delay_s=float(costs.delay_s[node, receiver]),
                    hop_s=8.0 * FRAME_OVERHEAD_BYTES / rate_bps,
                    hop_token_s=8.0
                    * (RETURNED_TOKEN_BYTES if back else costs.hidden_bytes)
                    / rate_bps,
                )
            )
        return tuple(costs_of_stages)

    def kinds(self, first: int, end: int) -> Blocks:
        """The blocks from `first` to `end`, equal ones together."""
        if (first, end) not in self._kinds:
            self._kinds[first, end] = tuple(
                Counter(self._costs.problem.model.blocks[first:end]).items()
            )
        return self._kinds[first, end]

    def _without_hop(
        self, times: ComputeTimes, kinds: Blocks, has_embedding: bool, has_head: bool
    ) -> StageCost:
        key = (id(times), kinds, has_embedding, has_head)
        if key not in self._known:
            self._known[key] = self._stage_cost(times, kinds, has_embedding, has_head)
        return self._known[key]

    def _stage_cost(
        self, times: ComputeTimes, kinds: Blocks, has_embedding: bool, has_head: bool
    ) -> StageCost:
        """The cost without the hop after it."""

        def blocks_s(phase: StepShape) -> float:
            return sum(count * times.block_s(block, phase) for block, count in kinds)

        def rest_s(tokens: int, phase: StepShape, sampled: int) -> float:
            seconds = times.step_s(tokens * self._costs.hidden_bytes)
            seconds += times.embedding_s(phase) if has_embedding else 0.0
            return seconds + (times.head_s(StepShape(sampled, 1, 1, 1)) if has_head else 0.0)

        def spans_s(count: int, tokens: int, before: int) -> float:
            return blocks_s(StepShape.of_spans([(tokens, before)] * count))

        before, tokens = max(self._costs.problem.held_tokens // 2, 2), 32 * _PAIRS_AT
        decode_pair_s = _slope(
            spans_s(_PAIRS_AT, 1, 0), spans_s(_PAIRS_AT, 1, before), _PAIRS_AT * before
        )
        # From the first position after the chunk: the mask starts there, and is no cost of a pair.
        prefill_pair_s = _slope(
            spans_s(1, tokens, 1), spans_s(1, tokens, before), tokens * (before - 1)
        )
        masked_s = spans_s(1, tokens, 1) - tokens * prefill_pair_s
        prefill_behind_s = _slope(spans_s(1, tokens, 0), masked_s, tokens)
        decode_s, prefill_s = [], []
        for rows, many, one in _STEPS:
            decode_s.append(blocks_s(many) - rows * decode_pair_s + rest_s(rows, many, rows))
            prefill_s.append(
                blocks_s(one) - attended_pairs(rows, 0) * prefill_pair_s + rest_s(rows, one, 1)
            )
        return StageCost(
            ROWS,
            _rising(decode_s),
            _rising(prefill_s),
            decode_pair_s,
            prefill_pair_s,
            0.0,
            0.0,
            0.0,
            prefill_behind_s,
        )


def stage_costs(costs: Costs, cut: Cut) -> tuple[StageCost, ...]:
    """A StageCost for each stage of one cut, in its order."""
    return StageCosts(costs).of(cut)


def _slope(near_s: float, far_s: float, count: int) -> float:
    return max(0.0, far_s - near_s) / count


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """Seconds that never fall with more rows.

    A pair's cost comes from one step. In another step attention may overlap with the reading of
    weights, so subtracting the cost there would leave too little."""
    return tuple(max(0.0, *seconds[: end + 1]) for end in range(len(seconds)))


def step_tokens(stages: Sequence[StageCost], least_tokens: int) -> int:
    """The token budget of a step, smaller if a link is slow: 1 MiB takes 8.6 s at 1 Mb/s."""
    # The last hop brings tokens back, not hidden states.
    fitting = [
        transfer_tokens(stage.hop_s, stage.hop_token_s)
        for stage in stages[:-1]
        if stage.hop_token_s > 0
    ]
    return max(least_tokens, min([STEP_TOKENS, *fitting]))


def chunk_room(budget: Floats, batch: int) -> Floats:
    """[K] tokens of a prompt in a step of `budget` tokens, decodes included: a few at the least."""
    least = np.minimum(KV_BLOCK_TOKENS, np.ceil(budget / 2))
    return np.asarray(np.maximum(np.maximum(batch, budget) - batch, least))


def link_tokens(costs: Costs) -> Floats:
    """[M, M] the token budget of a step that a link carries, sender by receiver."""
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = MAX_TRANSFER_S - 8.0 * FRAME_OVERHEAD_BYTES / costs.bandwidth_bps
        tokens = np.floor(seconds * costs.bandwidth_bps / (8.0 * costs.hidden_bytes))
    return np.asarray(
        np.clip(np.nan_to_num(tokens, posinf=STEP_TOKENS), KV_BLOCK_TOKENS, STEP_TOKENS)
    )


def transfer_tokens(hop_s: float, hop_token_s: float) -> int:
    """Tokens that a link takes within MAX_TRANSFER_S."""
    return int((MAX_TRANSFER_S - hop_s) / hop_token_s)


def slice_unit(tokens: int) -> int:
    """Tokens of which a slice of such a prompt has a multiple."""
    return SLICE_TOKENS * max(1, -(-tokens // (SLICE_TOKENS * MOST_UNITS)))


def rounded_prompt(tokens: int) -> int:
    """The nearest whole number of units, so that prompts of nearly one length share their slices.

    The last slice has the rest: up to half a unit more, or less, than in a prompt of the rounded
    length. A prompt of less than two units is not sliced, and is rounded down, to one unit at the
    least.
    """
    unit = slice_unit(tokens)
    if tokens < 2 * unit:
        return unit
    return (tokens + unit // 2) // unit * unit


def with_rest(lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The slices of a rounded prompt for one of `tokens`: the last one is longer or shorter by the
    difference."""
    return (*lengths[:-1], lengths[-1] + tokens - sum(lengths))


def prompt_slices(stages: Sequence[StageCost], tokens: int) -> tuple[int, ...]:
    """Lengths, which sum to `tokens`, of the slices that bring a prompt's first token soonest.

    HPipe's search over multiples of `slice_unit`; the last slice has the rest of a unit.
    (docs/papers.md#slices-of-long-prompts)
    """
    unit = slice_unit(tokens)
    units = tokens // unit
    if units < 2 or len(stages) < 2:
        return (tokens,)
    work = np.stack([_slice_table(stage, unit, units) for stage in stages], axis=2)
    counts = unit * np.arange(units + 1)
    send_s = np.stack(
        [stage.hop_delay_s + stage.hop_s + stage.hop_token_s * counts for stage in stages[:-1]],
        axis=1,
    )
    send_s[0] = 0.0
    lengths = [length * unit for length in best_slices(SliceTimes(work, send_s)).lengths]
    return with_rest(lengths, tokens)


@lru_cache(maxsize=512)
def _slice_table(stage: StageCost, unit: int, units: int) -> Floats:
    """[units + 1, units + 1] seconds of the slice from a to b, 0 if b <= a."""
    table = np.zeros((units + 1, units + 1))
    for first in range(units):
        for end in range(first + 1, units + 1):
            table[first, end] = stage.step_s([(first * unit, (end - first) * unit)])
    return table
