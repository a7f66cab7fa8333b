"""The placements of a deployment's replicas: pipelines on disjoint nodes that serve one name
together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from edgeshard.domain.deployments.deployment import AUTO_REPLICAS, DeploymentPhase, DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import Digest, NodeId, NodeName
from edgeshard.planning.search.partition import Group, Worth, partition
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

PlaceOn = Callable[[Sequence[Candidate]], Placement]


def place_replicas(
    spec: DeploymentSpec, candidates: Sequence[Candidate], place: PlaceOn
) -> tuple[Placement, ...]:
    """The placements of all replicas that the spec requests, or of the number with the highest
    total rate. `place` plans one pipeline on the candidates that are connected.

    Without figures "auto" is a single pipeline, because the gain of a second one is unknown. Raises
    ResourceExhaustedError naming `replicas` if that number does not fit, and as `place` does if
    none does.
    """
    usable = [node for node in candidates if node.placeable and node.name not in spec.exclude]
    usable.sort(key=lambda node: (-node.free_bytes, node.name))
    everywhere: list[EdgeShardError] = []
    single = place(candidates) if spec.replicas == AUTO_REPLICAS else None
    if single is not None and single.predicted is None:
        note = f"{single.note} One pipeline: without measurements replicas cannot be compared."
        return (replace(single, note=note.strip()),)

    def worth(group: Group) -> Worth[Placement] | None:
        try:
            placement = place(only_on(candidates, group))
        except EdgeShardError as error:
            everywhere.extend([error] if len(group) == len(usable) else [])
            return None
        return Worth(
            placement,
            0.0 if placement.predicted is None else placement.predicted.throughput_tps,
            len(placement.stages),
        )

    count = None if spec.replicas == AUTO_REPLICAS else spec.replicas
    best_partition = partition([str(node.name) for node in usable], worth, count)
    if best_partition is None:
        raise _why_not(spec, len(usable), everywhere)
    if len(best_partition.pipelines) == 1:
        return (single or place(candidates),)
    return tuple(one.pipeline for one in best_partition.pipelines)


def only_on(candidates: Sequence[Candidate], names: Collection[str]) -> tuple[Candidate, ...]:
    """The candidates, of which no others than these are connected."""
    return tuple(
        replace(node, connected=node.connected and node.name in names) for node in candidates
    )


def without_siblings(
    state: State, spec: DeploymentSpec, candidates: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """The candidates for a replica: nodes of the other replicas of its name are not for it, since a
    node that is lost would take both."""
    sibling_ids: set[NodeId] = set()
    for other in state.siblings_of(spec):
        sibling_ids |= {stage.node_id for stage in other.placement.stages}
    return tuple(
        replace(node, connected=False) if node.node_id in sibling_ids else node
        for node in candidates
    )


def check_joins(spec: DeploymentSpec, digest: Digest, others: Sequence[DeploymentRecord]) -> None:
    """Raise unless a replica can join the `others` of its name, as one of them that is gone: of the
    same spec, and of the model with this digest.

    Raises InvalidArgumentError if the name has no such replica, FailedPreconditionError naming what
    differs.
    """
    standing = [
        other
        for other in others
        if not other.delete_revision and other.phase is not DeploymentPhase.DELETING
    ]
    if not standing or spec.name not in standing[0].spec.replica_names:
        raise InvalidArgumentError.about(
            "replica", "the coordinator numbers replicas; leave it out", "INVALID_SPEC"
        )
    there = standing[0]
    alike = replace(there.spec, name=spec.name, replica=spec.replica, source=spec.source)
    differs = [
        field
        for field in type(spec).__match_args__
        if getattr(spec, field) != getattr(alike, field)
    ]
    if differs or digest != there.manifest_digest:
        raise FailedPreconditionError.about(
            differs[0] if differs else "model",
            f"it differs from that of {there.name}, whose name {spec.name} would share; delete "
            f"{spec.served_name} and deploy it again",
            "SPEC_DIFFERS",
        )


def computes_the_same(state: State, one: DeploymentRecord, other: DeploymentRecord) -> bool:
    """Whether two replicas give a request the same tokens: their nodes compute the same bits, and
    keep each layer's weights in the same form. All else of their specs is the same."""
    nodes = {stage.node_id for record in (one, other) for stage in record.placement.stages}
    prints = {
        node.facts.bits_fingerprint if (node := state.nodes.get(id)) is not None else ""
        for id in nodes
    }
    return len(prints) == 1 and "" not in prints and _forms(one) == _forms(other)


def _forms(record: DeploymentRecord) -> list[object]:
    return [
        (record.manifest_digest, record.spec.quantisation_of(NodeName(stage.node_name)))
        for stage in record.placement.stages
        for _ in range(stage.layers.first, stage.layers.end)
    ]


def _why_not(spec: DeploymentSpec, usable: int, errors: Sequence[EdgeShardError]) -> EdgeShardError:
    if errors:
        return errors[0]  # not even one pipeline
    if not usable:
        return UnavailableError(
            "source: no connected node can be the source; `edgectl get nodes` lists the nodes",
            field="source",
            reason="NO_NODE",
            retry_after_s=1.0,
        )
    return ResourceExhaustedError(
        f"replicas: the {usable} usable nodes do not hold {spec.replicas} pipelines of "
        f"{spec.model} "
        "on separate nodes; request fewer, free memory, or connect more nodes",
        field="replicas",
        reason="TOO_MANY_REPLICAS",
    )
