"""The source of a deployment that names none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import Placement, rank_among
from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.models.packed_units import NOTHING_HELD
from edgeshard.planning.search.locality import is_near
from edgeshard_coordinator.core.placement.nearest_placement import nearest, without_held
from edgeshard_coordinator.core.placement.repair import MOST_SPARES
from edgeshard_coordinator.core.placement.ruled import allowed_sources
from edgeshard_coordinator.core.values.candidate import Candidate

Place = Callable[[DeploymentSpec, Sequence[Candidate]], Placement]


def with_source(spec: DeploymentSpec, placement: Placement) -> DeploymentSpec:
    """The spec as it is deployed: its source is the node of the first layer."""
    return spec if spec.source else replace(spec, source=str(placement.stages[0].node_name))


def place_from_any(
    spec: DeploymentSpec, candidates: Sequence[Candidate], place: Place
) -> Placement:
    """The best placement over the sources there are: by its figures, or without any the one with
    most free memory.

    Among nearly equal ones, it takes the source whose nodes hold most of the model
    (`core.placement.nearest_placement`). A source costs a plan, so no more of them are tried than
    nodes stand in for a lost one. If there is no placement at all, raises as the first source's
    does; UnavailableError without a node to place on.
    """
    plain = (
        without_held(candidates)
        if any(node.packed_parts != NOTHING_HELD for node in candidates)
        else candidates
    )
    sources = [node for node in candidates if node.placeable and node.name not in spec.exclude]
    sources.sort(key=lambda node: (-node.free_bytes, node.name))
    sources = [*allowed_sources(spec, candidates, sources)]
    placements: list[Placement] = []
    error: EdgeShardError = UnavailableError(
        "source: no connected node can be the source; `edgectl get nodes` lists the nodes",
        field="source",
        reason="NO_NODE",
        retry_after_s=1.0,
    )
    for number, node in enumerate(sources[:MOST_SPARES]):
        try:
            placements.append(place(replace(spec, source=str(node.name)), plain))
        except EdgeShardError as refused:
            error = refused if number == 0 else error
    if not placements:
        raise error
    rank = _rank_among(placements)
    best = min(placements, key=rank)
    placement, why = best, f"the best of the {len(placements)} nodes that could be it"
    if plain is not candidates:
        placement = _nearest(
            best, placements, lambda one: place(_from(spec, one), candidates), candidates
        )
        if placement.head.node_id != best.head.node_id:
            why = (
                f"whose plan has less to fetch and pack than that of {best.head.node_name}, the "
                f"best of {len(placements)}"
            )
    if len(placements) == 1:
        return placement
    return replace(
        placement, note=f"{placement.note} Source: {placement.head.node_name}, {why}.".strip()
    )


def _nearest(
    best: Placement,
    placements: Sequence[Placement],
    again: Callable[[Placement], Placement],
    candidates: Sequence[Candidate],
) -> Placement:
    """The placement with the least to fetch and pack, among those nearly as good as the best of all
    sources, so that the margin is not used twice. `again` places for the units that nodes hold,
    from the same source."""
    allowed = [
        placement
        for one in placements
        if _is_near(one, best) and _is_near(placement := again(one), best)
    ]
    return nearest([best, *allowed], lambda one: (False, 0.0), candidates)


def _is_near(placement: Placement, best: Placement) -> bool:
    rank = _rank_among((placement, best))
    return placement.predicted is not None and is_near(rank(placement)[1], rank(best)[1])


def _from(spec: DeploymentSpec, placement: Placement) -> DeploymentSpec:
    return replace(spec, source=str(placement.head.node_name))


def _rank_among(placements: Sequence[Placement]) -> Callable[[Placement], tuple[bool, float]]:
    rank = rank_among(one.predicted for one in placements)
    return lambda one: (
        one.predicted is None,
        0.0 if one.predicted is None else rank(one.predicted),
    )
