"""Lower bounds of a prompt's time under any slicing, for many cuts at once, and closer for one cut.
Pure.

Stage j works for all slices, whatever they are, after the first one's way to it and before the last
one's way from it. So the first token arrives no sooner than

    max over j of  [first slice through stages before j] + [all slices on j]
                   + [last slice through stages after j].

`PromptFloor` takes each part as the least over all slicings, block by block; so is each link's.
What remains is a sum over blocks and hops, which solvers and numpy can do. `CutFloor` takes the
least of the whole over all first and last slices, which is close and takes a tenth of a millisecond
for a cut. Both are exact for a single node and for a prompt in one piece. If slices do not follow
each other, the first token takes the sum of all steps' ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgeshard.domain.requests.step import MAX_STEP_TOKENS, STEP_TOKENS
from edgeshard.planning.costs.costs import Costs, Load, frame_bytes
from edgeshard.planning.costs.step_budget import slice_unit, transfer_tokens
from edgeshard.planning.inputs.problem import ComputeTimes, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.instance import Cut, Floats, Instance
from edgeshard.planning.solvers.scoring import stages


def slice_edges(tokens: int) -> tuple[int, ...]:
    """The positions at which steps of a prompt may begin and end: multiples of a unit and of a
    step's room, its end."""
    edges = {*range(0, tokens, slice_unit(tokens)), *range(0, tokens, STEP_TOKENS), tokens}
    return tuple(sorted(edges))


