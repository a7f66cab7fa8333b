"""Random sites and workloads, and the highest rate of each by counting out every cut at every load.

It takes the model's sizes, the boxes' data sheets and the links, and computes everything else anew from what
docs/planning.md says, without the planner's costs, scores or solvers: only for up to 5 boxes x 10 layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import Any

import numpy as np

from edgeshard.domain.dtypes import DType
from edgeshard.planning.devices import ClusterNode, parse_cluster
from edgeshard.planning.problem import Objective, PlanProblem
from edgeshard.planning.shapes import BUILT_IN_CONFIGS, model_from_config

IN_FLIGHT = 64
PART, PER_PART, TOKEN = 1 << 20, 128, 16
FRAME_SLACK = 64 << 20
KV_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of a placement (box and layers of each stage) with m micro-batches of b requests."""

    tokens_per_s: float
    placement: tuple[tuple[str, int], ...] = ()
    batch: int = 0
    micro_batches: int = 0


def random_problem(seed: int, most_boxes: int = 5, most_layers: int = 10) -> PlanProblem:
    """2 boxes, 2 layers and more; prompts and answers from 1 to some thousand tokens; memory from short to ample."""
    rng = np.random.default_rng(seed)
    boxes, layers = int(rng.integers(2, most_boxes + 1)), int(rng.integers(2, most_layers + 1))
    config = BUILT_IN_CONFIGS["llama2-7b"] | {
        "num_hidden_layers": layers,
        "hidden_size": int(rng.choice([512, 2048, 4096])),
        "num_key_value_heads": int(rng.choice([4, 32])),
        "vocab_size": int(rng.choice([2000, 32000])),
        "tie_word_embeddings": bool(rng.random() < 0.3),
    }
    model = model_from_config("small", config)
    prompt, new = (round(10 ** rng.uniform(0, 3.3)) for _ in range(2))
    dtype = DType.FLOAT16 if rng.random() < 0.5 else DType.FLOAT32
    whole = model.parameter_count * dtype.itemsize
    devices = []
    for index in range(boxes):
        share = float(rng.choice([0.4, 0.8, 1.5, 4.0])) * float(rng.uniform(0.7, 1.3))
        device: dict[str, Any] = {
            "name": f"box-{index}",
            "memory_bytes": whole * share + 2e8 + float(rng.choice([0, 5e8, 5e9])),
            "system_bytes": 0.0,
            "bandwidth_bytes_per_s": 10 ** rng.uniform(10, 12),
            "flops": 10 ** rng.uniform(11.5, 14),
            "unified": bool(rng.random() < 0.5),
            "step_overhead_s": float(rng.choice([0.0, 1e-3])),
        }
        if rng.random() < 0.3:
            device["up_bps"] = 10 ** rng.uniform(6.5, 9)
        devices.append(device)
    links: list[dict[str, Any]] = [
        {"bandwidth_bps": 10 ** rng.uniform(6.5, 9.5), "latency_s": 10 ** rng.uniform(-4, -2)}
    ]
    for sender, receiver in itertools.permutations(range(boxes), 2):
        if rng.random() < 0.3:
            ends = {"from": f"box-{sender}", "to": f"box-{receiver}"}
            links.append({**ends, "bandwidth_bps": 10 ** rng.uniform(6, 9.5), "latency_s": 10 ** rng.uniform(-4, -1.5)})
    cluster = parse_cluster({"source": "box-0", "device": devices, "link": links})
    options: dict[str, Any] = {}
    if rng.random() < 0.7:
        options["concurrency"] = int(rng.integers(2, 33))
    if rng.random() < 0.4:
        options["batch"] = int(rng.integers(1, 13))
    if rng.random() < 0.2:
        options["max_time_per_token_s"] = 10 ** rng.uniform(-2.5, 0.5)
    if rng.random() < 0.2:
        options["max_share"] = {"box-1": float(rng.uniform(0.1, 1.0))}
    if rng.random() < 0.2:
        options["max_nodes"] = int(rng.integers(1, boxes + 1))
    return PlanProblem(
        model=model,
        cluster=cluster,
        objective=Objective.THROUGHPUT if "concurrency" not in options or seed % 2 else Objective.AUTO,
        prompt_tokens=min(prompt, 2000),
        new_tokens=min(new, 2000),
        dtype=dtype,
        relays=bool(rng.random() < 0.2),
        asynchronous=bool(rng.random() < 0.8),
        head_on_source=bool(rng.random() < 0.2),
        **options,
    )


