"""The units of a model that nodes keep packed on their disks, for a placement that makes use of
them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgeshard.architectures import parse_config
from edgeshard.architectures.units import UnitForm, held_of
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.models.packed_units import NOTHING_HELD
from edgeshard.planning.search.locality import is_near
from edgeshard_coordinator.core.values.candidate import Candidate


def with_held(
    candidates: Sequence[Candidate], spec: DeploymentSpec, manifest: ModelManifest, digest: Digest
) -> tuple[Candidate, ...]:
    """The nodes with the units that each keeps of this model in the form of the spec. `digest` is
    the manifest's.

    Raises UnsupportedModelError for a config that is not understood.
    """
    if not any(node.packed for node in candidates):
        return tuple(candidates)
    shape = parse_config(manifest.config)

    def looked_at(node: Candidate) -> Candidate:
        form = UnitForm(digest, spec.dtype, spec.quantisation_of(node.name), shape)
        return replace(node, packed_parts=held_of(form, manifest.config, frozenset(node.packed)))

    return tuple(looked_at(node) if node.packed else node for node in candidates)


def without_held(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The nodes as if no node held packed units."""
    return tuple(replace(node, packed_parts=NOTHING_HELD) for node in candidates)


def nearest(
    placements: Sequence[Placement],
    rank: Callable[[Placement], tuple[bool, float]],
    candidates: Sequence[Candidate],
) -> Placement:
    """The best by rank or, among placements within `LOCALITY_MARGIN` of it, the one with the fewest
    layers to fetch and pack.

    A rank is whether something is amiss, then the cost of a placement, 0 if that is unknown.
    `placements` is not empty.
    """
    best = min(placements, key=rank)
    amiss, cost = rank(best)
    near = [one for one in placements if rank(one)[0] == amiss and is_near(rank(one)[1], cost)]
    return min(near, key=lambda one: (lacking_layers(one, candidates), rank(one)))


def lacking_layers(placement: Placement, candidates: Sequence[Candidate]) -> int:
    """The number of layers that its nodes would have to fetch and pack."""
    packed_layers = {node.node_id: node.packed_parts.layers for node in candidates}
    return sum(
        len(
            frozenset(range(stage.layers.first, stage.layers.end))
            - packed_layers.get(stage.node_id, frozenset())
        )
        for stage in placement.stages
    )
