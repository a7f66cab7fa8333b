"""Other ways of placing a model, compared with the plan: the paper's baselines and the habits of
other tools. Pure.

edge-solo            all layers on the source
cloud-edge-even      half on the source, half on the cloud node
cloud-edge-opt       the best cut between these two, or only the source
edgeshard-even       the plan's nodes with equal shares; if that does not fit, more nodes, largest
                     first
edgeshard-paper      the paper's Algorithm 1 (latency) or 2 (throughput)
memory-proportional  all nodes, shares by memory
whole-fastest        all layers on the node that is best for the objective; requests arrive there
replicas             all layers on each node that can hold them, requests shared out (`replicas`)
edgeshard            the plan
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgeshard.domain.deployments.rules import RuleCondition, broken
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.shortage import Shortage, node_room_text, too_slow
from edgeshard.planning.inputs.problem import PlanProblem
from edgeshard.planning.report.explain import bottleneck
from edgeshard.planning.search.load_search import loads
from edgeshard.planning.search.plan import (
    CutPrediction,
    PlanResult,
    figures_of,
    plan,
    predict,
    result_of,
)
from edgeshard.planning.search.replicas import ReplicaPlan, replicas, whole_fastest
from edgeshard.planning.solvers.instance import Cut, Instance
from edgeshard.planning.solvers.linear import Prover
from edgeshard.planning.solvers.paper import MemoryModel, algorithm_1, algorithm_2
from edgeshard.planning.solvers.scoring import SLACK, stage_bytes, violations

STRATEGIES = (
    "edge-solo",
    "cloud-edge-even",
    "cloud-edge-opt",
    "edgeshard-even",
    "edgeshard-paper",
    "memory-proportional",
    "edgeshard",
)

COMPARED = (*STRATEGIES[:-1], "whole-fastest", "replicas", "edgeshard")
"""The rows of a comparison: `STRATEGIES`, and the model whole if requests need not arrive at the
source."""

Shares = Sequence[tuple[int, int]]
"""(node, layers) in the order of the pipeline."""


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One strategy's figures under the problem's objective; None if it cannot run."""

    strategy: str
    feasible: bool
    time_per_token_s: float | None
    throughput_tps: float | None
    ttft_s: float | None
    request_s: float | None
    joules_per_token: float | None
    nodes: int
    """How many nodes it uses."""
    placement: str
    gap: float | None
    """How much better any plan could at most be, as a part of this one, in the objective."""
    reason: str
    """The limit that binds it, or the resource that is short."""


def compare(problem: PlanProblem, prover: Prover | None = None) -> tuple[StrategyRow, ...]:
    """Every strategy on one problem, the plan last; under rules with the strategies that keep them.
    Raises as `plan` does."""
    best = plan(problem, alternatives=0, prover=prover)
    one_pipeline = [name for name in COMPARED if name != "replicas"]
    rows = {
        name: _row(name, result, best)
        for name, result in strategies(problem, best, one_pipeline).items()
    }
    if problem.rules:
        rows["replicas"] = _row_of(
            "replicas", None, best, 0, "", "rules are about the nodes of one plan"
        )
    else:
        shared = replicas(problem)
        replica_plan = shared if shared.replicas else None
        rows["replicas"] = _row_of(
            "replicas", replica_plan, best, len(shared.replicas), shared.placement, shared.reason
        )
    return tuple(rows[name] for name in COMPARED)


def strategies(
    problem: PlanProblem, best: PlanResult, names: Sequence[str] = STRATEGIES
) -> dict[str, PlanResult]:
    """The results of these strategies of one pipeline by name; `best` is the plan itself. None of a
    strategy that breaks rules."""
    rules, problem = problem.rules, replace(problem, rules=())
    costs = Costs(problem)
    layers, source = problem.model.layer_count, costs.source
    plan_nodes = list(best.prediction.cut.nodes) if best.prediction is not None else [source]
    planners: dict[str, Callable[[], PlanResult]] = {
        "edge-solo": lambda: _fixed(costs, lambda load: Cut((source,), (layers,))),
        "cloud-edge-even": lambda: _with_cloud(costs, _cloud_even),
        "cloud-edge-opt": lambda: _with_cloud(costs, _cloud_opt),
        "edgeshard-even": lambda: _fixed(costs, lambda load: _even_cut(costs, load, plan_nodes)),
        "edgeshard-paper": lambda: _paper(costs),
        "memory-proportional": lambda: _fixed(costs, lambda load: memory_proportional(costs, load)),
        "whole-fastest": lambda: whole_fastest(problem),
        "edgeshard": lambda: best,
    }
    return {name: _kept(planners[name](), rules) for name in names}


