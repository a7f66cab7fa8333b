"""Nodes that stream: the plan compared with every cut, both modes of every node, every load and
every sweep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import inf, isfinite

import numpy as np
import pytest

from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.residency import choose_residency, in_disk_blocks, room_for_experts
from edgeshard.domain.requests.step import STEP_TOKENS
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.tier_costs import StreamTables
from edgeshard.planning.inputs.catalogue import DeviceSpec
from edgeshard.planning.inputs.devices import Cluster, ClusterNode, Link
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import ModelSpec, model_from_config
from edgeshard.planning.search import tier_search as joint
from edgeshard.planning.search.plan import plan, predict
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stages, violations

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_MIXTURE = _CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "head_dim": 64,
}
MIB = 1 << 20


def _model(random: np.random.Generator) -> ModelSpec:
    layers = int(random.integers(4, 8))
    if random.random() < 0.5:  # a mixture, perhaps with a layer that is none
        dense = [int(random.integers(layers))] if random.random() < 0.3 else []
        return model_from_config(
            "small", {**_MIXTURE, "num_hidden_layers": layers, "mlp_only_layers": dense}
        )
    model = model_from_config("small", {**_CONFIG, "num_hidden_layers": layers})
    if random.random() < 0.5:  # layers of different sizes
        blocks = [
            replace(b, parameters=int(b.parameters * random.uniform(0.3, 3))) for b in model.blocks
        ]
        return replace(model, blocks=tuple(blocks))
    return model


def _device(random: np.random.Generator, memory: float) -> DeviceSpec:
    return DeviceSpec(
        kind="node",
        memory_bytes=memory,
        system_bytes=0.0,
        bandwidth_bytes_per_s=10 ** random.uniform(9, 10.5),
        flops=dict.fromkeys(DType, 10 ** random.uniform(10, 12)),
        unified=True,
        source="test",
        disk_bytes_per_s=None if random.random() < 0.15 else 10 ** random.uniform(7.5, 10),
        disk_bytes=None if random.random() < 0.8 else random.uniform(5, 60) * MIB,
    )


def _problem(random: np.random.Generator) -> PlanProblem:
    model = _model(random)
    every = sum(block.weight_bytes(DType.FLOAT32) for block in model.blocks)
    count = int(random.integers(1, 4))
    nodes = tuple(
        ClusterNode(
            name, _device(random, 96 * MIB + random.uniform(0.3, 0.95) * every / count), name
        )
        for name in "abc"[:count]
    )
    link = Link(10 ** random.uniform(7, 10), random.uniform(0, 0.01))
    objective = (Objective.LATENCY, Objective.REQUEST, Objective.TTFT, Objective.THROUGHPUT)[
        int(random.integers(4))
    ]
    return PlanProblem(
        model,
        Cluster(nodes, link, "a"),
        objective=objective,
        prompt_tokens=int(random.choice([8, 100, 700])),
        new_tokens=int(random.integers(1, 64)),
        concurrency=int(random.integers(1, 7)) if objective is Objective.THROUGHPUT else None,
        batch=int(random.integers(1, 4)),
        dtype=DType.FLOAT32,
        allow_streaming=True,
        head_on_source=bool(random.integers(2)),
        asynchronous=bool(random.integers(2)),
    )


def mixture_problem(memory: float, inner: int = 256) -> PlanProblem:
    """One node with this memory, a disk of 0.1 GB/s, and a mixture of 5 layers with 8 experts, two
    of them a token's."""
    device = replace(
        _device(np.random.default_rng(1), memory), disk_bytes_per_s=1e8, disk_bytes=None
    )
    device = replace(device, bandwidth_bytes_per_s=1e10, flops=dict.fromkeys(DType, 1e11))
    model = model_from_config(
        "small", {**_MIXTURE, "num_hidden_layers": 5, "moe_intermediate_size": inner}
    )
    return PlanProblem(
        model,
        Cluster((ClusterNode("node", device, "node"),), Link(1e9, 0.0), "node"),
        objective=Objective.LATENCY,
        prompt_tokens=100,
        new_tokens=20,
        dtype=DType.FLOAT32,
        allow_streaming=True,
    )


def _cuts(nodes: int, layers: int) -> list[Cut]:
    found = []
    for count in range(nodes):
        for order in permutations(range(1, nodes), count):
            for ends in combinations(range(1, layers), count):
                found.append(Cut((0, *order), (*ends, layers)))
    return found


@dataclass(frozen=True)
class _Reads:
    """Seconds for reading all that is on a stage's disk once, and for a first slot. If experts are
    cached: seconds for all of them, and the number of their layers."""

    seconds: float = 0.0
    fill_s: float = 0.0
    experts_s: float = 0.0
    mixtures: int = 0


