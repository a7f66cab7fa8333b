"""The cost of a node's failure: the nodes that take its layers, and how long requests would pause.
Pure.

The time until a loss is known and a placement is found is as measured. The time for loading comes
from the same nodes' loading of their present weights, and the time for computing again from the
placement's costs, for one request of typical lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeshard.domain.deployments.placement import ExplicitStage, Placement
from edgeshard.domain.deployments.traffic import Loss, Pause
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard_coordinator.core.placement.problem import Typical
from edgeshard_coordinator.core.placement.repair import cold_layers
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

DEATH_NOTICED_S = 0.05
"""The connections of a process that died end at once. A node that falls silent is noticed after
about 2.8 s."""
OPEN_S = 0.1
"""To link the stages of a new epoch and to attach its head."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """The placement for the case that a node fails, or why there is none, and how long it took to
    find, in seconds."""

    node: NodeName
    outcome: Placement | EdgeShardError
    plan_s: float


def loss_of(
    state: State,
    record: DeploymentRecord,
    repaired: Repaired,
    candidates: Sequence[Candidate],
    typical: Typical,
) -> Loss:
    """The cost of a repair. `candidates` are the record's, with the layers that they keep warm for
    it."""
    outcome = repaired.outcome
    if isinstance(outcome, EdgeShardError):
        return Loss(repaired.node, note=f"It could not continue: {outcome.message}.")
    changed = cold_layers(outcome, record.placement, candidates)
    taken_by = tuple(ExplicitStage(stage.node_name, stage.layers) for stage, _ in changed)
    warm = not any(layers for _, layers in changed)
    rates = load_rates(state)
    load_s = 0.0
    for stage, layers in changed:
        if not layers:
            continue
        rate = rates.get(stage.node_id) or min(rates.values(), default=0.0)
        if not rate:
            return Loss(
                repaired.node,
                None,
                taken_by,
                warm,
                "Loading times of the nodes are not measured yet.",
            )
        load_s = max(load_s, stage.parameter_bytes * len(layers) / len(stage.layers) / rate)
    pause = Pause(
        DEATH_NOTICED_S, repaired.plan_s, load_s, OPEN_S + rebuild_s(record.placement, typical)
    )
    return Loss(repaired.node, pause, taken_by, warm)


def load_rates(state: State) -> Mapping[NodeId, float]:
    """Parameter bytes a second at which each node fetched and loaded its stages, if it holds
    any."""
    rates = {}
    for node in state.nodes.values():
        timed = [stage for stage in node.stages if stage.load_s > 0 and stage.parameter_bytes]
        if timed:
            rates[node.node_id] = sum(s.parameter_bytes for s in timed) / sum(
                s.load_s for s in timed
            )
    return rates


def rebuild_s(placement: Placement, typical: Typical) -> float:
    """Seconds to compute a prompt and half its answer again, at the pace of the present placement;
    0 if that is unknown."""
    tokens = typical.prompt_tokens + typical.new_tokens // 2
    return sum(cost.step_s([(0, tokens)]) + cost.transfer_s(tokens) for cost in placement.costs)
