"""The answer in words whether to split the model at all, and the changes that would reverse it.
Pure.

    verdict(problem, rows) -> str     under a comparison: which is better, and when the other is
    advice(result) -> str             next to a plan: a sentence if a replica on each node is better

Planning again finds what would change the answer: for other numbers of requests, for faster or
slower links, for nodes with less memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.shortage import gibibytes
from edgeshard.planning.inputs.devices import Cluster
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.site_cluster import listed
from edgeshard.planning.report.baselines import StrategyRow
from edgeshard.planning.search.load_search import search_rate
from edgeshard.planning.search.plan import PlanResult, cost_of, plan, predict
from edgeshard.planning.search.replicas import NodeAlone, ReplicaPlan, nodes_alone, replicas
from edgeshard.planning.search.spare import kinds_of

CLEARLY = 0.05
"""A plan mentions replicas that are better by more than this part."""
MOST_ADVISED = 64
"""With more nodes a plan is not compared with replicas."""
MOST_TRIED = 16
MOST_KINDS_TRIED = 6
"""With more nodes, or for a rate with more kinds of them, there is no planning again: that takes up
to thirty plans."""
_LINK_FACTORS = tuple(2**exponent for exponent in range(1, 11))
_MEMORY_STEPS = 32
_PRINTED = 0.1e9
"""Unit to which memory is rounded down, so that the figure printed is one that was tried."""
_SAME = 1e-6
_NAMES_SHOWN = 4

Value = TypeVar("Value")
Tried = Callable[[PlanProblem, Sequence[NodeAlone] | None], bool]
"""Whether the answer would be the other one for this problem, whose `nodes_alone` may be known."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Costs of the plan and of replicas in the objective: infinite without one, of a rate a token's
    seconds."""

    plan_cost: float
    whole_cost: float

    @property
    def plan_wins(self) -> bool:
        return self.plan_cost < self.whole_cost * (1 - _SAME)

    @property
    def whole_wins(self) -> bool:
        return self.whole_cost < self.plan_cost * (1 - _SAME)


def plan_wins(problem: PlanProblem, nodes: Sequence[NodeAlone] | None = None) -> bool:
    """Whether a plan is better than replicas on this problem; `nodes` are its `nodes_alone` if
    known. For a rate the search ends once the answer is certain."""
    whole = replicas(problem, nodes)
    if problem.goal is not Objective.THROUGHPUT:
        planned = plan(problem, alternatives=0).prediction
        whole_cost = whole.cost(problem.goal) if whole.replicas else float("inf")
        return planned is not None and Pair(planned.cost(problem.goal), whole_cost).plan_wins
    costs, target = Costs(problem), whole.throughput_tps / (1 - _SAME)
    best = search_rate(costs, target)
    return best.cut is not None and predict(costs, best.load, best.cut).throughput_tps > target


def advice(result: PlanResult) -> str:
    """One sentence if the model whole on each node, or on another one, is clearly better than this
    plan; else ''."""
    problem = result.problem
    if result.prediction is None or len(problem.cluster.nodes) > MOST_ADVISED or problem.rules:
        return ""  # rules are about the nodes of one plan
    whole = replicas(problem)
    if not whole.replicas:
        return ""
    pair = Pair(result.prediction.cost(problem.goal), whole.cost(problem.goal))
    if _gain(pair.plan_cost, pair.whole_cost, problem.goal) <= CLEARLY:
        return ""
    than = _than(pair.plan_cost, pair.whole_cost, problem.goal)
    return (
        f"{_whole(problem, whole)} would give {_value(pair.whole_cost, problem.goal)}, {than}: "
        "see --compare"
    )


def verdict(problem: PlanProblem, rows: Sequence[StrategyRow]) -> str:
    """Whether to split, by the rows of `compare`, and the changes that would reverse it; '' for one
    node only, and under rules."""
    by_name = {row.strategy: row for row in rows}
    planned, shared = by_name["edgeshard"], by_name["replicas"]
    if len(problem.cluster.nodes) - len(set(problem.exclude)) < 2 or problem.rules:
        return ""
    if not shared.feasible:
        return f"{'Split it' if planned.feasible else 'There is no plan'}: {shared.reason}."
    nodes = nodes_alone(problem)
    goal, whole = problem.goal, replicas(problem, nodes)
    pair = Pair(_cost(planned, goal), _cost(shared, goal))
    ours = _value(pair.plan_cost, goal)
    theirs = _value(pair.whole_cost, goal)
    unsplit = _whole(problem, whole)
    if pair.plan_wins:
        than = _than(pair.whole_cost, pair.plan_cost, goal)
        first = f"Split it: the plan gives {ours}, {than} than {unsplit} ({theirs})."
    elif not planned.feasible:
        first = (
            f"Do not split it: {unsplit} gives {theirs}; from {problem.cluster.source} there "
            "is no plan."
        )
    elif pair.whole_wins:
        than = _than(pair.plan_cost, pair.whole_cost, goal)
        first = f"Do not split it: {unsplit} gives {theirs}, {than} than the plan ({ours})."
    else:
        first = f"Do not split it: {unsplit} gives {theirs}, and no plan is better."
    return " ".join((first, *_changes(problem, nodes, pair)))


def _changes(problem: PlanProblem, nodes: Sequence[NodeAlone], pair: Pair) -> list[str]:
    """The conditions under which the other way would be better, a sentence for each of requests,
    links and memory."""
    if (
        len(nodes) > MOST_TRIED
        or problem.goal is Objective.ENERGY
        or (not problem.goal.is_single and not _quickly_searched(problem))
    ):
        return []
    better = (
        "Not splitting would be as good or better"
        if pair.plan_wins
        else "Splitting would be better"
    )

    def other(changed: PlanProblem, alone_nodes: Sequence[NodeAlone] | None) -> bool:
        return plan_wins(changed, alone_nodes) is not pair.plan_wins

    sentences = [] if problem.goal.is_single else [_by_requests(problem, pair, better, other)]
    sentences.append(_by_links(problem, nodes, pair.plan_wins, better, other))
    sentences.append(
        _lacking(nodes) if pair.plan_wins else _by_memory(problem, nodes, better, other)
    )
    return [sentence for sentence in sentences if sentence]


def _quickly_searched(problem: PlanProblem) -> bool:
    kinds = kinds_of(Costs(problem))
    return kinds is not None and len(kinds.members) <= MOST_KINDS_TRIED


def _by_requests(problem: PlanProblem, pair: Pair, better: str, other: Tried) -> str:
    """Powers of two up to the limit of memory or batch for both ways; between two that differ every
    number."""
    rate_problem = replace(problem, objective=Objective.THROUGHPUT)
    free = replace(rate_problem, concurrency=None)
    nodes = nodes_alone(free)
    now, whole = problem.request_limit, replicas(free, nodes)
    at_once = sum(item.requests for item in whole.replicas)
    # Rates only rise with the requests allowed: a way that loses without a limit to the winner of
    # now loses in between.
    if pair.plan_wins and now is not None:
        least_s = whole.cost(Objective.THROUGHPUT)  # beyond what replicas hold only plans gain
    else:
        most = plan(free, alternatives=0)
        at_once = max(at_once, most.prediction.load.requests if most.prediction else 1)
        least_s = whole.cost(Objective.THROUGHPUT) if pair.plan_wins else _bound_s(most)
    tried = [2**exponent for exponent in range((at_once - 1).bit_length() + 1)]
    hopeless = least_s > min(pair.plan_cost, pair.whole_cost) * (1 + _SAME)

    def wins(number: int) -> bool:
        if number == (tried[-1] if now is None else now) or (
            now is not None and hopeless and number > now
        ):
            return False
        return other(
            replace(rate_problem, concurrency=number), [node.at_most(number) for node in nodes]
        )

    won = [wins(number) for number in tried]
    listing = tried if len(tried) <= 4 else [*tried[:3], "...", tried[-1]]
    if not any(won):
        return f"{better} with none of {', '.join(map(str, listing))} requests at once."
    first, last = won.index(True), len(won) - 1 - won[::-1].index(True)
    if all(won[first:]) and first > 0 and (now is None or tried[first] > now):
        start = max(tried[first - 1], now or 0)
        return (
            f"{better} from {_first(range(start + 1, tried[first] + 1), wins)} requests at once on."
        )
    if all(won[: last + 1]) and last + 1 < len(won) and (now is None or tried[last] < now):
        end = tried[last + 1] if now is None else min(tried[last + 1], now)
        return (
            f"{better} with up to {_first(range(end - 1, tried[last] - 1, -1), wins)} requests "
            "at once."
        )
    numbers = ", ".join(str(number) for number, is_won in zip(tried, won, strict=True) if is_won)
    return f"{better} with {numbers} requests at once, of {', '.join(map(str, listing))}."


def _by_links(
    problem: PlanProblem, nodes: Sequence[NodeAlone], slower: bool, better: str, other: Tried
) -> str:
    """Every link by the same factor; faster ones never harm a plan, slower ones never help it, and
    neither matters to a single node."""

    def wins(factor: int) -> bool:
        rate = 1 / factor if slower else float(factor)
        return other(replace(problem, cluster=_with_links(problem.cluster, rate)), nodes)

    most = _LINK_FACTORS[-1]
    if not wins(most):
        limit = f"1/{most} of their rate" if slower else f"{most} times as fast"
        return f"Links {'down' if slower else 'up'} to {limit} would not change that."
    factor = _first(_LINK_FACTORS, wins)
    return (
        f"{better} with links "
        f"{f'of 1/{factor} of their rate' if slower else f'{factor} times as fast'}."
    )


def _by_memory(problem: PlanProblem, nodes: Sequence[NodeAlone], better: str, other: Tried) -> str:
    """Less memory on every node: replicas hold fewer requests, and at last not the model."""
    least = min(node.memory.needed for node in nodes if node.figures) * (1 - _SAME)
    most = max(node.memory.usable for node in nodes)
    steps = [most - (most - least) * step / _MEMORY_STEPS for step in range(1, _MEMORY_STEPS + 1)]
    sizes = [size // _PRINTED * _PRINTED for size in steps]

    def wins(size: float) -> bool:
        return other(_with_memory(problem, size), None)

    if not wins(sizes[-1]):
        return (
            "Nodes with too little memory for the whole model would have too little for any plan."
        )
    return f"{better} if no node had more than {gibibytes(_first(sizes, wins))} to use."


def _lacking(nodes: Sequence[NodeAlone]) -> str:
    short = sorted((node for node in nodes if node.short_bytes), key=lambda node: node.short_bytes)
    if not short:
        return ""
    listing = listed(
        [f"{node.node} ({gibibytes(node.short_bytes)})" for node in short], _NAMES_SHOWN
    )
    return f"Too little memory for the whole model: {listing}."


def _first(values: Sequence[Value], wins: Callable[[Value], bool]) -> Value:
    """The first value that wins, of values of which the last wins and from some on all do, by
    bisection."""
    return values[bisect_left(values, True, hi=len(values) - 1, key=wins)]


def _with_links(cluster: Cluster, factor: float) -> Cluster:
    """Every link and access link at `factor` times its rate; delays stay."""

    def scaled(rate: float | None) -> float | None:
        return None if rate is None else rate * factor

    nodes = tuple(
        replace(n, up_bps=scaled(n.up_bps), down_bps=scaled(n.down_bps)) for n in cluster.nodes
    )
    links = {
        ends: replace(link, bandwidth_bps=link.bandwidth_bps * factor)
        for ends, link in cluster.links.items()
    }
    default = replace(
        cluster.default_link, bandwidth_bps=cluster.default_link.bandwidth_bps * factor
    )
    return replace(cluster, nodes=nodes, default_link=default, links=MappingProxyType(links))


def _with_memory(problem: PlanProblem, size: float) -> PlanProblem:
    """The problem with at most `size` bytes to use on any node; the rest is reserved."""
    reserve = {
        node.name: max(problem.reserve.get(node.name, 0.0), node.device.usable_bytes - size)
        for node in problem.cluster.nodes
    }
    return replace(problem, reserve=reserve)


def _bound_s(result: PlanResult) -> float:
    """Seconds per token that no plan of a rate is below."""
    if result.prediction is None or result.gap is None:
        return float("inf")
    return result.prediction.cost(Objective.THROUGHPUT) * (1 - result.gap)


def _cost(row: StrategyRow, goal: Objective) -> float:
    return cost_of(row, goal) if row.feasible else float("inf")


def _whole(problem: PlanProblem, whole: ReplicaPlan) -> str:
    """`the model whole on each of 2 nodes (a=0:24 x4 | b=0:24 x4)`."""
    if len(whole.replicas) > 1:
        placement = f" ({whole.placement})" if len(whole.replicas) <= _NAMES_SHOWN else ""
        return f"the model whole on each of {len(whole.replicas)} nodes{placement}"
    node = whole.replicas[0].node
    return (
        "the model whole on "
        f"{node}{'' if node == problem.cluster.source else ', where requests then come in,'}"
    )


def _gain(loser: float, winner: float, goal: Objective) -> float:
    return loser / winner - 1 if goal is Objective.THROUGHPUT else 1 - winner / loser


def _than(loser: float, winner: float, goal: Objective) -> str:
    gain = 100 * _gain(loser, winner, goal)
    return (
        f"{gain:.{1 if gain < 10 else 0}f} % {'more' if goal is Objective.THROUGHPUT else 'less'}"
    )


def _value(cost: float, goal: Objective) -> str:
    """A figure in the objective's own unit."""
    if goal is Objective.THROUGHPUT:
        return f"{1 / cost:.2f} tokens/s"
    if goal is Objective.ENERGY:
        return f"{cost:.2f} J per token"
    text = f"{1000 * cost:.1f} ms" if cost < 1 else f"{cost:.2f} s"
    return text + {Objective.REQUEST: " a request", Objective.TTFT: " to the first token"}.get(
        goal, " per token"
    )
