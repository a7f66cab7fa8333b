"""Planning: nodes, cuts and loads chosen together, with the figures they are predicted to reach.
Pure.

    plan(problem) -> PlanResult

Request, ttft and latency are about a single request: all of it, its first token, or the round R of
one of its tokens (`request_search`). Its prompt goes in the slices that its head would cut.
Throughput and auto choose the load (b sequences in each of m micro-batches) with the cuts
(`search`). The two phases of a batch give the score, its prompts and then its tokens:

    tokens/s = m b G / [R_pre + (m-1) B_pre + (G-1) max(R_dec, m B_dec)]

or, with `Rate.STEADY`, by the rate at which requests end while another begins for each
(`costs.steady`).

If nodes may stream weights from their disks, the best plan with streaming nodes is compared with
the best without (`tiers.joint`). If nothing fits and nodes may not stream, that plan is offered.

Energy is the joules that a token takes (`energy`), for a single request or for a load chosen with
the cuts (`energy_search`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from edgeshard.domain.deployments.rules import RuleCondition, broken, conflicting
from edgeshard.domain.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    extra_line,
)
from edgeshard.domain.models.model import LayerRange
from edgeshard.planning.costs.batch_time import batch_times
from edgeshard.planning.costs.costs import Costs, Load, MemoryUse
from edgeshard.planning.costs.energy import Power, energy_j, power_of, without_power
from edgeshard.planning.costs.shortage import Shortage, rules_conflict, shortage_of, too_slow
from edgeshard.planning.costs.tier_costs import Streaming, StreamTables
from edgeshard.planning.inputs.problem import Objective, PlanProblem, Rate
from edgeshard.planning.inputs.site_cluster import listed
from edgeshard.planning.search.energy_search import search_energy
from edgeshard.planning.search.load_search import search_rate
from edgeshard.planning.search.locality import Lacking, Locality, nearest_cut
from edgeshard.planning.search.request_search import search_request
from edgeshard.planning.search.ruled_search import Ruled, any_plan, unusable
from edgeshard.planning.search.ruled_search import search_rate as search_ruled_rate
from edgeshard.planning.search.ruled_search import search_request as search_ruled_request
from edgeshard.planning.search.steady_scoring import steady_of
from edgeshard.planning.search.tier_search import StreamedLoad, StreamSearch
from edgeshard.planning.solvers.instance import Cut, Score, Solution, gap_of, with_tokens
from edgeshard.planning.solvers.linear import ROUNDING as PROVEN
from edgeshard.planning.solvers.linear import Prover
from edgeshard.planning.solvers.scoring import score, stages, violations
from edgeshard.planning.solvers.solve import solve_latency, solve_throughput
from edgeshard.planning.solvers.walks import INFINITY, equal_kinds

ALTERNATIVES = 2
"""Runner-ups shown."""
_ROUNDING = 1e-12
_SAME_ENERGY = 1e-9
_MANY_NODES = 64
"""Beyond it runner-ups are not worth as many solves again."""
GAP_OF_LATENCY = "time per token"
GAP_OF_REQUEST = "time of a request"
GAP_OF_TTFT = "time to first token"
GAP_OF_RATE = "token rate, prompts included"
GAP_OF_STEADY = "steady token rate"
GAP_OF_ENERGY = "energy per token"
_GAPS = {
    Objective.LATENCY: GAP_OF_LATENCY,
    Objective.REQUEST: GAP_OF_REQUEST,
    Objective.TTFT: GAP_OF_TTFT,
}
OFFERED = ("memory", "source_memory")
"""Constraints for which streaming is offered if they are short."""
UNKNOWN_POWER = "UNKNOWN_POWER"
"""Reason of the error for nodes whose watts are not known."""


FIGURES = ("time_per_token_s", "throughput_tps", "ttft_s", "request_s", "joules_per_token")
"""Names of the figures that plans and other strategies are compared by."""
_FIGURE_OF = {
    Objective.REQUEST: "request_s",
    Objective.TTFT: "ttft_s",
    Objective.LATENCY: "time_per_token_s",
    Objective.ENERGY: "joules_per_token",
}
"""The figure that an objective minimises; another one maximises the throughput."""


def figures_of(outcome: Any) -> dict[str, Any]:
    """The figures by name, all of them None if there are none."""
    return {name: getattr(outcome, name, None) for name in FIGURES}


def figure_of(outcome: Any, goal: Objective) -> float | None:
    """The figure that an objective is about."""
    value: float | None = getattr(outcome, _FIGURE_OF.get(goal, "throughput_tps"))
    return value


def cost_of(outcome: Any, goal: Objective) -> float:
    """Cost in an objective: seconds, or joules per token; of a throughput, the seconds a token
    takes."""
    value = figure_of(outcome, goal)
    assert value is not None  # `plan` refuses nodes of unknown power
    return value if goal in _FIGURE_OF else 1.0 / value


@dataclass(frozen=True, slots=True)
class CutPrediction:
    """The figures of a cut under a load."""

    cut: Cut
    load: Load
    prefill: Score
    """The score of one micro-batch's prompt; if nodes stream, of a sweep's."""
    decode: Score
    """The score of one token of a micro-batch; if nodes stream, of a sweep."""
    ttft_s: float
    """Seconds until the last of the micro-batches has its first token, all starting together; for a
    single request its prompt goes in `slices`."""
    time_per_token_s: float
    request_s: float
    """Seconds until they have all their tokens."""
    throughput_tps: float
    slices: tuple[int, ...] = ()
    joules_per_token: float | None = None
    """Joules that all nodes of the cut take in `request_s` for each token; None if a node's watts
    are unknown."""
    sweep: int = 1
    """Micro-batches that go as one step if nodes stream."""
    together_tps: float | None = None
    """Tokens a second of a batch that starts together, if the figures are of the steady rate.
    `ttft_s` is then from a request's first chunk to its first token, and `time_per_token_s` the
    mean gap, other requests' prompts included.
    """

    @property
    def in_flight(self) -> int:
        """Steps, or sweeps, under way at once."""
        return self.load.micro_batches // self.sweep

    def cost(self, goal: Objective) -> float:
        return cost_of(self, goal)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage: its node, layers and memory."""

    node: str
    kind: str
    layers: LayerRange
    memory: MemoryUse
    compute_s: float
    """Seconds to compute one token."""
    send_s: float
    """Seconds to send it on; the last stage returns it."""
    power: Power | None
    """Watts of the node; None if they are unknown."""
    streaming: Streaming | None = None
    """The reads from its disk in every step; None if all its weights stay in memory."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A runner-up and its figures."""

    placement: str
    load: Load
    ttft_s: float
    time_per_token_s: float
    request_s: float
    throughput_tps: float
    joules_per_token: float | None


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, or the reason why there is none (`shortage`). Every figure is of this placement under
    this load."""

    problem: PlanProblem
    stages: tuple[PlannedStage, ...] = ()
    prediction: CutPrediction | None = None
    gap: float | None = None
    """How much better a solution could at most be, as a part of this one, in `gap_objective`; 0
    when proven best."""
    gap_objective: str = GAP_OF_LATENCY
    alternatives: tuple[Alternative, ...] = ()
    shortage: Shortage | None = None
    offer: PlanResult | None = None
    """The plan with streaming, if nothing fits and streaming was not allowed."""
    locality: Locality | None = None
    """The choice of this plan by the parts that nodes hold; None if the plan is simply the best."""

    @property
    def streaming(self) -> tuple[PlannedStage, ...]:
        """The stages whose nodes stream weights from their disks."""
        return tuple(stage for stage in self.stages if stage.streaming is not None)

    @property
    def streams(self) -> bool:
        """Whether a node of the plan streams weights from its disk."""
        return bool(self.streaming)

    @property
    def feasible(self) -> bool:
        return self.prediction is not None

    @property
    def placement(self) -> str:
        """`a=0:4,b=4:12`, as `edgectl deploy --layers` takes it; '' for none."""
        return ",".join(f"{stage.node}={stage.layers}" for stage in self.stages)


def plan(
    problem: PlanProblem, alternatives: int = ALTERNATIVES, prover: Prover | None = None
) -> PlanResult:
    """The best plan for a problem; one with rules needs a `prover`.

    Raises InvalidArgumentError naming the field of an impossible problem, with reason UNKNOWN_POWER
    for energy if the watts of a usable node are unknown. Raises FailedPreconditionError with reason
    RULES_NEED_CPSAT for rules without a prover, and what the prover raises.
    """
    problem.check()
    if problem.rules:
        return _under_rules(problem, alternatives, prover)
    if problem.is_steady and problem.allow_streaming:
        # The sweeps of nodes that stream are rated together, so that both ways are compared by that
        # rate.
        together = plan(replace(problem, rate=Rate.TOGETHER), alternatives)
        if together.streams or not together.feasible:
            return together
        problem = replace(problem, allow_streaming=False)
    costs = Costs(problem)
    if problem.goal is Objective.ENERGY and (unknown := without_power(costs)):
        remedy = "give idle_w and busy_w in a cluster file, or exclude these nodes"
        raise InvalidArgumentError.about(
            "objective", f"the power of {listed(unknown)} is unknown; {remedy}", UNKNOWN_POWER
        )
    match problem.goal:
        case Objective.LATENCY:
            result = _latency(costs)
        case Objective.THROUGHPUT:
            result = _throughput(costs)
        case Objective.ENERGY:
            result = _energy(costs)
        case _:
            result = _request(costs)
    if problem.allow_streaming:
        result = _better(result, streaming_result(costs))
    elif result.shortage is not None and result.shortage.constraint in OFFERED:
        result = replace(
            result, offer=streaming_result(Costs(replace(problem, rate=Rate.TOGETHER)))
        )
    result = _nearest(costs, result)
    if result.prediction is None or result.streams or alternatives < 1:
        return result
    return replace(result, alternatives=runner_ups(costs, result.prediction, alternatives))


def _under_rules(problem: PlanProblem, alternatives: int, prover: Prover | None) -> PlanResult:
    """The best plan that keeps the rules, or which of them cannot hold together."""
    if prover is None:
        raise FailedPreconditionError(
            f"rule: a rule needs CP-SAT, which is not there; {extra_line('rules')}",
            field="rule",
            reason="RULES_NEED_CPSAT",
        )
    free = replace(problem, rules=(), packed_parts={})
    result = plan(free, 0)
    if result.shortage is not None:
        return PlanResult(problem, shortage=result.shortage)
    ruled = Ruled(Costs(free), problem.rules, prover)
    answer = ruled.quickest()
    if answer.cut is None:
        return PlanResult(problem, shortage=_rules_shortage(ruled, answer.impossible))
    spare = unusable(ruled.costs, problem.rules)
    fewer = replace(free, exclude=(*free.exclude, *spare))
    few = Ruled(Costs(fewer), problem.rules, prover)
    start = Cut(
        tuple(few.costs.names.index(ruled.costs.names[node]) for node in answer.cut.nodes),
        answer.cut.ends,
    )
    result = plan(fewer, 0) if spare else result
    assert result.prediction is not None  # `start` is a plan
    if not few.keeps(result.prediction.cut.nodes):
        result = _searched(few, start, answer.bound_s, result)
    result = replace(
        _nearest(Costs(replace(fewer, packed_parts=problem.packed_parts)), result, few.keeps),
        problem=problem,
    )
    if result.prediction is None or alternatives < 1:
        return result
    return replace(
        result, alternatives=runner_ups(few.costs, result.prediction, alternatives, few.conditions)
    )


def _searched(ruled: Ruled, start: Cut, quickest_s: float, free: PlanResult) -> PlanResult:
    """The best plan under rules; `free` is that without them, which bounds it too. `start` has the
    least time per token, which `quickest_s` bounds."""
    costs, goal = ruled.costs, ruled.costs.problem.goal
    assert free.prediction is not None
    bound = free.prediction.cost(goal) * (1.0 - (free.gap or 0.0))
    if goal is Objective.THROUGHPUT:
        rated, most = search_ruled_rate(ruled, start, 1.0 / bound)
        if rated.cut is None:
            return PlanResult(costs.problem, shortage=_rules_shortage(ruled, not most))
        best, bound = predict(costs, rated.load, rated.cut), max(bound, 1.0 / most)
    elif goal is Objective.LATENCY:
        best, bound = predict(costs, Load(), start), max(bound, quickest_s)
    else:
        answer = search_ruled_request(ruled, goal, start)
        best, bound = predict(costs, Load(), answer.cut), max(bound, answer.bound)
    return result_of(costs, best, gap_of(bound, best.cost(goal), PROVEN), _gap_objective(costs))


def _gap_objective(costs: Costs) -> str:
    return GAP_OF_STEADY if costs.problem.is_steady else _GAPS.get(costs.problem.goal, GAP_OF_RATE)


def _rules_shortage(ruled: Ruled, proven: bool) -> Shortage:
    """The rules that cannot hold together although there are plans without them, once that is
    proven."""
    if not proven:
        raise ResourceExhaustedError(
            "rule: CP-SAT found neither a plan under these rules in its time nor that there is "
            "none; plan with "
            "fewer rules or nodes",
            field="rule",
            reason="CPSAT_EXHAUSTED",
        )

    def impossible(conditions: Sequence[RuleCondition]) -> bool:
        cut, _, proven = any_plan(Ruled(ruled.costs, conditions, ruled.prover))
        return cut is None and proven

    return rules_conflict(
        conflicting(ruled.conditions, impossible), ruled.costs.problem.max_time_per_token_s
    )


def predict(costs: Costs, load: Load, cut: Cut) -> CutPrediction:
    """The figures of any cut under a load, by the two-phase formula; a single request sends its
    prompt in slices."""
    times = batch_times(costs, cut, load)
    tokens = load.requests * costs.problem.new_tokens
    energy = energy_j(costs, cut, load, times)
    together = CutPrediction(
        cut,
        load,
        times.prefill,
        times.decode,
        times.ttft_s,
        times.time_per_token_s,
        times.request_s,
        tokens / times.request_s,
        times.slices,
        None if energy is None else energy / tokens,
    )
    return _steadily(costs, together) if costs.problem.is_steady else together


def _steadily(costs: Costs, together: CutPrediction) -> CutPrediction:
    """The same cut and load with the figures of the steady rate."""
    figures = steady_of(costs, together.load, together.cut)
    between_s = float(figures.between_s[0])
    return replace(
        together,
        ttft_s=float(figures.prompt_s[0]),
        time_per_token_s=float(figures.time_per_token_s[0]),
        request_s=together.load.requests * between_s,
        throughput_tps=costs.problem.new_tokens / between_s,
        together_tps=together.throughput_tps,
    )


def result_of(
    costs: Costs,
    prediction: CutPrediction,
    gap: float | None = None,
    gap_objective: str = GAP_OF_LATENCY,
) -> PlanResult:
    """A prediction with the names, layers and memory of its stages."""
    cut, decode = prediction.cut, prediction.decode
    sends = decode.hop_s or (0.0,)
    memory = costs.memory(prediction.load, cut)
    planned = tuple(
        PlannedStage(
            node=costs.names[node],
            kind=costs.nodes[node].device.kind,
            layers=LayerRange(first, end),
            memory=memory[index],
            compute_s=decode.stage_s[index],
            send_s=sends[index],
            power=power_of(costs, node),
        )
        for index, (node, first, end) in enumerate(stages(cut))
    )
    return PlanResult(costs.problem, planned, prediction, gap, gap_objective)


def streaming_result(costs: Costs) -> PlanResult | None:
    """The best plan whose nodes may stream; None if there is none, or if none exceeds a plan
    without."""
    tables = StreamTables(costs)
    if not tables.any_disk or costs.problem.goal is Objective.ENERGY:
        return None
    best = StreamSearch(costs).run()
    result = None if best is None else given_streaming(costs, best.cut, best.load)
    if best is None or result is None or not result.streams:
        return None
    return replace(result, gap=gap_of(best.bound, best.cost, _SAME_ENERGY))


def given_streaming(costs: Costs, cut: Cut, load: StreamedLoad) -> PlanResult | None:
    """The plan of a given cut and load; None if a node lacks memory even when it streams, or a disk
    to stream from."""
    tables = StreamTables(costs)
    prediction = predict_streaming(tables, load, cut)
    if not isfinite(prediction.request_s):
        return None
    result = result_of(costs, prediction, None, _GAPS.get(costs.problem.goal, GAP_OF_RATE))
    staged = tuple(
        stage
        if one is None
        else replace(stage, streaming=one, memory=replace(stage.memory, weights=one.budget_bytes))
        for stage, one in zip(result.stages, tables.streaming(load.load, cut), strict=True)
    )
    return replace(result, stages=staged)


def predict_streaming(
    tables: StreamTables, load: StreamedLoad, cut: Cut, pool: Load | None = None
) -> CutPrediction:
    """The figures of a cut whose nodes may stream, by the two-phase formula with sweeps for
    micro-batches.

    `pool` is the load that memory was allotted to, if it is more than `load`.
    """
    costs, flight = tables.costs, load.in_flight
    prefill = score(tables.instance(load.load, load.sweep, True, pool), cut, costs.names)
    decode = score(tables.instance(load.load, load.sweep, False, pool), cut, costs.names)
    ttft = prefill.round_s + (flight - 1) * prefill.bottleneck_s
    per_token = max(decode.round_s, flight * decode.bottleneck_s)
    seconds = ttft + (costs.problem.new_tokens - 1) * per_token
    rate = load.load.requests * costs.problem.new_tokens / seconds
    return CutPrediction(
        cut, load.load, prefill, decode, ttft, per_token, seconds, rate, sweep=load.sweep
    )


def _better(resident: PlanResult, streaming: PlanResult | None) -> PlanResult:
    """The better of two plans, with a gap that holds for both ways."""
    if streaming is None or streaming.prediction is None:
        return resident
    if resident.prediction is None:
        return streaming
    goal = resident.problem.goal
    stays, streams = resident.prediction.cost(goal), streaming.prediction.cost(goal)
    bound = min(stays * (1.0 - (resident.gap or 0.0)), streams * (1.0 - (streaming.gap or 0.0)))
    winner = streaming if streams < stays * (1 - _SAME_ENERGY) else resident
    return replace(winner, gap=gap_of(bound, min(stays, streams), _SAME_ENERGY))


def _nearest(
    costs: Costs, result: PlanResult, keeps: Callable[[Sequence[int]], bool] = lambda nodes: True
) -> PlanResult:
    """The plan with the least to fetch and pack, among those nearly as good. Nodes that stream stay
    as they are.

    `keeps` returns whether the nodes of a cut keep the rules.
    """
    best, problem = result.prediction, costs.problem
    if best is None or result.streams or not problem.packed_parts:
        return result
    limit = problem.max_time_per_token_s

    def cost(cut: Cut) -> float:
        if not keeps(cut.nodes):
            return INFINITY
        figures = predict(costs, best.load, cut)
        in_time = limit is None or figures.time_per_token_s <= limit
        return figures.cost(problem.goal) if in_time else INFINITY

    cut, lacking = nearest_cut(costs, best.load, best.cut, cost), Lacking(costs)
    left = lacking.of(cut)
    if left >= lacking.of(best.cut):
        return result
    prediction = predict(costs, best.load, cut)
    least, most = best.cost(problem.goal), prediction.cost(problem.goal)
    gap = gap_of(least * (1.0 - (result.gap or 0.0)), most, _SAME_ENERGY)
    return replace(
        result_of(costs, prediction, gap, result.gap_objective),
        locality=Locality(
            result.placement, max(0.0, most / least - 1.0), lacking.of(best.cut) - left, left
        ),
    )


def _latency(costs: Costs) -> PlanResult:
    solution = solve_latency(costs.decode(Load()))
    if solution is None:
        return _none(costs, None)
    prediction = predict(costs, Load(), solution.cut)
    limit = costs.problem.max_time_per_token_s
    if limit is not None and prediction.time_per_token_s > limit:
        return _none(costs, prediction.time_per_token_s)
    return result_of(costs, prediction, solution.gap, GAP_OF_LATENCY)


def _request(costs: Costs) -> PlanResult:
    goal = costs.problem.goal
    answer = search_request(costs, goal)
    if answer is None:
        return _none(costs, _fastest_s(costs))
    return result_of(costs, predict(costs, Load(), answer.cut), answer.gap, _GAPS[goal])


def _throughput(costs: Costs) -> PlanResult:
    """The cut and load of the highest rate, prompts included."""
    answer = search_rate(costs)
    if answer.cut is None:
        return _none(costs, answer.fastest_s)
    best = predict(costs, answer.load, answer.cut)
    return result_of(
        costs,
        best,
        gap_of(best.throughput_tps, answer.rate_bound, _ROUNDING),
        _gap_objective(costs),
    )


def _energy(costs: Costs) -> PlanResult:
    """The cut and load of the fewest joules per token."""
    answer = search_energy(costs)
    if answer is None:
        return _none(costs, _fastest_s(costs))
    best = predict(costs, answer.load, answer.cut)
    return result_of(
        costs,
        best,
        gap_of(answer.bound_j, best.cost(Objective.ENERGY), _SAME_ENERGY),
        GAP_OF_ENERGY,
    )


def _fastest_s(costs: Costs) -> float | None:
    """The least time per token of a single request; None if nothing fits."""
    solution = solve_latency(costs.decode(Load()))
    return None if solution is None else solution.value_s


def _none(costs: Costs, fastest_s: float | None) -> PlanResult:
    """No plan, and why: the one that answers fastest is too slow, or there is no room for any."""
    limit = costs.problem.max_time_per_token_s
    if fastest_s is not None and limit is not None:
        return PlanResult(costs.problem, shortage=too_slow(fastest_s, limit))
    return PlanResult(costs.problem, shortage=shortage_of(costs, Load()))


def runner_ups(
    costs: Costs, best: CutPrediction, count: int, rules: Sequence[RuleCondition] = ()
) -> tuple[Alternative, ...]:
    """The best plans that use other nodes: with one fewer of each kind in use, and only the source.
    Plans that break rules are left out."""
    problem, load = costs.problem, best.load
    others = [Cut((costs.source,), (problem.model.layer_count,))]
    if problem.goal is not Objective.THROUGHPUT:
        solved = (solve_latency(costs.decode(load)), solve_latency(costs.prefill(load)))
        others += [solution.cut for solution in solved if solution is not None]
    candidates = [
        (costs, predict(costs, load, cut))
        for cut in others
        if not violations(costs.decode(load), cut)
    ]
    kinds = equal_kinds(costs.decode(load), _MANY_NODES)
    groups = kinds.members if kinds is not None else ()
    for excluded in _one_fewer(costs, best.cut, groups):
        other = Costs(replace(problem, exclude=(*problem.exclude, *excluded)))
        solution = _quick_solution(other, load)
        if solution is not None:
            candidates.append((other, predict(other, load, solution.cut)))
    candidates.sort(key=lambda item: item[1].cost(problem.goal))
    kind_of = {costs.names[node]: kind for kind, members in enumerate(groups) for node in members}
    limit = problem.max_time_per_token_s
    candidates = [item for item in candidates if limit is None or item[1].time_per_token_s <= limit]
    candidates = [
        item
        for item in candidates
        if not broken(rules, [item[0].names[node] for node in item[1].cut.nodes])
    ]
    distinct = dict[tuple[object, ...], Alternative]()
    best_key = _signature(costs, best.cut, kind_of)
    for other, prediction in candidates:
        key = _signature(other, prediction.cut, kind_of)
        if key != best_key and key not in distinct:
            placement = result_of(other, prediction).placement
            distinct[key] = Alternative(placement, prediction.load, **figures_of(prediction))
    return tuple(distinct.values())[:count]


def _quick_solution(costs: Costs, load: Load) -> Solution | None:
    """A good cut for the problem's goal by one solve: of one request with its prompt in one
    piece."""
    goal = costs.problem.goal
    if goal is Objective.TTFT:
        return solve_latency(costs.prefill(load))
    if goal is Objective.REQUEST or (goal is Objective.ENERGY and load.requests == 1):
        whole = with_tokens(
            costs.prefill(Load()), costs.decode(Load()), costs.problem.new_tokens - 1
        )
        return solve_latency(whole)
    return solve_throughput(costs.decode(load), load.micro_batches)


def _signature(costs: Costs, cut: Cut, kind_of: Mapping[str, int]) -> tuple[object, ...]:
    """A cut with interchangeable nodes taken as equal."""
    names = [(costs.names[node], end - first) for node, first, end in stages(cut)]
    return tuple((kind_of.get(name, name), layers) for name, layers in names)


def _one_fewer(costs: Costs, cut: Cut, groups: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
    """For each kind of node in use but the source: the nodes to exclude so that one fewer of it can
    be used."""
    choices = []
    for members in groups:
        used = [node for node in cut.nodes if node in members and node != costs.source]
        if used:
            choices.append(tuple(costs.names[node] for node in members if node not in used[:-1]))
    return choices
