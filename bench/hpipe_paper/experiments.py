"""The results of each schedule: time to first token, rate, energy and memory, by the project's
planner and simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.hpipe_paper.halves import HalfCosts
from bench.hpipe_paper.schedules import (
    ALL,
    Schedule,
    balanced_gpipe,
    hpipe,
    planned_first_token,
    planned_rate,
)
from bench.hpipe_paper.testbed import MODELS, PROMPTS, cluster, problem
from edgeshard.domain.errors import EdgeShardError
from edgeshard.planning.costs.batch_time import batch_times
from edgeshard.planning.costs.costs import Costs, Load, MemoryUse
from edgeshard.planning.costs.energy import energy_j
from edgeshard.planning.inputs.devices import Cluster
from edgeshard.planning.inputs.problem import Objective, StepShape
from edgeshard.planning.simulation.simulated_pipeline import traffic
from edgeshard.planning.simulation.simulator import Simulation, simulate
from edgeshard.planning.simulation.timing import Visit
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stages

BETWEEN_MBPS = (100, 200, 500, 1000, 2000, 5000, 10000)
DRAWN_PROMPTS = 3
LENGTHS = tuple(2**power for power in range(12))
"""Lengths of the slices whose utilisation is computed, in tokens."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A schedule's figures; `reason` is set if it cannot run.

    `ttft_s` is for a single prompt; `tokens_per_s` counts prompt tokens with all prompts present at
    once; `joules` is the energy of one of these prompts on the nodes in use. `in_flight` prompts at
    once are enough for that rate, and have keys and values in memory; `memory_bytes` is the stages'
    need then on all nodes together. `fullest` is the largest need as a part of a node's available
    memory. `gap` is the gap that a plan certifies.
    """

    name: str
    placement: str
    slices: tuple[int, ...]
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    joules: float = 0.0
    in_flight: int = 0
    memory_bytes: int = 0
    fullest: float = 0.0
    gap: float | None = None
    reason: str = ""

    @property
    def runs(self) -> bool:
        return not self.reason


def outcome(costs: Costs, schedule: Schedule) -> Outcome:
    alone = _run(costs, schedule, 1)
    many = _run(costs, schedule, PROMPTS)
    held = in_flight(alone.makespan_s, many.makespan_s)
    uses = memory(costs, schedule, held)
    found = Outcome(
        name=schedule.name,
        placement=_placement(costs, schedule),
        slices=schedule.slices,
        ttft_s=alone.ttft_s,
        tokens_per_s=PROMPTS * costs.problem.prompt_tokens / many.makespan_s,
        joules=joules(costs, schedule, many) / PROMPTS,
        in_flight=held,
        memory_bytes=sum(use.needed for use in uses),
        fullest=max(use.needed / use.usable for use in uses),
        gap=schedule.gap,
    )
    over = max(use.needed - use.usable for use in uses)
    return replace(found, reason=f"a node is {over / 1e9:.1f} GB short") if over > 0 else found


def _run(costs: Costs, schedule: Schedule, prompts: int) -> Simulation:
    return simulate(
        schedule.pipeline, traffic(costs.problem, 1, prompts, schedule.slices), schedule.mode
    )


def timeline(costs: Costs, schedule: Schedule, prompts: int) -> list[Visit]:
    """The services of the first prompts."""
    return _run(costs, schedule, prompts).timeline


def in_flight(first_s: float, all_s: float) -> int:
    """How many prompts at once the rate needs: a prompt's way through all nodes over the busiest
    one's time for it.

    (docs/papers.md#rates-of-a-pipeline)
    """
    between_s = (all_s - first_s) / (PROMPTS - 1)
    return max(1, min(PROMPTS, math.ceil(first_s / between_s - 1e-9)))


def joules(costs: Costs, schedule: Schedule, run: Simulation) -> float:
    """The energy of a run over the nodes in use, by the planner's formula with the run's own
    times."""
    waiting = schedule.sums_share or (0.0,) * len(schedule.nodes)
    busy_s = [
        share * run.makespan_s * (1 - sums)
        for share, sums in zip(run.node_utilisation, waiting, strict=True)
    ]
    nodes = [
        (node, seconds)
        for group, seconds in zip(schedule.nodes, busy_s, strict=True)
        for node in group
    ]
    times = replace(
        batch_times(costs, schedule.cut, Load()),
        request_s=run.makespan_s,
        computing_s=tuple(seconds for _, seconds in nodes),
    )
    found = energy_j(costs, Cut(tuple(node for node, _ in nodes), ()), Load(1, PROMPTS), times)
    if found is None:
        raise EdgeShardError("the watts of a node of HPipe's test bed are unknown")
    return found


def memory(costs: Costs, schedule: Schedule, in_flight: int) -> tuple[MemoryUse, ...]:
    """The memory of each node with the keys and values of `in_flight` prompts and with steps of the
    longest slice."""
    sized = Costs(replace(costs.problem, step_tokens=max(schedule.slices)))
    found = []
    uses = sized.memory(Load(1, in_flight), schedule.cut)
    for use, group, parts in zip(uses, schedule.nodes, schedule.parts, strict=True):
        for node, part in zip(group, parts, strict=True):
            weights, kv = math.ceil(part * use.weights), math.ceil(part * use.kv)
            found.append(
                replace(
                    use, weights=weights, kv=kv, usable=int(costs.nodes[node].device.usable_bytes)
                )
            )
    return tuple(found)


def _placement(costs: Costs, schedule: Schedule) -> str:
    parts = []
    for (_, first, end), group in zip(stages(schedule.cut), schedule.nodes, strict=True):
        parts.append(f"{'+'.join(costs.names[node] for node in group)}={first}:{end}")
    return ",".join(parts)


def table(
    name: str, nodes: Cluster | None = None, ways: Sequence[Callable[[Costs], Schedule]] = ALL
) -> list[Outcome]:
    """All schedules of a model on the test bed, or on another cluster of the same nodes."""
    costs = costs_of(name, nodes)
    return [outcome(costs, way(costs)) for way in ways]


def costs_of(name: str, nodes: Cluster | None = None) -> Costs:
    return Costs(problem(name, nodes or cluster(), Objective.THROUGHPUT))


@dataclass(frozen=True, slots=True)
class Halved:
    """What a schedule reaches with cuts between whole blocks, and with cuts inside them, too; None
    if its plan does not optimise the figure. `gap` is what a plan by halves certifies."""

    name: str
    ttft_s: tuple[float, float] | None
    tokens_per_s: tuple[float, float] | None
    gap: float | None

    @property
    def gains(self) -> tuple[float | None, float | None]:
        """The gain in first tokens, and in prompt tokens, a second, as fractions of the values
        without halves; at least 0 except for rounding.
        """
        sooner = None if self.ttft_s is None else self.ttft_s[0] / self.ttft_s[1] - 1
        more = (
            None if self.tokens_per_s is None else self.tokens_per_s[1] / self.tokens_per_s[0] - 1
        )
        return _no_rounding(sooner), _no_rounding(more)


def _no_rounding(gain: float | None) -> float | None:
    return 0.0 if gain is not None and abs(gain) < 1e-9 else gain


_HALVED: tuple[tuple[Callable[[Costs], Schedule], bool, bool], ...] = (
    (balanced_gpipe, True, True),
    (hpipe, True, True),
    (planned_first_token, True, False),
    (planned_rate, False, True),
)
"""Schedules whose layers follow the nodes' speed, and whether they are for the first token and for
the rate."""


def halved(whole: Sequence[Outcome], name: str, nodes: Cluster | None = None) -> list[Halved]:
    """The table by halves, next to a table of the same model and nodes."""
    costs, found = HalfCosts(costs_of(name, nodes).problem), []
    for way, first, rate in _HALVED:
        schedule = way(costs)
        own = next(row for row in whole if row.name == schedule.name)
        alone, many = _run(costs, schedule, 1), _run(costs, schedule, PROMPTS)
        tokens_per_s = PROMPTS * costs.problem.prompt_tokens / many.makespan_s
        found.append(
            Halved(
                own.name,
                (own.ttft_s, alone.ttft_s) if first else None,
                (own.tokens_per_s, tokens_per_s) if rate else None,
                schedule.gap,
            )
        )
    return found


def utilisation(name: str, kind: str) -> dict[int, float]:
    """The operations of a block in its time, as a part of the device's capacity, by the slice's
    tokens; the slice begins a prompt.
    """
    costs = costs_of(name)
    node = next(index for index, node in enumerate(costs.nodes) if node.device.kind == kind)
    spec, peak = costs.problem.model, costs.nodes[node].device.flops[costs.problem.dtype]
    found, block = {}, spec.blocks[0]
    for tokens in LENGTHS:
        step = StepShape.of_spans([(tokens, 0)])
        operations = 2.0 * block.active_parameters * tokens + spec.attention_flops(
            block, tokens, step.context
        )
        found[tokens] = operations / peak / costs.times[node].block_s(block, step)
    return found


@dataclass(frozen=True, slots=True)
class Results:
    """By model; `sweeps` and `halves` also by Mb/s between the computers. `timelines` are of the
    first model, by schedule; `utilisations` are by device and model, and by tokens of a slice."""

    tables: dict[str, list[Outcome]]
    sweeps: dict[str, dict[int, list[Outcome]]]
    halves: dict[str, dict[int, list[Halved]]]
    utilisations: dict[str, dict[int, float]]
    timelines: dict[str, list[Visit]]


def run_all() -> Results:
    costs = costs_of(MODELS[0])
    links = {mbps: cluster(mbps * 1e6) for mbps in BETWEEN_MBPS}
    sweeps = {name: {mbps: table(name, nodes) for mbps, nodes in links.items()} for name in MODELS}
    return Results(
        tables={name: table(name) for name in MODELS},
        sweeps=sweeps,
        halves={
            name: {mbps: halved(sweep[mbps], name, nodes) for mbps, nodes in links.items()}
            for name, sweep in sweeps.items()
        },
        utilisations={
            f"{words}, {name}": utilisation(name, kind)
            for name in MODELS
            for kind, words in (("rtx-3090", "RTX 3090"), ("p100", "P100"))
        },
        timelines={
            schedule.name: timeline(costs, schedule, DRAWN_PROMPTS)
            for schedule in (balanced_gpipe(costs), hpipe(costs))
        },
    )
