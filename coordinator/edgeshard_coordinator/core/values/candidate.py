"""Nodes as a placer sees them, and the memory of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgeshard.domain.deployments.placement import PlacedStage
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.packed_units import NOTHING_HELD, PackedParts
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import DiskProfile


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as a placer sees it. `free_bytes` is its memory budget less the memory that other
    deployments hold there.

    Layers are placed on it when it is connected and not `starting` any more. It keeps the weights
    of the layers `warm` of the deployment in question in memory, and the units with the ids
    `packed` on its disk. `packed_parts` are the units of the model and the form in question, if
    they were looked up (`core.placement.nearest_placement`). `disk` is None if it is unmeasured,
    and so is `busy_w`, its watts while it computes.
    """

    node_id: NodeId
    name: NodeName
    address: str
    free_bytes: int
    connected: bool
    facts: DeviceFacts
    starting: bool = False
    warm: LayerRange | None = None
    packed: tuple[int, ...] = ()
    packed_parts: PackedParts = NOTHING_HELD
    disk: DiskProfile | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    busy_w: float | None = None

    @property
    def placeable(self) -> bool:
        return self.connected and not self.starting


def held_bytes(stage: PlacedStage) -> int:
    """Memory a stage holds once loaded, in bytes."""
    return stage.parameter_bytes + stage.kv_bytes + stage.workspace_bytes
