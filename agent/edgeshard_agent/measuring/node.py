"""The node that is measured, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import ComputeProfile
from edgeshard.rpc.tls import TlsFiles
from edgeshard_agent.measuring.probing import Way


class EmulatedNode(Protocol):
    """The lab's answers in place of measurements (`edgeshard_agent.lab.emulation`)."""

    def profile(
        self, facts: DeviceFacts, config: Mapping[str, Any], dtype: DType, quantisation: Quantisation | None
    ) -> ComputeProfile:
        """The profile that measuring the emulated device would give."""

    def way(self, peer: NodeName) -> Way:
        """The way of a probe's payloads to a node."""


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
    emulation: EmulatedNode | None = None
