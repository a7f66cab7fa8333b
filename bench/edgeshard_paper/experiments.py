"""The paper's experiments by the planner and the simulator, using only the catalogue's figures."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from bench.edgeshard_paper.paper_numbers import (
    LINK_BPS,
    NEW_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    SLOW_LINK_BPS,
)
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.devices import Cluster, Link, parse_cluster, with_bandwidth
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import built_in_model
from edgeshard.planning.report.baselines import STRATEGIES, strategies
from edgeshard.planning.search.load_search import loads
from edgeshard.planning.search.plan import PlanResult, plan
from edgeshard.planning.simulation.simulated_pipeline import ring, traffic
from edgeshard.planning.simulation.simulator import Simulation, simulate
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stages
from edgeshard.planning.solvers.solve import solve_latency, solve_throughput

TESTBED = Path(__file__).parents[2] / "deploy" / "examples" / "paper-testbed.toml"
SWEPT = ("edge-solo", "cloud-edge-even", "cloud-edge-opt", "edgeshard")
SOURCES = {"AGX Orin": "agx-1", "Orin NX": "nx-1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One strategy under one objective; `reason` is set if there is no plan."""

    placement: str
    nodes: int
    load: Load
    simulation: Simulation | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy: planned for latency, and for throughput."""

    model: str
    strategy: str
    latency: Outcome
    throughput: Outcome

    @property
    def ms_per_token(self) -> float | None:
        return (
            None if self.latency.simulation is None else 1e3 * self.latency.simulation.inter_token_s
        )

    @property
    def tokens_per_s(self) -> float | None:
        return (
            None if self.throughput.simulation is None else self.throughput.simulation.tokens_per_s
        )


@dataclass(frozen=True, slots=True)
class Modes:
    """Tokens a second of EdgeShard's throughput plan in all three modes, and of the best plan for
    bubbles."""

    model: str
    load: Load
    rates: dict[Mode, float]
    bubble_shares: dict[Mode, float]
    best_bubbles: float
    best_bubbles_load: Load

    @property
    def gain(self) -> float:
        return self.rates[Mode.NO_BUBBLES] - self.rates[Mode.BUBBLES]

    @property
    def gain_of_best(self) -> float:
        """Each mode with the plan that is best for it."""
        return self.rates[Mode.NO_BUBBLES] - self.best_bubbles


def paper_cluster(source: str = "agx-1", slow_mbps: float = SLOW_LINK_BPS / 1e6) -> Cluster:
    """The paper's nodes. The link between source and cloud has `slow_mbps` both ways, every other
    one 50 Mb/s."""
    cluster = parse_cluster(tomllib.loads(TESTBED.read_text(encoding="utf-8")))
    cluster = replace(
        cluster, default_link=Link(LINK_BPS), links=MappingProxyType({}), source=source
    )
    return with_bandwidth(cluster, slow_mbps * 1e6, (source, cluster.cloud or ""))


def problem(model: str, cluster: Cluster, objective: Objective) -> PlanProblem:
    spec = built_in_model(model)
    if spec is None:
        raise LookupError(model)
    return PlanProblem(
        model=spec,
        cluster=cluster,
        objective=objective,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        batch=REQUESTS,
        concurrency=REQUESTS,
        dtype=DType.FLOAT32,
    )


def table(model: str, cluster: Cluster, names: Sequence[str] = STRATEGIES) -> list[Row]:
    """These strategies of a model."""
    found: dict[Objective, dict[str, Outcome]] = {}
    for objective in (Objective.LATENCY, Objective.THROUGHPUT):
        asked = problem(model, cluster, objective)
        results = strategies(asked, plan(asked, alternatives=0), names)
        found[objective] = {name: _outcome(result) for name, result in results.items()}
    latency, throughput = found[Objective.LATENCY], found[Objective.THROUGHPUT]
    return [Row(model, name, latency[name], throughput[name]) for name in latency]


def _outcome(result: PlanResult) -> Outcome:
    prediction = result.prediction
    if prediction is None:
        return Outcome("", 0, Load(), None, "" if result.shortage is None else result.shortage.text)
    costs = Costs(result.problem)
    run = _run(costs, prediction.cut, prediction.load, Mode.NO_BUBBLES)
    return Outcome(result.placement, len(prediction.cut.nodes), prediction.load, run)


def placement_of(costs: Costs, cut: Cut) -> str:
    return ",".join(f"{costs.names[node]}={first}:{end}" for node, first, end in stages(cut))


def _run(costs: Costs, cut: Cut, load: Load, mode: Mode) -> Simulation:
    work = traffic(costs.problem, load.batch, load.micro_batches)
    return simulate(ring(costs, cut, load.batch), work, mode)


def sources(model: str) -> dict[str, list[Row]]:
    """The table's rows by kind of source, each at 1 Mb/s from the cloud."""
    return {name: table(model, paper_cluster(source=node), SWEPT) for name, node in SOURCES.items()}


def modes(model: str) -> Modes:
    """EdgeShard's throughput plan in every mode, and the best that bubbles can do with a plan of
    its own."""
    result = plan(problem(model, paper_cluster(), Objective.THROUGHPUT), alternatives=0)
    if result.prediction is None:
        raise EdgeShardError(f"{model} has no plan on the paper's test bed")
    costs, prediction = Costs(result.problem), result.prediction
    runs = {mode: _run(costs, prediction.cut, prediction.load, mode) for mode in Mode}
    best, best_load = runs[Mode.BUBBLES].tokens_per_s, prediction.load
    for load in loads(costs):
        instance = costs.decode(load)
        solutions = (solve_latency(instance), solve_throughput(instance, load.micro_batches))
        for cut in dict.fromkeys(solution.cut for solution in solutions if solution is not None):
            rate = _run(costs, cut, load, Mode.BUBBLES).tokens_per_s
            if rate > best:
                best, best_load = rate, load
    return Modes(
        model=model,
        load=prediction.load,
        rates={mode: run.tokens_per_s for mode, run in runs.items()},
        bubble_shares={mode: run.bubble_share for mode, run in runs.items()},
        best_bubbles=best,
        best_bubbles_load=best_load,
    )


def timelines(model: str) -> dict[Mode, Simulation]:
    """Some decode steps of EdgeShard's throughput plan, bubbles and no-bubbles."""
    result = plan(problem(model, paper_cluster(), Objective.THROUGHPUT), alternatives=0)
    if result.prediction is None:
        raise EdgeShardError(f"{model} has no plan on the paper's test bed")
    costs, prediction = Costs(result.problem), result.prediction
    work = traffic(costs.problem, prediction.load.batch, prediction.load.micro_batches)
    work = replace(work, new_tokens=5, decode_only=True)
    pipeline = ring(costs, prediction.cut, prediction.load.batch)
    return {mode: simulate(pipeline, work, mode) for mode in (Mode.BUBBLES, Mode.NO_BUBBLES)}
