"""The effect of noise in profiles on fitted costs and on plans: random sites with planted times,
and samples that deviate.

Every node has true times of its own. A block takes the time of reading its weights or of computing
its rows, with a soft or a sharp bend between them, plus attention. A profile has these times at the
profiler's points, each times a random factor within 1 - noise and 1 + noise. `plan` gets the fits
of such profiles, and the true times. Its answer is scored with the true times: cut and load and,
for one request, the slices that the head would cut by the fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from types import MappingProxyType

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import attended_pairs
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    LayerKind,
    LayerProfile,
    MemoryProfile,
    Sample,
    StepOverhead,
)
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.costs.step_budget import stage_costs
from edgeshard.planning.inputs.devices import Cluster, parse_cluster
from edgeshard.planning.inputs.measured import MeasuredTimes
from edgeshard.planning.inputs.problem import ComputeTimes, Objective, PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec, ModelSpec, model_from_config
from edgeshard.planning.search.plan import plan, predict
from edgeshard.planning.solvers.solve import solve_throughput
from edgeshard.profiles.grid import Grid

LIMITS = {0.03: 0.05, 0.1: 0.1, 0.3: 0.25}
"""Limits of a plan's loss compared with the plan from the true times, by the noise of the
samples."""
OBJECTIVES = (Objective.REQUEST, Objective.THROUGHPUT)
WIDTH = 2048
VOCABULARY = 32_000
LONGEST = 8192
ROOM_BYTES = 3e8
"""For KV cache and workspace."""
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class PlantedTimes:
    """ComputeTimes of a made-up node. Seconds: `read_s` of a block's weights, the others of a row,
    a pair or a byte.

    `bend` is 1 if reading and computing add up, and large if the longer hides the shorter.
    """

    read_s: float
    row_s: float
    bend: float
    decode_pair_s: float
    prefill_pair_s: float
    masked_row_s: float
    embedded_row_s: float
    head_blocks: float
    overhead: StepOverhead

    def rows_s(self, rows: float) -> float:
        return float((self.read_s**self.bend + (self.row_s * rows) ** self.bend) ** (1 / self.bend))

    def prefill_s(self, tokens: float, context: float, batch: float = 1) -> float:
        masked = self.masked_row_s * batch * tokens if context > 0 else 0.0
        return (
            self.rows_s(batch * tokens)
            + masked
            + self.prefill_pair_s * batch * attended_pairs(tokens, context)
        )

    def decode_s(self, batch: float, context: float) -> float:
        return self.rows_s(batch) + self.decode_pair_s * batch * (context + 1)

    def block_s(self, block: BlockSpec, phase: StepShape) -> float:
        if phase.tokens == 1:
            return self.decode_s(phase.batch, max(0.0, phase.kv_tokens - 1))
        return self.prefill_s(
            phase.tokens, max(0.0, phase.context - (phase.tokens + 1) / 2), phase.batch
        )

    def embedding_s(self, phase: StepShape) -> float:
        return self.embedded_row_s * phase.step_tokens

    def head_s(self, phase: StepShape) -> float:
        return self.head_blocks * self.rows_s(phase.batch)

    def step_s(self, hidden_bytes: float) -> float:
        return self.overhead.seconds + self.overhead.seconds_per_byte * hidden_bytes


def made_times(typical_s: float, chance: Random) -> PlantedTimes:
    """A node within a factor of 2 of the site's typical time to read a block, of any ratio of
    arithmetic to reading."""
    read_s = typical_s * 2 ** chance.uniform(-1, 1)
    row_s = read_s / 2 ** chance.uniform(1, 7)
    return PlantedTimes(
        read_s=read_s,
        row_s=row_s,
        bend=chance.choice([1.0, 2.0, 8.0]),
        decode_pair_s=read_s * 10 ** chance.uniform(-5.5, -4),
        prefill_pair_s=row_s * 10 ** chance.uniform(-4.5, -3.5),
        masked_row_s=row_s * chance.choice([0.0, 0.1, 0.3]),
        embedded_row_s=read_s / 1000,
        head_blocks=chance.uniform(0.3, 3),
        overhead=StepOverhead(chance.uniform(2e-4, 2e-3), 1e-10 * 10 ** chance.random()),
    )


def profile_of(
    true: PlantedTimes, model: ModelSpec, grid: Grid, noise: float, chance: Random
) -> ComputeProfile:
    """The profiler's report, with every sample off by a factor within 1 - noise and 1 + noise."""

    def sample(count: int, context: int, seconds: float) -> Sample:
        return Sample(count, context, seconds * chance.uniform(1 - noise, 1 + noise), noise / 2)

    block = model.blocks[0]
    prefill = tuple(sample(n, c, true.prefill_s(n, c)) for n, c in grid.prefill_points(LONGEST))
    decode = tuple(sample(n, c, true.decode_s(n, c)) for n, c in grid.decode_points(LONGEST))
    embedded = tuple(sample(n, 0, true.embedded_row_s * n) for n in grid.prefill_tokens)
    head = tuple(sample(n, 0, true.head_blocks * true.rows_s(n)) for n in grid.decode_batches)
    layers = (
        LayerProfile(LayerKind.EMBEDDING, model.embedding_parameters, 1, 0, 0, embedded, embedded),
        LayerProfile(LayerKind.BLOCK, block.parameters, model.layer_count, 0, 0, prefill, decode),
        LayerProfile(LayerKind.HEAD, model.head_parameters, 1, 0, 0, head, head),
    )
    overhead = replace(
        true.overhead, seconds=true.overhead.seconds * chance.uniform(1 - noise, 1 + noise)
    )
    memory = MemoryProfile(8 << 30, 8 << 30, 0, unified=True)
    return ComputeProfile("node", "shape", DType.FLOAT16, "cpu", 1, layers, overhead, memory)