class _Brute:
    """Every plan, computed only from the nodes' times."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem, self.costs = problem, Costs(problem)
        self.weights = [block.weight_bytes(problem.dtype) for block in problem.model.blocks]

    def best(self) -> tuple[float, bool]:
        """The least cost, and whether a node streams in it, layers or experts; among equals, one
        without streaming."""
        best, streams = inf, False
        for cut in _cuts(len(self.costs.nodes), len(self.weights)):
            for load in self._loads():
                cost = self._resident(cut, load)
                if cost < best * (1 - 1e-9):
                    best, streams = cost, False
                for sweep in (
                    k for k in range(1, load.micro_batches + 1) if load.micro_batches % k == 0
                ):
                    for modes in product((False, True), repeat=len(cut.nodes)):
                        if any(modes) and (
                            cost := self._streaming(cut, load, sweep, modes)
                        ) < best * (1 - 1e-9):
                            best, streams = cost, True
        return best, streams

    def _loads(self) -> list[Load]:
        if self.problem.goal is not Objective.THROUGHPUT:
            return [Load()]
        limit = self.problem.request_limit or 1
        batches = range(1, self.problem.batch_limit + 1)
        return [Load(b, m) for b in batches for m in range(1, limit // b + 1)]

    def _resident(self, cut: Cut, load: Load) -> float:
        if violations(self.costs.decode(load), cut):
            return inf
        figures = predict(self.costs, load, cut)
        return figures.cost(self.problem.goal)

    def _streaming(self, cut: Cut, load: Load, sweep: int, modes: tuple[bool, ...]) -> float:
        memory = self.costs.memory(load, cut)
        reads: list[_Reads] = []
        for index, (node, first, end) in enumerate(stages(cut)):
            use, sizes = memory[index], self.weights[first:end]
            others = use.weights - sum(sizes)
            room = use.usable - use.kv - use.workspace - use.loading
            if not modes[index]:
                if use.weights > room:
                    return inf
                reads.append(_Reads())
                continue
            found = self._reads(sizes, others, min(room, use.weights - 1), node, first, end)
            if found is None:
                return inf
            reads.append(found)
        rounds = [self._round(cut, load, sweep, prefill, reads) for prefill in (True, False)]
        (first_round, first_busy), (round_s, busy) = rounds
        flight, more = load.micro_batches // sweep, self.problem.new_tokens - 1
        ttft, token = first_round + (flight - 1) * first_busy, max(round_s, flight * busy)
        match self.problem.goal:
            case Objective.LATENCY:
                return token
            case Objective.TTFT:
                return ttft
            case Objective.REQUEST:
                return ttft + more * token
            case _:
                return (ttft + more * token) / (load.requests * self.problem.new_tokens)

    def _reads(
        self, sizes: list[int], others: int, budget: int, node: int, first: int, end: int
    ) -> _Reads | None:
        """The reads of a stage with this budget, by the agents' own rules; None if it is
        impossible."""
        device, blocks = self.costs.nodes[node].device, self.problem.model.blocks[first:end]
        experts = [size for block in blocks for size in block.expert_bytes(self.problem.dtype)]
        cached = room_for_experts(others + sum(sizes) - sum(experts), experts, budget)
        if cached is not None:
            every = sum(in_disk_blocks(size) for size in experts)
            if device.disk_bytes_per_s is None or every > (device.disk_bytes or inf):
                return None
            mixtures = sum(block.experts > 0 for block in blocks)
            return _Reads(
                (every - cached) / device.disk_bytes_per_s,
                0.0,
                every / device.disk_bytes_per_s,
                mixtures,
            )
        try:
            kept = choose_residency(sizes, others, budget)
        except ResourceExhaustedError:
            return None
        if device.disk_bytes_per_s is None or kept.streamed_bytes > (device.disk_bytes or inf):
            return None
        return _Reads(
            kept.streamed_bytes / device.disk_bytes_per_s, max(sizes) / device.disk_bytes_per_s
        )

    def _round(
        self, cut: Cut, load: Load, sweep: int, prefill: bool, reads: list[_Reads]
    ) -> tuple[float, float]:
        tokens = load.batch * (self.problem.prompt_tokens if prefill else 1)
        steps = [min(STEP_TOKENS, tokens - begun) for begun in range(0, tokens, STEP_TOKENS)]
        instance = self.costs.prefill(load) if prefill else self.costs.decode(load)
        total, busiest = 0.0, 0.0
        last = len(cut.nodes) - 1
        for index, (node, first, end) in enumerate(stages(cut)):
            step = instance.overhead_s[node] + instance.compute_s[node, first:end].sum()
            step += instance.embed_s[node] * (index == 0)
            step += instance.head_s[node] * (index == (0 if instance.head_on_source else last))
            read_s = reads[index].seconds
            if mixtures := reads[index].mixtures:
                hidden = sum(
                    instance.compute_s[node, layer]
                    * (2 * block.expert_parameters / 8)
                    / (block.parameters - block.expert_parameters + 2 * block.expert_parameters / 8)
                    for layer, block in enumerate(self.problem.model.blocks)
                    if first <= layer < end
                )
                needed = [1 - (1 - 2 / 8) ** count for count in steps]
                every_s = reads[index].experts_s
                read_s = sum(
                    part * min(every_s, read_s * mixtures / max(mixtures - part, 1e-9))
                    for part in needed
                )
                seconds = sweep * (step - hidden + max(hidden, read_s))
            else:
                seconds = max(len(steps) * read_s, sweep * step) + reads[index].fill_s
            hop = delay = 0.0
            if last:
                following = cut.nodes[(index + 1) % (last + 1)]
                hops = instance.return_s if index == last else instance.hop_s
                hop, delay = sweep * hops[node, following], instance.latency_s[node, following]
            total += seconds + hop + delay
            busiest = (
                max(busiest, seconds, hop) if instance.asynchronous else max(busiest, seconds + hop)
            )
        return float(total), float(busiest)


def test_streaming_is_chosen_exactly_where_both_modes_counted_out_choose_it() -> None:
    random = np.random.default_rng(11)
    chosen = kept = cached = number = 0
    while chosen + kept < 100:
        problem, number = _problem(random), number + 1
        least, streams = _Brute(problem).best()
        result = plan(problem, alternatives=0)
        if not isfinite(least):
            assert not result.feasible, number
            continue
        assert result.prediction is not None, number
        assert result.prediction.cost(problem.goal) == pytest.approx(least, rel=1e-6), number
        assert result.streams == streams, number
        assert result.gap == 0.0, number
        chosen += streams
        kept += not streams
        cached += any(
            stage.streaming is not None and stage.streaming.caches for stage in result.stages
        )
    assert chosen > 30 and kept > 20 and 10 < cached < chosen - 10, (chosen, kept, cached)


def test_where_few_cuts_are_counted_the_gap_is_still_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exhaustive counts, no plan is better than the bound, and nearly all are the best."""
    monkeypatch.setattr(joint, "MOST_COUNTED", 0)
    random = np.random.default_rng(12)
    best = checked = 0
    for number in range(40):
        problem = _problem(random)
        least, _ = _Brute(problem).best()
        result = plan(problem, alternatives=0)
        if result.prediction is None or result.gap is None:
            continue
        cost = result.prediction.cost(problem.goal)
        checked += 1
        best += cost <= least * (1 + 1e-6)
        assert cost * (1 - result.gap) <= least * (1 + 1e-6), number
    assert checked > 25 and best >= 0.9 * checked