def step_room(budget: int, tokens: int) -> int:
    """A step's budget of tokens as far as a prompt has edges for it: a whole step, or a multiple of
    the unit."""
    unit = slice_unit(tokens)
    return STEP_TOKENS if budget >= STEP_TOKENS else max(unit, budget // unit * unit)


@dataclass(frozen=True, slots=True)
class _Steps:
    """[E, E] seconds of one kind of node by the edges at which a step begins and ends; infinite if
    there is no step."""

    blocks: dict[BlockSpec, Floats]
    embed: Floats
    step: Floats


class StepTables:
    """The seconds of every step that a prompt may be cut into, by kind of node."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        tokens = costs.problem.prompt_tokens
        self.edges = np.array((0, tokens) if self._in_one() else slice_edges(tokens))
        self._most = MAX_STEP_TOKENS if costs.problem.sliced else STEP_TOKENS
        self._known: dict[int, _Steps] = {}

    def _in_one(self) -> bool:
        """Whether the prompt is one step over any cut: too short for slices, and no link too slow
        for it."""
        tokens, rates = self.costs.problem.prompt_tokens, self.costs.bandwidth_bps
        if tokens >= 2 * slice_unit(tokens):
            return False
        links = rates[(rates > 0) & np.isfinite(rates)]
        if not len(links):
            return True
        slowest_bps = float(links.min())
        budget = transfer_tokens(
            8.0 * frame_bytes(0) / slowest_bps, 8.0 * self.costs.hidden_bytes / slowest_bps
        )
        return step_room(budget, tokens) >= tokens

    @property
    def least_tokens(self) -> int:
        return int(np.diff(self.edges).min())

    @property
    def fewest(self) -> int:
        """Steps of a prompt at the least."""
        return -(-int(self.edges[-1]) // self._most)

    def of(self, node: int) -> _Steps:
        times = self.costs.times[node]
        if id(times) not in self._known:
            self._known[id(times)] = self._made(times)
        return self._known[id(times)]

    def _made(self, times: ComputeTimes) -> _Steps:
        kinds = dict.fromkeys(self.costs.problem.model.blocks)
        tables = [np.full((len(self.edges),) * 2, np.inf) for _ in range(len(kinds) + 2)]
        for a, first in enumerate(self.edges.tolist()):
            for b, end in enumerate(self.edges.tolist()):
                if not first < end <= first + self._most:
                    continue
                shape = StepShape.of_spans([(end - first, first)])
                for table, kind in zip(tables, kinds, strict=False):
                    table[a, b] = times.block_s(kind, shape)
                tables[-2][a, b] = times.embedding_s(shape)
                tables[-1][a, b] = times.step_s(shape.step_tokens * self.costs.hidden_bytes)
        return _Steps(dict(zip(kinds, tables, strict=False)), tables[-2], tables[-1])


@dataclass(frozen=True, slots=True)
class PromptFloor:
    """Instances whose times are the least of the first slice, of the last one, and of all slices
    together.

    If steps do not follow each other (`apart`), all three are of all steps, with their delays.
    """

    first: Instance
    last: Instance
    whole: Instance
    apart: bool

    @classmethod
    def of(cls, tables: StepTables) -> PromptFloor:
        costs = tables.costs
        prefill, apart = costs.prefill(Load()), not costs.problem.sliced
        times_by_id: dict[int, tuple[Floats, Floats, Floats]] = {}
        rows = []
        for node in range(len(costs.nodes)):
            steps = tables.of(node)
            if id(steps) not in times_by_id:
                times_by_id[id(steps)] = _least_times(steps, costs.problem.model.blocks)
            rows.append(times_by_id[id(steps)])
        compute_s, embed_s, overhead_s = (
            np.stack(part, axis=1) for part in zip(*rows, strict=True)
        )
        hop_s = costs.hop_s(tables.least_tokens * costs.hidden_bytes)
        first, last, whole = (
            replace(
                prefill,
                compute_s=compute_s[part],
                embed_s=embed_s[part],
                overhead_s=overhead_s[part],
                hop_s=prefill.hop_s if part == 2 else hop_s,
                latency_s=prefill.latency_s * (tables.fewest if apart else 1),
            )
            for part in range(3)
        )
        return cls(whole, whole, whole, apart) if apart else cls(first, last, whole, apart)

    @property
    def way(self) -> Instance:
        """A sum over stages and hops that bounds the first token from below: all slices on the
        source, the last one on."""
        source = self.whole.source
        changed = {}
        for name in ("compute_s", "embed_s", "overhead_s"):
            table = getattr(self.last, name).copy()
            table[source] = getattr(self.whole, name)[source]
            changed[name] = table
        return replace(self.last, **changed)

    def seconds(self, cuts: Cuts) -> Floats:
        """[K] lower bounds of the seconds until the first token."""
        first, last, whole = (
            _stage_seconds(part, cuts) for part in (self.first, self.last, self.whole)
        )
        count = cuts.nodes.shape[1]
        if count == 1:
            return whole[:, 0]
        instance = self.first
        nodes = cuts.nodes
        receivers = cuts.receivers
        hop, every = instance.hop_s[nodes, receivers], self.whole.hop_s[nodes, receivers]
        delay = instance.latency_s[nodes, receivers]
        hop[:, -1] = every[:, -1] = instance.return_s[nodes[:, -1], instance.source]
        head_s = instance.head_s[instance.source] if instance.head_on_source else 0.0
        way = hop + delay
        if self.apart:
            return np.asarray((whole + way).sum(axis=1) + head_s)
        before = np.cumsum(first + way, axis=1) - (first + way)
        behind = np.cumsum((last + way)[:, ::-1], axis=1)[:, ::-1] - (last + way)
        at_nodes = before + whole + behind + (way if instance.asynchronous else every + delay)
        at_links = before + first + every + delay + behind
        return np.asarray(np.maximum(at_nodes.max(axis=1), at_links[:, :-1].max(axis=1)) + head_s)


class CutFloor:
    """The floor of one cut whose slices follow each other: the least over all first and last
    slices."""

    def __init__(self, tables: StepTables) -> None:
        self._tables, self._costs = tables, tables.costs
        self._prefill = tables.costs.prefill(Load())
        self._known: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        width, edges = tables.costs.hidden_bytes, tables.edges
        # By two edges: frames of all tokens between them, at least one frame's.
        bits = np.array(
            [
                [8.0 * frame_bytes(max(0, end - start) * width) for end in edges]
                for start in edges.tolist()
            ]
        )
        self._first_bits, self._last_bits = bits[0], bits[:, -1]
        self._between_bits = np.where(edges[:, None] < edges[None, :], bits, 0.0)
        inner = (edges > 0) & (edges < edges[-1])
        self._open = inner[:, None] & inner[None, :] & (edges[:, None] <= edges[None, :])

    def seconds(self, cut: Cut) -> float:
        """A lower bound of the seconds until the first token."""
        stage_times = [self._stage(node, first, end) for node, first, end in stages(cut)]
        # [S, E] of the first slice, by its end
        firsts = np.array([steps[0] for steps, _ in stage_times])
        # [S, E] of the last one, by its start
        lasts = np.array([steps[:, -1] for steps, _ in stage_times])
        between = np.array([least for _, least in stage_times])  # [S, E, E]
        source = self._prefill.source
        if len(stage_times) == 1:
            return float(between[0, 0, -1] + self._prefill.head_s[source])
        senders, receivers = list(cut.nodes[:-1]), list(cut.nodes[1:])
        rate_bps = self._costs.bandwidth_bps[senders, receivers][:, None]
        delay_s = self._costs.delay_s[senders, receivers][:, None]
        first_hops = self._first_bits / rate_bps + delay_s
        last_hops = self._last_bits / rate_bps + delay_s
        send_s = self._between_bits / rate_bps[:, :, None]
        before = np.zeros_like(firsts)
        before[1:] = np.cumsum(firsts[:-1] + first_hops, axis=0)
        behind = np.zeros_like(lasts)
        behind[:-1] = np.cumsum((lasts[1:] + last_hops)[::-1], axis=0)[::-1]
        ends = (
            self._prefill.return_s[cut.nodes[-1], source]
            + self._costs.delay_s[cut.nodes[-1], source]
        )
        ends += self._prefill.head_s[source if self._prefill.head_on_source else cut.nodes[-1]]
        nodes = (before + firsts)[:, :, None] + between + (lasts + behind)[:, None, :]
        links = (
            (before[:-1] + firsts[:-1] + first_hops - delay_s)[:, :, None]
            + send_s
            + behind[:-1, None, :]
        )
        if not self._prefill.asynchronous:
            nodes[:-1] += (first_hops - delay_s)[:, :, None] + send_s
        least = np.where(self._open, np.maximum(nodes.max(axis=0), links.max(axis=0)), np.inf).min(
            initial=np.inf
        )
        return float(min(least, before[-1, -1] + firsts[-1, -1]) + ends)

    def _stage(self, node: int, first: int, end: int) -> tuple[Floats, Floats]:
        """[E, E] seconds of each step of a stage, and the least of all steps from one edge to
        another."""
        steps = self._tables.of(node)
        kinds = Counter(self._costs.problem.model.blocks[first:end])
        key = (id(steps), tuple(kinds.items()), first == 0)
        if key not in self._known:
            table = steps.step + sum(count * steps.blocks[kind] for kind, count in kinds.items())
            table = table + steps.embed if first == 0 else table
            self._known[key] = table, _least_between(table)
        return self._known[key]


def _least_between(steps: Floats) -> Floats:
    """[E, E] the least seconds of steps from one edge to another; 0 from an edge to itself."""
    least = np.full_like(steps, np.inf)
    np.fill_diagonal(least, 0.0)
    for end in range(1, len(steps)):
        least[:end, end] = (least[:end, :end] + steps[:end, end]).min(axis=1)
    return least


def _least_times(steps: _Steps, blocks: Sequence[BlockSpec]) -> tuple[Floats, Floats, Floats]:
    """The least times of one kind of node, each for a first slice, a last slice and all slices: [3,
    N] of the blocks, [3] of the embedding, [3] of the step."""

    def least(table: Floats) -> tuple[float, float, float]:
        return float(table[0].min()), float(table[:, -1].min()), float(_least_between(table)[0, -1])

    by_kind = {kind: least(table) for kind, table in steps.blocks.items()}
    return (
        np.array([by_kind[block] for block in blocks]).T,
        np.array(least(steps.embed)),
        np.array(least(steps.step)),
    )


def _stage_seconds(instance: Instance, cuts: Cuts) -> Floats:
    """[K, stages] seconds of the stages; the last one's include the head's if it is there."""
    nodes = cuts.nodes
    done = np.concatenate(
        [np.zeros((instance.nodes, 1)), np.cumsum(instance.compute_s, axis=1)], axis=1
    )
    seconds = instance.overhead_s[nodes] + done[nodes, cuts.ends] - done[nodes, cuts.starts]
    seconds[:, 0] += instance.embed_s[instance.source]
    if not instance.head_on_source or nodes.shape[1] == 1:
        seconds[:, -1] += instance.head_s[nodes[:, -1]]
    return np.asarray(seconds)