def _kept(result: PlanResult, rules: Sequence[RuleCondition]) -> PlanResult:
    """The result, if its nodes keep the rules."""
    if result.prediction is None or not (
        texts := broken(rules, [stage.node for stage in result.stages])
    ):
        return result
    words = ", ".join(f"'{text}'" for text in texts)
    return PlanResult(result.problem, shortage=Shortage("rules", 0.0, "", f"it breaks {words}"))


def _with_cloud(costs: Costs, strategy: Callable[[Costs, int], PlanResult]) -> PlanResult:
    cloud = cloud_of(costs)
    if cloud is None or costs.problem.model.layer_count < 2:
        shortage = Shortage("nodes", 1.0, "nodes", "there is no second node to offload to")
        return PlanResult(costs.problem, shortage=shortage)
    return strategy(costs, cloud)


def _cloud_even(costs: Costs, cloud: int) -> PlanResult:
    halves = cut_of(even([costs.source, cloud], costs.problem.model.layer_count))
    return _fixed(costs, lambda load: halves)


def _cloud_opt(costs: Costs, cloud: int) -> PlanResult:
    others = tuple(name for i, name in enumerate(costs.names) if i not in (costs.source, cloud))
    pair = replace(costs.problem, exclude=(*costs.problem.exclude, *others))
    return plan(pair, alternatives=0)


def cloud_of(costs: Costs) -> int | None:
    """The node to offload to: the cluster's own choice, or the fastest memory except the source.
    None if there is only one node."""
    cloud_name = costs.problem.cluster.cloud
    if cloud_name is not None and cloud_name in costs.names:
        return costs.names.index(cloud_name)
    others = [i for i in range(len(costs.nodes)) if i != costs.source]
    return max(others, key=lambda i: costs.nodes[i].device.bandwidth_bytes_per_s, default=None)


def even(nodes: Sequence[int], layers: int) -> Shares:
    """Equal shares; the first nodes get one layer more if the division has a remainder."""
    nodes = nodes[:layers]
    each, over = divmod(layers, len(nodes))
    return [(node, each + (position < over)) for position, node in enumerate(nodes)]


def cut_of(shares: Shares) -> Cut:
    """The cut of these shares; a node with none is left out."""
    nodes = []
    ends = []
    end = 0
    for node, count in shares:
        if count:
            end += count
            nodes.append(node)
            ends.append(end)
    return Cut(tuple(nodes), tuple(ends))


def memory_proportional(costs: Costs, load: Load) -> Cut | None:
    """Shares by memory over all nodes, by largest remainder, the source first; node by node when
    that overfills one."""
    instance = costs.decode(load)
    order = [costs.source, *instance.others]
    rooms = [float(instance.capacity_bytes[i]) for i in order]
    total = sum(rooms)
    if total <= 0:
        return None
    exact = [instance.layers * room / total for room in rooms]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(order)), key=lambda i: (counts[i] - exact[i], i))
    for position in by_remainder[: instance.layers - sum(counts)]:
        counts[position] += 1
    if counts[0] == 0:
        counts[counts.index(max(counts))] -= 1
        counts[0] = 1
    cut = cut_of(list(zip(order, counts, strict=True)))
    if not violations(instance, cut):
        return cut
    return _filled(instance, order) or cut


def _filled(instance: Instance, order: Sequence[int]) -> Cut | None:
    """Node after node as many layers as fit; None when some find no room."""
    shares, first = [], 0
    for position, node in enumerate(order):
        free = (
            float(instance.capacity_bytes[node])
            - instance.stage_bytes
            - instance.embed_bytes * (position == 0)
        )
        end = first
        while end < instance.layers:
            need = float(instance.layer_bytes[first : end + 1].sum())
            if end + 1 == instance.layers:
                need += instance.head_bytes - instance.tied_bytes * (position == 0)
            if need > free * (1 + SLACK):
                break
            end += 1
        shares.append((node, end - first))
        first = end
    return cut_of(shares) if first == instance.layers else None


