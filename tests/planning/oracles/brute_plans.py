"""The best plan of a small site by counting out every cut, at every load: for every objective.

It takes the model's sizes, the nodes' data sheets and the links, and computes everything else anew
from what docs/planning/assumptions.md says, without the planner's costs, scores, bounds or solvers:
only for up to 5 nodes x 10 layers. The one thing taken from the planner are the slices in which a
head would send a prompt over a cut, which are an agreement and not a result.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, prod
from typing import Any

import numpy as np

from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.devices import ClusterNode
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import BlockSpec
from edgeshard.planning.solvers.instance import Cut

IN_FLIGHT = 64
PART = 1 << 20
PER_PART = 128
TOKEN = 16
FRAME_SLACK = 64 << 20
KV_BLOCK = 16
Placement = tuple[tuple[int, ...], tuple[int, ...]]
"""Nodes in order, and the layers of each."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of a placement (node and layers of each stage) with m micro-batches of b
    requests."""

    tokens_per_s: float
    placement: tuple[tuple[str, int], ...] = ()
    batch: int = 0
    micro_batches: int = 0


def best_rate(problem: PlanProblem) -> Rate:
    """The highest rate of all; 0 when nothing fits."""
    counted = Counted(problem)
    best = Rate(0.0)
    for nodes, counts in counted.placements():
        for batch in range(1, problem.batch_limit + 1):
            rates = counted.rates(nodes, counts, batch)
            if len(rates) and rates.max() > best.tokens_per_s:
                names = [problem.cluster.nodes[node].name for node in nodes]
                m = int(np.argmax(rates)) + 1
                best = Rate(float(rates.max()), tuple(zip(names, counts, strict=True)), batch, m)
    return best


def best_value(problem: PlanProblem) -> float:
    """The least value of the objective, infinite if nothing fits; for a rate, the seconds a token
    takes."""
    if problem.goal is not Objective.THROUGHPUT:
        return least_seconds(problem, (problem.goal,))[problem.goal]
    rate = best_rate(problem).tokens_per_s
    return 1.0 / rate if rate else inf


def least_seconds(
    problem: PlanProblem, objectives: tuple[Objective, ...]
) -> dict[Objective, float]:
    """For a single request: the least time to the first token, of the request, and per token;
    infinite if there is none.
    """
    counted = Counted(problem)
    kept = [
        (place, counted.token_s(*place))
        for place in counted.placements()
        if counted.may_hold(*place)
    ]
    limit = problem.max_time_per_token_s
    kept = [
        (place, token_s)
        for place, token_s in kept
        if token_s < inf and (limit is None or token_s <= limit)
    ]
    best = dict.fromkeys(objectives, inf)
    if Objective.LATENCY in best:
        best[Objective.LATENCY] = min((token_s for _, token_s in kept), default=inf)
    for objective in (Objective.TTFT, Objective.REQUEST):
        if objective not in best:
            continue
        tokens = problem.new_tokens - 1 if objective is Objective.REQUEST else 0
        # The quickest promise first, so that most cuts need no look at their slices.
        for floor_s, place, token_s in sorted(
            (counted.no_sooner_s(*at) + tokens * t, at, t) for at, t in kept
        ):
            if floor_s > best[objective]:
                break
            best[objective] = min(best[objective], counted.first_token_s(*place) + tokens * token_s)
    return best


class Counted:
    """One problem, counted from the definitions. Nodes are numbered as the cluster has them."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        self.nodes: tuple[ClusterNode, ...] = problem.cluster.nodes
        self.item = problem.dtype.itemsize
        self._slices = PromptTimes(Costs(problem))
        self._first: dict[Placement, tuple[list[float], float]] = {}

    def placements(self) -> Iterator[Placement]:
        """Nodes in order and the layers of each that keep the rules, whatever they need."""
        problem = self.problem
        source = problem.cluster.names.index(problem.cluster.source)
        others = [node for node in range(len(self.nodes)) if node != source]
        most = min(len(self.nodes), problem.max_nodes or len(self.nodes))
        for stages in range(problem.min_nodes, most + 1):
            for counts in _counts(problem.model.layer_count, stages):
                for rest in itertools.permutations(others, stages - 1):
                    names = [problem.cluster.names[node] for node in (source, *rest)]
                    if all(rule.holds(names) for rule in problem.rules):
                        yield (source, *rest), counts

    def rates(
        self, nodes: tuple[int, ...], counts: tuple[int, ...], batch: int
    ) -> np.ndarray[Any, Any]:
        """Tokens a second by micro-batches from 1 on; 0 if a limit is broken."""
        problem = self.problem
        limit = problem.request_limit
        m = np.arange(1, (IN_FLIGHT if limit is None else min(IN_FLIGHT, limit // batch)) + 1)
        if not self.may_share(nodes, counts):
            return np.zeros(0)
        fits = np.all(self.free(nodes, counts, batch, m) >= 0, axis=0)
        if not fits.any():
            return np.zeros(0)
        prompt_round, prompt_busiest = self._times(nodes, counts, batch, True)
        round_s, busiest = self._times(nodes, counts, batch, False)
        if prompt_round == inf:
            return np.zeros(0)
        per_token = np.maximum(round_s, m * busiest)
        total = prompt_round + (m - 1) * prompt_busiest + (problem.new_tokens - 1) * per_token
        if problem.max_time_per_token_s is not None:
            fits &= per_token <= problem.max_time_per_token_s
        return np.where(fits, m * batch * problem.new_tokens / total, 0.0)

    def may_hold(self, nodes: tuple[int, ...], counts: tuple[int, ...]) -> bool:
        """Whether a single request keeps the limits of memory and layers."""
        return self.may_share(nodes, counts) and bool(
            np.all(self.free(nodes, counts, 1, np.array([1])) >= 0)
        )

    def token_s(self, nodes: tuple[int, ...], counts: tuple[int, ...]) -> float:
        """Seconds of one token in the middle of an answer, once around; infinite without a link."""
        return self._times(nodes, counts, 1, False)[0]

    def no_sooner_s(self, nodes: tuple[int, ...], counts: tuple[int, ...]) -> float:
        """Seconds that no first token comes before: one token's way around, or a node's or a link's
        share of it all."""
        problem = self.problem
        prompt, width = problem.prompt_tokens, problem.model.shape.frame_width * self.item
        way, busy = 0.0, 0.0
        for index, node in enumerate(nodes):
            way += self.stage_s(nodes, counts, index, 1, 1.0, 1.0, sampled=1)
            parameters = sum(count * block.parameters for block, count in self.held(counts, index))
            work = 2 * parameters * prompt / self.nodes[node].device.flops[problem.dtype]
            busy = max(busy, work)
            if index < len(nodes) - 1:
                rate, delay = self.link(node, nodes[index + 1])
                way += 8 * width / rate + delay
                busy = max(busy, 8 * prompt * width / rate)
        return max(way, busy)

    def first_token_s(self, nodes: tuple[int, ...], counts: tuple[int, ...]) -> float:
        """Slices one after the other, each node and each link serving one at a time; as many at
        once as stages."""
        return self.prompt(nodes, counts)[1]

    def prompt(self, nodes: tuple[int, ...], counts: tuple[int, ...]) -> tuple[list[float], float]:
        """Seconds that each stage computes for one request's prompt, and until its first token."""
        if (nodes, counts) not in self._first:
            cut = Cut(nodes, tuple(itertools.accumulate(counts)))
            slices = self._slices.first_token(cut).slices
            assert sum(slices) == self.problem.prompt_tokens
            self._first[nodes, counts] = self._follow(nodes, counts, slices)
        return self._first[nodes, counts]

    def _follow(
        self, nodes: tuple[int, ...], counts: tuple[int, ...], slices: tuple[int, ...]
    ) -> tuple[list[float], float]:
        problem = self.problem
        count = len(nodes)
        before = 0
        computing = [0.0] * count
        at_once = count if problem.sliced else 1
        width = problem.model.shape.frame_width * self.item
        free = [0.0] * count
        sent = [0.0] * count
        back = list[float]()
        for number, tokens in enumerate(slices):
            last = number == len(slices) - 1
            at = back[number - at_once] if number >= at_once else 0.0
            for stage, node in enumerate(nodes):
                seen = before + (tokens + 1) / 2
                sampled = int(last and not self._head_apart(nodes))
                seconds = self.stage_s(nodes, counts, stage, tokens, seen, before + tokens, sampled)
                computing[stage] += seconds
                at = free[stage] = max(at, free[stage]) + seconds
                if count == 1:
                    continue
                size = frame_of(tokens * width)
                if stage == count - 1:
                    size = (
                        frame_of(last * width)
                        if problem.head_on_source
                        else PER_PART + TOKEN * last
                    )
                rate, delay = self.link(node, nodes[(stage + 1) % count])
                sent[stage] = max(at, sent[stage]) + 8 * size / rate
                if not problem.asynchronous:
                    free[stage] = sent[stage]
                at = sent[stage] + delay
            before += tokens
            back.append(at)
        if self._head_apart(nodes):
            head_s = self._head_s(nodes[0], 1)
            return [computing[0] + head_s, *computing[1:]], max(back[-1], free[0]) + head_s
        return computing, back[-1]

    def _head_apart(self, nodes: tuple[int, ...]) -> bool:
        """Whether the source computes the head once hidden states are back."""
        return self.problem.head_on_source and len(nodes) > 1

    def may_share(self, nodes: tuple[int, ...], counts: tuple[int, ...]) -> bool:
        """Whether no node has more layers than its share."""
        for node, count in zip(nodes, counts, strict=True):
            share = self.problem.max_share.get(self.nodes[node].name, 1.0)
            if count > max(node == nodes[0], int(share * self.problem.model.layer_count + 1e-9)):
                return False
        return True

    def free(self, nodes: tuple[int, ...], counts: tuple[int, ...], batch: int, m: Any) -> Any:
        """[S, m] bytes left on every node."""
        problem = self.problem
        model = self.problem.model
        item = self.item
        kept = problem.context_tokens or problem.prompt_tokens + problem.new_tokens
        held = ceil(kept / KV_BLOCK) * KV_BLOCK
        step = problem.step_tokens or batch * problem.prompt_tokens
        width, inner = model.shape.frame_width, model.inner_size
        work = (
            FRAME_SLACK
            + step * (4 * model.shape.hidden_size + 3 * inner) * item
            + 2 * m * step * width * item
        )
        logits = batch * model.shape.vocab_size * (item + 4)
        head_at = 0 if problem.head_on_source else len(nodes) - 1
        free = []
        for index, node in enumerate(nodes):
            need = work
            for block, count in self.held(counts, index):
                need = need + count * (
                    self._bytes(block) + batch * m * (held * self._kv(block) + self._state(block))
                )
            if index == 0:
                need = need + model.embedding_parameters * item
            if index == head_at:
                need = need + self._head_bytes + logits
            if index == 0 and head_at == 0:
                need = need - model.shared_bytes(problem.dtype, problem.quantisation)
            device = self.nodes[node].device
            room = device.usable_bytes - problem.reserve.get(self.nodes[node].name, 0.0)
            free.append(room - self._loading(node, index in (0, head_at)) - need)
        return np.array(free)

    def _loading(self, node: int, outer: bool) -> int:
        """The largest tensor once more: the largest of this stage or, with one common memory, of
        all."""
        model, item = self.problem.model, self.problem.loading_itemsize
        if item is not None:
            return item * max(model.largest_block_tensor, model.largest_outer_tensor * outer)
        if not self.nodes[node].device.unified:
            return 0
        return max(model.largest_block_tensor, model.largest_outer_tensor) * self.item

    def held(self, counts: tuple[int, ...], index: int) -> Iterable[tuple[BlockSpec, int]]:
        """The blocks of a stage: each kind, and how many of it."""
        first = sum(counts[:index])
        return Counter(self._kinds[first : first + counts[index]]).items()

    @cached_property
    def _kinds(self) -> tuple[BlockSpec, ...]:
        """The model's blocks; equal ones are one object."""
        kinds: dict[BlockSpec, BlockSpec] = {}
        return tuple(kinds.setdefault(block, block) for block in self.problem.model.blocks)

    def _kv(self, block: BlockSpec) -> int:
        """Bytes of a token's keys and values."""
        return 2 * block.kv.heads * block.kv.head_dim * self.item

    def _state(self, block: BlockSpec) -> int:
        """Bytes of a request's state in a block, at any length."""
        return sum(prod(size.shape) * (4 if size.float32 else self.item) for size in block.states)

    def _bytes(self, block: BlockSpec) -> int:
        return block.weight_bytes(self.problem.dtype, self.problem.quantisation)

    @cached_property
    def _head_bytes(self) -> int:
        return self.problem.model.head_bytes(self.problem.dtype, self.problem.quantisation)

    def _head_s(self, node: int, sampled: int) -> float:
        device = self.nodes[node].device
        work = 2 * self.problem.model.head_parameters * sampled / device.flops[self.problem.dtype]
        return max(self._head_bytes / device.bandwidth_bytes_per_s, work)

    def stage_s(
        self,
        nodes: tuple[int, ...],
        counts: tuple[int, ...],
        index: int,
        tokens: int,
        seen: float,
        read_back: float,
        sampled: int,
        batch: int = 1,
    ) -> float:
        """A step of `tokens` tokens, which see `seen` others on average; `read_back` is KV of each
        of the `batch`."""
        node, shape = nodes[index], self.problem.model.shape
        device = self.nodes[node].device
        seconds = device.step_overhead_s
        for block, count in self.held(counts, index):
            read = self._bytes(block) + batch * (
                read_back * self._kv(block) + 2 * self._state(block)
            )
            work = (
                2 * block.parameters * tokens
                + 4 * tokens * seen * shape.attention_heads * block.kv.head_dim
            )
            seconds += count * max(
                read / device.bandwidth_bytes_per_s, work / device.flops[self.problem.dtype]
            )
        if index == 0:
            seconds += 2 * tokens * shape.hidden_size * self.item / device.bandwidth_bytes_per_s
        if sampled and index == (0 if self.problem.head_on_source else len(nodes) - 1):
            seconds += self._head_s(node, sampled)
        return seconds

    def computing(
        self, nodes: tuple[int, ...], counts: tuple[int, ...], batch: int, prompt: bool
    ) -> list[float]:
        """Seconds of each stage for the prompts of b requests, or for a token of each."""
        length = self.problem.prompt_tokens
        tokens = batch * (length if prompt else 1)
        seen = (length + 1) / 2 if prompt else length + self.problem.new_tokens / 2
        read_back = length if prompt else seen
        return [
            self.stage_s(nodes, counts, index, tokens, seen, read_back, batch, batch)
            for index in range(len(nodes))
        ]

    def _times(
        self, nodes: tuple[int, ...], counts: tuple[int, ...], batch: int, prompt: bool
    ) -> tuple[float, float]:
        """Seconds around the ring, and of its busiest station."""
        problem, tokens = self.problem, batch * (self.problem.prompt_tokens if prompt else 1)
        stages = self.computing(nodes, counts, batch, prompt)
        if len(nodes) == 1:
            return stages[0], stages[0]
        width = problem.model.shape.frame_width * self.item
        frame = frame_of(tokens * width)
        back = frame_of(batch * width) if problem.head_on_source else PER_PART + TOKEN * batch
        hops, delays = [], []
        for index, node in enumerate(nodes):
            rate, delay = self.link(node, nodes[(index + 1) % len(nodes)])
            size = back if index == len(nodes) - 1 else frame
            hops.append(8 * size / rate if rate else inf)
            delays.append(delay)
        stations = (
            [*stages, *hops]
            if problem.asynchronous
            else [s + h for s, h in zip(stages, hops, strict=True)]
        )
        return sum(stages) + sum(hops) + sum(delays), max(stations)

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        cluster = self.problem.cluster
        one = self.nodes[sender]
        other = self.nodes[receiver]
        link = cluster.links.get((one.name, other.name), cluster.default_link)
        rates = [
            rate for rate in (link.bandwidth_bps, one.up_bps, other.down_bps) if rate is not None
        ]
        return min(rates), link.latency_s


def _counts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to share `layers` layers among stages of at least one each."""
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers):
        for rest in _counts(layers - first, stages - 1):
            yield (first, *rest)


def frame_of(size: int) -> int:
    return size + max(1, ceil(size / PART)) * PER_PART
