"""The node that is measured, as a value, and the receivers of its measurements. Without torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgeshard.domain.clock import Clock
from edgeshard.domain.control.commands import CommandProgress, ProfileReport
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import ComputeProfile, MeasuredLink
from edgeshard.rpc.tls import TlsFiles
from edgeshard_agent.measuring.probing import Way
from edgeshard_agent.net.link_sender import Carrier

if TYPE_CHECKING:
    from edgeshard_agent.engine.stage_runner import Pace


class NodeEmulation(Protocol):
    """The device and the links that a node of the lab pretends to have
    (`edgeshard_agent.emulation`)."""

    def facts(self, real: DeviceFacts) -> DeviceFacts:
        """The facts of the node that the coordinator gets."""

    def pace(self, layers: LayerRange, clock: Clock) -> Pace:
        """The pace of a stage of these layers."""

    def carrier(self, receiver: NodeName, window: int) -> Carrier:
        """The carrier of a stage's link to another node."""

    def profile(
        self,
        facts: DeviceFacts,
        config: Mapping[str, Any],
        dtype: DType,
        quantisation: Quantisation | None,
    ) -> ComputeProfile:
        """The profile that measuring the emulated device would give."""

    def way(self, peer: NodeName) -> Way:
        """The way of a probe's payloads to a node."""


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    """The node to measure, and its settings. `memory` is the operator's limit in bytes, None when
    there is none.

    Until torch is imported, `facts` lack the values that need torch.
    """

    node_id: NodeId
    facts: DeviceFacts
    device: str
    threads: int
    memory: int | None
    state_dir: Path
    tls: TlsFiles | None
    emulation: NodeEmulation | None = None

    def shown(self, facts: DeviceFacts) -> DeviceFacts:
        """The facts that the coordinator hears: in the lab the emulated device's."""
        return facts if self.emulation is None else self.emulation.facts(facts)


@dataclass(frozen=True, slots=True)
class Reports:
    """Receivers of measurements: the coordinator, and for links also the comparison with live
    traffic."""

    report: Callable[[ProfileReport], Awaitable[None]]
    progress: Callable[[CommandProgress], None]
    probed: Callable[[tuple[MeasuredLink, ...]], None] = lambda links: None
    """Told of links once they are reported."""
