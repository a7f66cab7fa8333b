"""Which box is to be the source of a deployment that names none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgeshard.domain.deployment import DeploymentSpec
from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.placement import Placement
from edgeshard_coordinator.core.placing import Candidate
from edgeshard_coordinator.core.repair import MOST_SPARES

Place = Callable[[DeploymentSpec], Placement]


def with_source(spec: DeploymentSpec, placement: Placement) -> DeploymentSpec:
    """The spec as it is deployed: its source is the box of the first layer."""
    return spec if spec.source else spec.model_copy(update={"source": str(placement.stages[0].node_name)})


def place_from_any(spec: DeploymentSpec, candidates: Sequence[Candidate], place: Place) -> Placement:
    """The best placement over the sources there are: by its figures, or without any the one with most free memory.

    A source costs a plan, so no more of them are tried than boxes stand in for one that is lost. Raises what the first
    one's placement raises where there is none at all, UnavailableError without a box to place on.
    """
    sources = [node for node in candidates if node.placeable and node.name not in spec.exclude]
    sources.sort(key=lambda node: (-node.free_bytes, node.name))
    found: list[Placement] = []
    error: EdgeShardError = UnavailableError(
        "source: no box is connected that could be it; `edgectl get nodes` shows them",
        field="source",
        reason="NO_NODE",
        retry_after_s=1.0,
    )
    for number, node in enumerate(sources[:MOST_SPARES]):
        try:
            found.append(place(spec.model_copy(update={"source": str(node.name)})))
        except EdgeShardError as refused:
            error = refused if number == 0 else error
    if not found:
        raise error
    best = min(found, key=_rank)
    if len(found) == 1:
        return best
    chosen = f"Source: {best.stages[0].node_name}, the best of the {len(found)} boxes that could be it."
    return replace(best, note=f"{best.note} {chosen}".strip())


def _rank(placement: Placement) -> tuple[bool, float]:
    return placement.predicted is None, placement.predicted.rank if placement.predicted is not None else 0.0