def _even_cut(costs: Costs, load: Load, plan_nodes: Sequence[int]) -> Cut | None:
    """Equal shares over the plan's nodes; if they do not fit, over the fewest nodes for which they
    do."""
    instance = costs.decode(load)
    cut = cut_of(even(plan_nodes, instance.layers))
    if not violations(instance, cut):
        return cut
    others = sorted(instance.others, key=lambda i: -float(instance.capacity_bytes[i]))
    for count in range(1, min(len(others), instance.layers - 1) + 1):
        wider = cut_of(even([costs.source, *others[:count]], instance.layers))
        if not violations(instance, wider):
            return wider
    return cut


def _paper(costs: Costs) -> PlanResult:
    """Algorithm 1 in its most favourable reading (memory tracked along the way, no node used
    twice), or Algorithm 2.

    Algorithm 2 knows no load. For each b it gets the memory of the largest m for which it finds a
    cut.
    """
    if costs.problem.request_limit == 1:
        assignment = algorithm_1(costs.decode(Load()), MemoryModel.DISTINCT)
        return _fixed(costs, lambda load: assignment.cut if assignment is not None else None)
    cuts: dict[int, Cut] = {}
    last: Cut | None = None
    for load in reversed(loads(costs)):
        if load.batch not in cuts and (cut := algorithm_2(costs.decode(load), last)) is not None:
            cuts[load.batch] = last = cut
    return _fixed(costs, lambda load: cuts.get(load.batch))


def _fixed(costs: Costs, cut_for: Callable[[Load], Cut | None]) -> PlanResult:
    """The best load for a way of cutting that does not choose one itself."""
    single = costs.problem.request_limit == 1
    goal, limit = costs.problem.goal, costs.problem.max_time_per_token_s
    best: CutPrediction | None = None
    fastest: float | None = None
    for load in [Load()] if single else loads(costs):
        cut = cut_for(load)
        if cut is None or violations(costs.decode(load), cut):
            continue
        prediction = predict(costs, load, cut)
        fastest = min(prediction.time_per_token_s, fastest or prediction.time_per_token_s)
        if limit is not None and prediction.time_per_token_s > limit:
            continue
        if best is None or prediction.cost(goal) < best.cost(goal):
            best = prediction
    if best is not None:
        return result_of(costs, best)
    if fastest is not None and limit is not None:
        return PlanResult(costs.problem, shortage=too_slow(fastest, limit))
    return PlanResult(costs.problem, shortage=_why_not(costs, cut_for(Load())))


def _why_not(costs: Costs, cut: Cut | None) -> Shortage:
    if cut is None:
        return Shortage("memory", 0.0, "", "it finds no placement that fits")
    instance = costs.decode(Load())
    needs = stage_bytes(instance, cut)
    rooms = [float(instance.capacity_bytes[node]) for node in cut.nodes]
    text = node_room_text([costs.names[node] for node in cut.nodes], needs, rooms)
    over = sum(max(0.0, need - room) for need, room in zip(needs, rooms, strict=True))
    return Shortage("memory", over, "bytes", text or "; ".join(violations(instance, cut)))


def _row(name: str, result: PlanResult, best: PlanResult) -> StrategyRow:
    prediction = result.prediction
    reason = bottleneck(result)
    source = result.problem.cluster.source
    if prediction is not None and source != best.problem.cluster.source:
        reason = f"requests enter at {source}; {reason}"
    return _row_of(name, prediction, best, len(result.stages), result.placement, reason)


def _row_of(
    name: str,
    outcome: CutPrediction | ReplicaPlan | None,
    best: PlanResult,
    nodes: int,
    placement: str,
    reason: str,
) -> StrategyRow:
    gap = None if outcome is None else _gap(outcome, best)
    return StrategyRow(
        name,
        outcome is not None,
        **figures_of(outcome),
        nodes=nodes,
        placement=placement,
        gap=gap,
        reason=reason,
    )


def _gap(outcome: CutPrediction | ReplicaPlan, best: PlanResult) -> float | None:
    """How much better any plan could at most be: from the plan's own value and its certified
    gap."""
    if best.prediction is None or best.gap is None:
        return None
    goal = best.problem.goal
    own = outcome.cost(goal)
    return max(0.0, 1.0 - best.prediction.cost(goal) * (1.0 - best.gap) / own) if own > 0 else 0.0
