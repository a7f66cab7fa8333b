"""What no slicing of a prompt can be faster than, for many cuts at once. Pure.

Whatever its slices: stage j works for all of them, after the first one's way to it and before the last one's way from
it. So the first token comes no sooner than

    max over j of  [first slice through stages before j] + [all slices on j] + [last slice through stages behind j].

Each part is the least over all slicings, block by block; so is each link's. What remains is a sum over blocks and hops,
which solvers and numpy can do. The bound is exact for a single box and for a prompt in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from edgeshard.domain.step import STEP_TOKENS
from edgeshard.planning.all_cuts import Cuts
from edgeshard.planning.costs import Costs, Load
from edgeshard.planning.instance import Floats, Instance
from edgeshard.planning.pace import slice_unit
from edgeshard.planning.problem import ComputeTimes, StepShape


def slice_edges(tokens: int) -> tuple[int, ...]:
    """The positions at which steps of a prompt may begin and end: multiples of a unit and of a step's room, its end."""
    found = {*range(0, tokens, slice_unit(tokens)), *range(0, tokens, STEP_TOKENS), tokens}
    return tuple(sorted(found))


def step_room(budget: int, tokens: int) -> int:
    """A step's budget of tokens as far as a prompt has edges for it: a whole step, or a multiple of the unit."""
    unit = slice_unit(tokens)
    return STEP_TOKENS if budget >= STEP_TOKENS else max(unit, budget // unit * unit)


@dataclass(frozen=True, slots=True)
class PromptFloor:
    """Instances whose times are the least of the first slice, of the last one, and of all slices together."""

    first: Instance
    last: Instance
    whole: Instance

    @classmethod
    def of(cls, costs: Costs) -> PromptFloor:
        tokens = costs.problem.prompt_tokens
        edges = slice_edges(tokens)
        prefill = costs.prefill(Load())
        width = costs.problem.model.shape.frame_width * costs.problem.dtype.itemsize
        least = min(end - first for first, end in pairwise(edges))
        known: dict[int, tuple[_Least, ...]] = {}
        rows = []
        for node in costs.nodes:
            times = costs.times_of(node)
            if id(times) not in known:
                known[id(times)] = _least_times(times, costs, edges, width)
            rows.append(known[id(times)])
        hop_s = costs.hop_s(least * width)
        first, last, whole = (
            replace(
                prefill,
                compute_s=np.array([row[part].blocks for row in rows]),
                embed_s=np.array([row[part].embed for row in rows]),
                overhead_s=np.array([row[part].step for row in rows]),
                hop_s=prefill.hop_s if part == 2 else hop_s,
            )
            for part in range(3)
        )
        return cls(first, last, whole)

    @property
    def way(self) -> Instance:
        """A sum over stages and hops that no first token comes before: all slices on the source, the last one on."""
        source = self.whole.source
        changed = {}
        for name in ("compute_s", "embed_s", "overhead_s"):
            table = getattr(self.last, name).copy()
            table[source] = getattr(self.whole, name)[source]
            changed[name] = table
        return replace(self.last, **changed)

    def seconds(self, cuts: Cuts) -> Floats:
        """[K] seconds that no first token comes before."""
        first, last, whole = (_stage_seconds(part, cuts) for part in (self.first, self.last, self.whole))
        count = cuts.nodes.shape[1]
        if count == 1:
            return whole[:, 0]
        instance, nodes, receivers = self.first, cuts.nodes, cuts.receivers
        hop, every = instance.hop_s[nodes, receivers], self.whole.hop_s[nodes, receivers]
        delay = instance.latency_s[nodes, receivers]
        hop[:, -1] = every[:, -1] = instance.return_s[nodes[:, -1], instance.source]
        way = hop + delay
        before = np.cumsum(first + way, axis=1) - (first + way)
        behind = np.cumsum((last + way)[:, ::-1], axis=1)[:, ::-1] - (last + way)
        at_boxes = before + whole + behind + (way if instance.asynchronous else every + delay)
        at_links = before + first + every + delay + behind
        head_s = instance.head_s[instance.source] if instance.head_on_source else 0.0
        return np.asarray(np.maximum(at_boxes.max(axis=1), at_links[:, :-1].max(axis=1)) + head_s)


@dataclass(frozen=True, slots=True)
class _Least:
    blocks: Floats
    embed: float
    step: float


def _stage_seconds(instance: Instance, cuts: Cuts) -> Floats:
    """[K, stages] seconds of the stages, the head's where it is on the last."""
    nodes = cuts.nodes
    done = np.concatenate([np.zeros((instance.nodes, 1)), np.cumsum(instance.compute_s, axis=1)], axis=1)
    seconds = instance.overhead_s[nodes] + done[nodes, cuts.ends] - done[nodes, cuts.starts]
    seconds[:, 0] += instance.embed_s[instance.source]
    if not instance.head_on_source or nodes.shape[1] == 1:
        seconds[:, -1] += instance.head_s[nodes[:, -1]]
    return np.asarray(seconds)


def _least_times(times: ComputeTimes, costs: Costs, edges: tuple[int, ...], width: int) -> tuple[_Least, ...]:
    """Of one kind of box: the least of a first slice, of a last slice, of all slices."""
    spans = [
        (a, b, StepShape.of_spans([(edges[b] - edges[a], edges[a])]))
        for a in range(len(edges) - 1)
        for b in range(a + 1, len(edges))
    ]

    def least(seconds: list[float]) -> tuple[float, float, float]:
        total = [0.0, *[float("inf")] * (len(edges) - 1)]
        first = last = float("inf")
        for (a, b, _), taken in zip(spans, seconds, strict=True):
            total[b] = min(total[b], total[a] + taken)
            first = min(first, taken) if a == 0 else first
            last = min(last, taken) if b == len(edges) - 1 else last
        return first, last, total[-1]

    blocks = costs.problem.model.blocks
    by_kind = {kind: least([times.block_s(kind, shape) for *_, shape in spans]) for kind in set(blocks)}
    embed = least([times.embedding_s(shape) for *_, shape in spans])
    step = least([times.step_s(shape.step_tokens * width) for *_, shape in spans])
    return tuple(
        _Least(np.array([by_kind[block][part] for block in blocks]), embed[part], step[part]) for part in range(3)
    )
