"""Cuts between a block's attention and its MLP, priced against cuts between whole blocks: no agent
holds such cuts.

A block is two units here, so that the planner's own searches run on 2 N of them. The attention half
has the norm before it, its matrices, the KV cache and its residual; the MLP half has the rest. Two
nodes exchange the same data at either cut: for each position one row of hidden states, to which the
residual is added already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from bench.hpipe_paper.testbed import CONFIGS
from edgeshard.architectures import expected_tensors, name_in_block
from edgeshard.domain.models.model import LayerRange
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_floor import CutFloor, PromptFloor, StepTables
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.problem import ComputeTimes, PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec
from edgeshard.planning.solvers.all_cuts import every_cut, kinds_of_all
from edgeshard.planning.solvers.instance import Cut

_MLP = ("mlp.", "post_attention_layernorm.", "ln_2.")
"""Prefixes of a block's tensors that follow its attention, in both models."""


class MlpSpec(BlockSpec):
    """A block's second half: it computes each position by itself and keeps nothing of it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class HalfTimes:
    """A node's times for whole blocks, asked for halves."""

    whole: ComputeTimes

    def block_s(self, block: BlockSpec, phase: StepShape) -> float:
        alone = replace(phase, context=0.0, kv_tokens=0.0)
        return self.whole.block_s(block, alone if isinstance(block, MlpSpec) else phase)

    def embedding_s(self, phase: StepShape) -> float:
        return self.whole.embedding_s(phase)

    def head_s(self, phase: StepShape) -> float:
        return self.whole.head_s(phase)

    def step_s(self, hidden_bytes: float) -> float:
        return self.whole.step_s(hidden_bytes)


class HalfCosts(Costs):
    """The costs of a problem's model by halves. Only attention halves take memory for keys and
    values."""

    def __init__(self, whole: PlanProblem) -> None:
        blocks = tuple(
            half for block in whole.model.blocks for half in halves(whole.model.name, block)
        )
        costs = Costs(whole)
        known = {id(times): HalfTimes(times) for times in costs.times}
        times = {
            name: known[id(times)] for name, times in zip(costs.names, costs.times, strict=True)
        }
        super().__init__(replace(whole, model=replace(whole.model, blocks=blocks), times=times))


def halves(name: str, block: BlockSpec) -> tuple[BlockSpec, MlpSpec]:
    """A block of the model as its attention and its MLP."""
    tensors = expected_tensors(CONFIGS[name], LayerRange(1, 2)).values()
    mlp = sum(
        math.prod(tensor.shape) for tensor in tensors if name_in_block(tensor.name).startswith(_MLP)
    )
    return replace(block, parameters=block.parameters - mlp), MlpSpec(mlp)


def cuts_sooner(costs: Costs, limit_s: float) -> tuple[list[Cut], int]:
    """The cuts of all there are whose first token comes before the limit, and how many are below it
    by their bound.

    The rest is ruled out by the bounds of `prompt_floor`. 38 million cuts by halves take five
    minutes.
    """
    tables = StepTables(costs)
    found = list[Cut]()
    searched = 0
    floor = PromptFloor.of(tables)
    closer = CutFloor(tables)
    times = PromptTimes(costs)
    instances = [costs.prefill(Load()), costs.decode(Load()), floor.first, floor.last, floor.whole]
    for cuts in every_cut(costs.decode(Load()), kinds_of_all(instances)):
        for place in np.flatnonzero(floor.seconds(cuts) < limit_s).tolist():
            cut = cuts.cut(place)
            if closer.seconds(cut) < limit_s:
                searched += 1
                found += [cut] * (times.first_token(cut).seconds < limit_s)
    return found, searched
