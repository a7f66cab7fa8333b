"""The model whole on one node, or whole on several with the requests shared out among them. Pure.

A single node is an otherwise equal problem with only this node, which is also the source: requests
arrive there. One node is one station, so more micro-batches only wait. k requests run as one
micro-batch of b <= k, the b with the highest rate.

    rate of the replicas = max over k_1 + ... + k_n <= concurrency of sum_i rate_i(k_i)

Each node takes its next request when it has finished one, so rates add up. The split is found by a
DP over the nodes, exact whatever the shape of rate_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from edgeshard.planning.costs.costs import Costs, Load, MemoryUse
from edgeshard.planning.costs.shortage import Shortage, gibibytes
from edgeshard.planning.inputs.devices import ClusterNode
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.site_cluster import listed
from edgeshard.planning.search.plan import CutPrediction, PlanResult, predict, result_of
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import violations

_NAMES_SHOWN = 4
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class NodeAlone:
    """One node with the whole model.

    `figures[k - 1]` is its best with at most k requests; empty if it cannot serve one, and `reason`
    has the cause. `memory` is for the model and one request.
    """

    node: str
    figures: tuple[CutPrediction, ...]
    memory: MemoryUse
    reason: str = ""

    @property
    def short_bytes(self) -> int:
        return max(0, self.memory.needed - self.memory.usable)

    def at_most(self, requests: int) -> NodeAlone:
        """The same with fewer requests."""
        return replace(self, figures=self.figures[:requests])


@dataclass(frozen=True, slots=True)
class Replica:
    """A node that holds the whole model, and its figures with its share of the requests."""

    node: str
    prediction: CutPrediction

    @property
    def requests(self) -> int:
        return self.prediction.load.requests


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The model on each of several nodes. Times are the slowest node's, the rate is the sum of all
    nodes'.

    `left_out` are the nodes that cannot hold the model, or may not. There is no replica if no node
    can.
    """

    layers: int
    replicas: tuple[Replica, ...]
    left_out: tuple[NodeAlone, ...]

    @property
    def throughput_tps(self) -> float:
        return sum(replica.prediction.throughput_tps for replica in self.replicas)

    @property
    def time_per_token_s(self) -> float:
        return max(replica.prediction.time_per_token_s for replica in self.replicas)

    @property
    def ttft_s(self) -> float:
        return max(replica.prediction.ttft_s for replica in self.replicas)

    @property
    def request_s(self) -> float:
        return max(replica.prediction.request_s for replica in self.replicas)

    @property
    def placement(self) -> str:
        """`a=0:24 x4 | b=0:24 x4`: each node's layers, and its number of concurrent requests."""
        return " | ".join(f"{item.node}=0:{self.layers} x{item.requests}" for item in self.replicas)

    @property
    def reason(self) -> str:
        """The rate that each node adds, and the nodes that are left out."""
        if not self.replicas:
            return none_holds(self.left_out)
        rates = [(item.prediction.throughput_tps, item.node) for item in self.replicas]
        (low, slowest), (high, fastest) = min(rates), max(rates)
        if len(rates) <= _NAMES_SHOWN:
            text = f"{', '.join(f'{node} {rate:.2f}' for rate, node in rates)} tokens/s"
        elif high <= low * (1 + _ROUNDING):
            text = f"{high:.2f} tokens/s on each node"
        else:
            text = f"{low:.2f} ({slowest}) to {high:.2f} tokens/s ({fastest}) on a node"
        return f"{text}; left out: {_reasons(self.left_out)}" if self.left_out else text

    @property
    def joules_per_token(self) -> float | None:
        """Joules of all their tokens together; None if a node's watts are unknown."""
        total_w = 0.0
        for replica in self.replicas:
            if (joules := replica.prediction.joules_per_token) is None:
                return None
            total_w += joules * replica.prediction.throughput_tps
        return total_w / self.throughput_tps

    def cost(self, goal: Objective) -> float:
        """Cost in the objective, as `CutPrediction.cost`."""
        if goal is Objective.THROUGHPUT:
            return 1.0 / self.throughput_tps
        if goal is Objective.ENERGY and (joules := self.joules_per_token) is not None:
            return joules
        return max(replica.prediction.cost(goal) for replica in self.replicas)


def nodes_alone(problem: PlanProblem) -> tuple[NodeAlone, ...]:
    """Every node that may be used, with the whole model on it; indistinguishable nodes are computed
    once."""
    alone_by_key: dict[tuple[object, ...], NodeAlone] = {}
    nodes = []
    for node in problem.cluster.nodes:
        if node.name in problem.exclude:
            continue
        limits = problem.reserve.get(node.name), problem.max_share.get(node.name)
        key = (
            id(node.device),
            id(problem.times.get(node.name)),
            *limits,
            node.name == problem.cluster.source,
        )
        if key not in alone_by_key:
            alone_by_key[key] = _node_alone(problem, node)
        nodes.append(replace(alone_by_key[key], node=node.name))
    return tuple(nodes)


def whole_fastest(problem: PlanProblem) -> PlanResult:
    """The model whole on the node that is best for the objective. The result's problem has that
    node as its source."""
    nodes = nodes_alone(problem)
    able = [node for node in nodes if node.figures]
    if not able:
        short = float(min(node.short_bytes for node in nodes))
        return PlanResult(problem, shortage=Shortage("memory", short, "bytes", none_holds(nodes)))
    best = _best(problem, able)
    node = problem.cluster.nodes[problem.cluster.index(best.node, "source")]
    return result_of(Costs(_problem_alone(problem, node)), best.figures[-1])