def test_tables_keep_what_the_agents_keep() -> None:
    """The same bytes as by the agents' rules for each stage, with the budget that the plan gives
    it."""
    random = np.random.default_rng(13)
    streamed = cached = 0
    for _ in range(60):
        problem = _problem(random)
        costs = Costs(problem)
        tables, load = StreamTables(costs), Load()
        read = tables.streamed(load).streamed
        for cut in _cuts(len(costs.nodes), problem.model.layer_count):
            if not all(isfinite(read[node, first, end]) for node, first, end in stages(cut)):
                continue
            for index, (one, (_, first, end)) in enumerate(
                zip(tables.streaming(load, cut), stages(cut), strict=True)
            ):
                if one is None:
                    continue
                sizes = [
                    block.weight_bytes(problem.dtype) for block in problem.model.blocks[first:end]
                ]
                others = costs.memory(load, cut)[index].weights - sum(sizes)
                assert one.weight_bytes == sum(sizes) + others
                experts = [
                    s
                    for block in problem.model.blocks[first:end]
                    for s in block.expert_bytes(problem.dtype)
                ]
                room = room_for_experts(one.weight_bytes - sum(experts), experts, one.budget_bytes)
                assert one.caches == (room is not None)
                if room is not None:
                    assert one.expert_bytes == sum(in_disk_blocks(size) for size in experts)
                    assert one.streamed_bytes == one.expert_bytes - room
                    cached += 1
                    continue
                kept = choose_residency(sizes, others, one.budget_bytes)
                assert kept.streamed_bytes == one.streamed_bytes
                assert kept.resident_bytes <= one.budget_bytes
                streamed += 1
    assert streamed > 50 and cached > 50


def test_nothing_streams_unless_it_is_allowed_but_it_is_offered() -> None:
    random = np.random.default_rng(14)
    offered = 0
    for _ in range(100):
        problem = _problem(random)
        alone = plan(replace(problem, allow_streaming=False), alternatives=0)
        allowed = plan(problem, alternatives=0)
        assert not alone.streams
        if alone.feasible:
            assert alone.offer is None
        elif alone.shortage is not None and alone.shortage.constraint in (
            "memory",
            "source_memory",
        ):
            assert (alone.offer is not None) == allowed.feasible
            if alone.offer is not None and allowed.prediction is not None:
                offered += 1
                assert alone.offer.placement == allowed.placement
    assert offered >= 10


def test_energy_and_streaming_are_refused_together() -> None:
    problem = replace(_problem(np.random.default_rng(1)), objective=Objective.ENERGY)
    with pytest.raises(InvalidArgumentError) as caught:
        plan(problem)
    assert caught.value.field == "allow_streaming"