def made_model(chance: Random) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": chance.randint(4, 16),
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-5,
    }
    return model_from_config("made", config)


def made_cluster(model: ModelSpec, chance: Random) -> Cluster:
    """Two to five nodes; at most one can hold the whole model."""
    names = [f"node{number}" for number in range(chance.randint(2, 5))]
    weights = 2.0 * (sum(block.parameters for block in model.blocks) + 2 * model.head_parameters)
    sizes = {name: weights * chance.uniform(0.4, 1.0) + ROOM_BYTES for name in names}
    rates = {name: 10 ** chance.uniform(7.5, 9) for name in names}
    return parse_cluster(
        {
            "source": names[0],
            "device": [
                {
                    "name": name,
                    "memory_bytes": sizes[name],
                    "bandwidth_bytes_per_s": 1e11,
                    "flops": 1e13,
                }
                | {"up_bps": rates[name], "down_bps": rates[name]}
                for name in names
            ],
            "link": {"bandwidth_bps": 1e9, "latency_s": 10 ** chance.uniform(-4, -2)},
        }
    )


def made_problem(chance: Random) -> tuple[PlanProblem, Mapping[str, PlantedTimes]]:
    model = made_model(chance)
    cluster = made_cluster(model, chance)
    typical_s = 1e-4 * 100 ** chance.random()
    true = {name: made_times(typical_s, chance) for name in cluster.names}
    problem = PlanProblem(
        model=model,
        cluster=cluster,
        prompt_tokens=round(16 * 2 ** chance.uniform(0, 7.5)),
        new_tokens=round(16 * 2 ** chance.uniform(0, 5)),
        concurrency=chance.randint(2, 32),
        dtype=DType.FLOAT16,
    )
    return problem, true


def with_times(problem: PlanProblem, times: Mapping[str, ComputeTimes]) -> PlanProblem:
    return replace(problem, times=MappingProxyType(dict(times)))


def loss(
    problem: PlanProblem, true: Mapping[str, ComputeTimes], noisy: Mapping[str, ComputeTimes]
) -> float | None:
    """How much worse the plan from the noisy times is, by the true ones, 0.1 for 10 %; None if
    nothing fits."""
    best, found = (
        plan(with_times(problem, times), alternatives=0).prediction for times in (true, noisy)
    )
    if best is None or found is None:
        return None
    costs = Costs(with_times(problem, true))
    got = predict(costs, found.load, found.cut)
    seconds = got.cost(problem.goal)
    if problem.goal is Objective.REQUEST:
        first_s = PromptTimes(costs).seconds(found.cut, found.slices)
        seconds = first_s + (problem.new_tokens - 1) * got.time_per_token_s
    return seconds / best.cost(problem.goal) - 1


def falls(problem: PlanProblem, times: Mapping[str, MeasuredTimes]) -> Iterator[str]:
    """Every fitted cost that falls when rows or positions grow, and every step of a plan's stages
    that does."""
    rows, contexts = [1, 2, 3, 6, 16, 40, 64, 200, 512, 513, 1024, 4096], [0, 1, 64, 512, 5000]
    for name, measured in times.items():
        for fit in measured.fit.layers:
            for context in contexts:
                yield from _falls(f"{name} prefill", [fit.prefill_s(n, context) for n in rows])
                yield from _falls(f"{name} decode", [fit.decode_s(n, context) for n in rows])
            for count in rows:
                yield from _falls(
                    f"{name} prefill by context", [fit.prefill_s(count, c) for c in contexts]
                )
                yield from _falls(
                    f"{name} decode by context", [fit.decode_s(count, c) for c in contexts]
                )
        yield from _falls(f"{name} overhead", [measured.step_s(2048.0 * n) for n in rows])
    costs = Costs(with_times(problem, times))
    solution = solve_throughput(costs.decode(Load()), 1)
    for stage in stage_costs(costs, solution.cut) if solution is not None else ():
        for first in contexts:
            yield from _falls("a stage's chunk", [stage.step_s([(first, n)]) for n in rows[1:]])
            yield from _falls("a stage's decode", [stage.step_s([(first, 1)] * n) for n in rows])
        for count in rows[1:]:
            yield from _falls(
                "a stage by context", [stage.step_s([(first, count)]) for first in contexts]
            )


def _falls(what: str, seconds: list[float]) -> Iterator[str]:
    for less, more in pairwise(seconds):
        if more * _ROUNDING < less:
            yield f"{what}: {more:.3g} s after {less:.3g} s"


@dataclass(slots=True)
class Noisy:
    """The outcome for some random sites: how much worse each plan is, ascending, and the fitted
    costs that fall."""

    losses: list[float] = field(default_factory=list)
    falling_costs: list[str] = field(default_factory=list)


def made_site(
    number: int, noise: float, objective: Objective, grid: Grid, seed: int
) -> tuple[float | None, Iterator[str]]:
    """The loss of one random site's plan, None if nothing fits, and the costs that fall."""
    chance = Random(f"{seed}/{number}/{noise}")
    problem, true = made_problem(chance)
    problem = replace(problem, objective=objective)
    noisy = {
        name: MeasuredTimes.of(profile_of(times, problem.model, grid, noise, chance))
        for name, times in true.items()
    }
    return loss(problem, true, noisy), falls(problem, noisy)


def run(noise: float, objective: Objective, sites: int, grid: Grid, seed: int) -> Noisy:
    """Run `sites` sites; sites for which nothing fits are not counted."""
    found = Noisy()
    for number in itertools.count():
        lost, falling = made_site(number, noise, objective, grid, seed)
        if lost is not None:
            found.losses.append(lost)
            found.falling_costs += falling
            if len(found.losses) == sites:
                break
    found.losses.sort()
    return found