def replicas(problem: PlanProblem, nodes: Sequence[NodeAlone] | None = None) -> ReplicaPlan:
    """The model on each node that can hold it, with the requests shared out for the highest total
    rate. `nodes` are the result of `nodes_alone`, if known.

    A single request goes to the node that is best for the objective. For the least energy all
    requests do, since a second node only adds its own. At most `max_nodes` nodes are used.
    """
    nodes = nodes_alone(problem) if nodes is None else nodes
    able = [node for node in nodes if node.figures]
    left_out = tuple(node for node in nodes if not node.figures)
    if not able:
        plan_replicas = []
    elif problem.goal.is_single or problem.goal is Objective.ENERGY:
        best = _best(problem, able)
        plan_replicas = [Replica(best.node, best.figures[-1])]
    else:
        rates = [[figure.throughput_tps for figure in node.figures] for node in able]
        split = shared_out(rates, problem.request_limit, problem.max_nodes)
        plan_replicas = [
            Replica(node.node, node.figures[k - 1])
            for node, k in zip(able, split, strict=True)
            if k
        ]
    return ReplicaPlan(problem.model.layer_count, tuple(plan_replicas), left_out)


def shared_out(
    rates: Sequence[Sequence[float]], requests: int | None, most_nodes: int | None = None
) -> list[int]:
    """The number of requests for each node, for the highest total rate; the fewest if more do not
    help.

    `rates[i][k - 1]` is node i's rate with at most k requests and rises with k; more than it lists
    add nothing.
    """
    total = sum(map(len, rates))
    requests = total if requests is None else min(requests, total)
    limited = most_nodes is not None and most_nodes < len(rates)
    if requests == total and not limited:
        return [len(own) for own in rates]
    # best[n, r]: the highest rate of the nodes so far with r requests, on at most n of them if the
    # number is limited.
    counts, step = (most_nodes + 1, 1) if limited and most_nodes is not None else (1, 0)
    best = np.zeros((counts, requests + 1))
    shares = np.zeros((len(rates), *best.shape), dtype=np.int32)
    for index, own in enumerate(rates):
        before = best.copy()
        for k, rate in enumerate(own[:requests], start=1):
            with_it, without_it = before[: counts - step, :-k] + rate, best[step:, k:]
            better = with_it > without_it * (1 + _ROUNDING)
            without_it[better] = with_it[better]
            shares[index, step:, k:][better] = k
    split = [0] * len(rates)
    used = counts - 1
    left = requests
    for index in reversed(range(len(rates))):
        split[index] = int(shares[index, used, left])
        left -= split[index]
        used -= step * (split[index] > 0)
    return split


def none_holds(nodes: Sequence[NodeAlone]) -> str:
    """The reasons why no node can serve the whole model, of nodes that lack least first."""
    return (
        "no node can hold the whole model: "
        f"{_reasons(sorted(nodes, key=lambda node: node.short_bytes))}"
    )


def _best(problem: PlanProblem, able: Sequence[NodeAlone]) -> NodeAlone:
    """The best for the objective; of equal ones the source."""
    source = problem.cluster.source
    return min(able, key=lambda node: (node.figures[-1].cost(problem.goal), node.node != source))


def _problem_alone(problem: PlanProblem, node: ClusterNode) -> PlanProblem:
    """The same problem for only this node, at which its requests then arrive."""
    cluster = replace(
        problem.cluster, nodes=(node,), source=node.name, cloud=None, links=MappingProxyType({})
    )
    return replace(
        problem,
        cluster=cluster,
        exclude=(),
        reserve={name: size for name, size in problem.reserve.items() if name == node.name},
        max_share={name: share for name, share in problem.max_share.items() if name == node.name},
        max_nodes=None,
    )


def _node_alone(problem: PlanProblem, node: ClusterNode) -> NodeAlone:
    costs = Costs(_problem_alone(problem, node))
    cut = Cut((0,), (problem.model.layer_count,))
    memory = costs.memory(Load(), cut)[0]
    limit_s = problem.max_time_per_token_s
    if problem.head_on_source and node.name != problem.cluster.source:
        return NodeAlone(node.name, (), memory, "other nodes than the source may see no token")
    if violations(costs.decode(Load()), cut):
        return NodeAlone(node.name, (), memory, _why_not(problem, node, memory))
    figures: list[CutPrediction] = []
    for batch in range(1, problem.batch_limit + 1):
        load = Load(batch)
        if violations(costs.decode(load), cut):
            break  # memory and time per token only grow with the batch
        prediction = predict(costs, load, cut)
        if limit_s is not None and prediction.time_per_token_s > limit_s:
            if not figures:
                return NodeAlone(
                    node.name,
                    (),
                    memory,
                    f"needs {1000 * prediction.time_per_token_s:.1f} ms per token",
                )
            break
        figures.append(
            min(figures[-1], prediction, key=lambda item: item.cost(problem.goal))
            if figures
            else prediction
        )
    while len(figures) > 1 and figures[-1] is figures[-2]:
        figures.pop()
    return NodeAlone(node.name, tuple(figures), memory)


def _why_not(problem: PlanProblem, node: ClusterNode, memory: MemoryUse) -> str:
    """The limit that a node breaks with the whole model and one request, in words."""
    if problem.min_nodes > 1:
        return f"min_nodes is {problem.min_nodes}"
    if memory.needed > memory.usable:
        return f"{gibibytes(memory.needed - memory.usable)} short"
    return f"max_share is {problem.max_share.get(node.name, 1.0):g}"


def _reasons(nodes: Sequence[NodeAlone]) -> str:
    return listed([f"{node.node} ({node.reason})" for node in nodes], _NAMES_SHOWN)