def best_rate(problem: PlanProblem) -> Rate:
    """The highest rate of all; 0 when nothing fits."""
    counted = Counted(problem)
    best = Rate(0.0)
    for boxes, counts in counted.placements():
        for batch in range(1, problem.batch_limit + 1):
            rates = counted.rates(boxes, counts, batch)
            if len(rates) and rates.max() > best.tokens_per_s:
                names = [problem.cluster.nodes[box].name for box in boxes]
                m = int(np.argmax(rates)) + 1
                best = Rate(float(rates.max()), tuple(zip(names, counts, strict=True)), batch, m)
    return best


@dataclass
class Counted:
    """One problem, counted from the definitions."""

    problem: PlanProblem

    @property
    def nodes(self) -> tuple[ClusterNode, ...]:
        return self.problem.cluster.nodes

    @cached_property
    def item(self) -> int:
        return self.problem.dtype.itemsize

    def placements(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Boxes in order and the layers of each, whatever they need."""
        layers = self.problem.model.layer_count
        source = self.problem.cluster.names.index(self.problem.cluster.source)
        others = [box for box in range(len(self.nodes)) if box != source]
        most = min(len(self.nodes), self.problem.max_nodes or len(self.nodes))
        for stages in range(self.problem.min_nodes, most + 1):
            least = 0 if self.problem.relays else 1
            for rest in itertools.permutations(others, stages - 1):
                for counts in _counts(layers, stages, least):
                    if counts[0] and counts[-1]:
                        yield (source, *rest), counts

    def rates(self, boxes: tuple[int, ...], counts: tuple[int, ...], batch: int) -> np.ndarray[Any, Any]:
        """Tokens a second by micro-batches from 1 on; 0 where a limit is broken."""
        problem = self.problem
        limit = problem.request_limit
        m = np.arange(1, (IN_FLIGHT if limit is None else min(IN_FLIGHT, limit // batch)) + 1)
        for box, count in zip(boxes, counts, strict=True):
            share = problem.max_share.get(self.nodes[box].name, 1.0)
            floor = 1 if box == boxes[0] else 0
            if count > max(floor, int(share * problem.model.layer_count + 1e-9)):
                return np.zeros(0)
        fits = np.all(self._free(boxes, counts, batch, m) >= 0, axis=0)
        if not fits.any():
            return np.zeros(0)
        prompt_round, prompt_busiest = self.times(boxes, counts, batch, True)
        round_s, busiest = self.times(boxes, counts, batch, False)
        if prompt_round == inf:
            return np.zeros(0)
        per_token = np.maximum(round_s, m * busiest)
        total = prompt_round + (m - 1) * prompt_busiest + (problem.new_tokens - 1) * per_token
        if problem.max_time_per_token_s is not None:
            fits &= per_token <= problem.max_time_per_token_s
        return np.where(fits, m * batch * problem.new_tokens / total, 0.0)

    def _free(self, boxes: tuple[int, ...], counts: tuple[int, ...], batch: int, m: Any) -> Any:
        """[S, m] bytes left on every box."""
        problem, model, item = self.problem, self.problem.model, self.item
        held = ceil((problem.prompt_tokens + problem.new_tokens) / KV_BLOCK) * KV_BLOCK
        step = batch * problem.prompt_tokens
        width, inner = model.shape.frame_width, model.inner_size
        work = FRAME_SLACK + step * (4 * model.shape.hidden_size + 3 * inner) * item + 2 * m * step * width * item
        logits = batch * model.shape.vocab_size * (item + 4)
        head_at = 0 if problem.head_on_source else len(boxes) - 1
        free = []
        for index, (box, count) in enumerate(zip(boxes, counts, strict=True)):
            device = self.nodes[box].device
            need = work + count * (model.blocks[0].parameters * item + batch * m * held * self._kv)
            if index == 0:
                need = need + model.embedding_parameters * item
            if index == head_at:
                need = need + model.head_parameters * item + logits
            if index == 0 and head_at == 0:
                need = need - model.tied_parameters * item
            loading = max(model.largest_block_tensor, model.largest_outer_tensor) * item if device.unified else 0
            free.append(device.usable_bytes - loading - need)
        return np.array(free)

    @cached_property
    def _kv(self) -> int:
        shape = self.problem.model.shape
        return 2 * shape.kv_heads * shape.head_dim * self.item

    def computing(self, boxes: tuple[int, ...], counts: tuple[int, ...], batch: int, prompt: bool) -> list[float]:
        """Seconds of each stage for the prompts of b requests, or for a token of each."""
        length = self.problem.prompt_tokens
        if prompt:
            return self.step(boxes, counts, batch * length, (length + 1) / 2, batch * length, batch)
        seen = length + self.problem.new_tokens / 2
        return self.step(boxes, counts, batch, seen, batch * seen, batch)

    def step(
        self,
        boxes: tuple[int, ...],
        counts: tuple[int, ...],
        tokens: int,
        seen: float,
        kv_tokens: float,
        sampled: int,
    ) -> list[float]:
        """Seconds of each stage for so many tokens, of which each sees so many others; head for those sampled."""
        problem, model, item = self.problem, self.problem.model, self.item
        shape = model.shape
        stages = []
        for index, (box, count) in enumerate(zip(boxes, counts, strict=True)):
            device = self.nodes[box].device
            flops = device.flops[problem.dtype]
            parameters = model.blocks[0].parameters
            read = parameters * item + kv_tokens * self._kv
            work = 2 * parameters * tokens + 4 * tokens * seen * shape.attention_heads * shape.head_dim
            seconds = device.step_overhead_s + count * max(read / device.bandwidth_bytes_per_s, work / flops)
            if index == 0:
                seconds += 2 * tokens * shape.hidden_size * item / device.bandwidth_bytes_per_s
            if sampled and index == (0 if problem.head_on_source else len(boxes) - 1):
                once = model.head_parameters * item / device.bandwidth_bytes_per_s
                seconds += max(once, 2 * model.head_parameters * sampled / flops)
            stages.append(seconds)
        return stages

    def times(self, boxes: tuple[int, ...], counts: tuple[int, ...], batch: int, prompt: bool) -> tuple[float, float]:
        """Seconds around the ring, and of its busiest station."""
        problem, shape, item = self.problem, self.problem.model.shape, self.item
        tokens = batch * (problem.prompt_tokens if prompt else 1)
        stages = self.computing(boxes, counts, batch, prompt)
        if len(boxes) == 1:
            return stages[0], stages[0]
        frame = frame_bytes(tokens * shape.frame_width * item)
        back = frame_bytes(batch * shape.frame_width * item) if problem.head_on_source else PER_PART + TOKEN * batch
        hops, delays = [], []
        for index, box in enumerate(boxes):
            following = boxes[(index + 1) % len(boxes)]
            rate, delay = self.link(box, following)
            size = back if index == len(boxes) - 1 else frame
            hops.append(8 * size / rate if rate else inf)
            delays.append(delay)
        stations = [*stages, *hops] if problem.asynchronous else [s + h for s, h in zip(stages, hops, strict=True)]
        return sum(stages) + sum(hops) + sum(delays), max(stations)

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        cluster, one, other = self.problem.cluster, self.nodes[sender], self.nodes[receiver]
        links: Mapping[tuple[str, str], Any] = cluster.links
        link = links.get((one.name, other.name), cluster.default_link)
        rates = [rate for rate in (link.bandwidth_bps, one.up_bps, other.down_bps) if rate is not None]
        return min(rates), link.latency_s


def _counts(layers: int, stages: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every way to share so many layers among stages of at least `least` each."""
    if stages == 1:
        yield (layers,)
        return
    for first in range(least, layers + 1):
        for rest in _counts(layers - first, stages - 1, least):
            if rest[-1] >= least:
                yield (first, *rest)


def frame_bytes(size: int) -> int:
    return size + max(1, ceil(size / PART)) * PER_PART
