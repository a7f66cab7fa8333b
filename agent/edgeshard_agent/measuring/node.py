"""The node that is measured, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.rpc.tls import TlsFiles

if TYPE_CHECKING:
    from edgeshard_agent.lab.emulation import Emulation  # brings all of the planner


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    """The node to measure, and its settings. `memory` is the operator's limit in bytes, None when there is none."""

    node_id: NodeId
    facts: DeviceFacts
    device: str
    threads: int
    memory: int | None
    state_dir: Path
    tls: TlsFiles | None
    emulation: Emulation | None = None
