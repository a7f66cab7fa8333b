"""What stands around the stages of a box: values, without torch, which comes when the box has joined."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from edgeshard.domain.clock import Clock
from edgeshard.domain.commands import CommandProgress, PrepareStage, ProfileReport
from edgeshard.domain.device import DeviceFacts
from edgeshard.domain.dtypes import DType, Quantisation
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId
from edgeshard.domain.link import LinkSuspected
from edgeshard.domain.model import LayerRange
from edgeshard.domain.profile import MeasuredLink
from edgeshard.rpc.tls import TlsFiles
from edgeshard_agent.core.measuring import MeasuringTask
from edgeshard_agent.engine.worker import ComputeThread
from edgeshard_agent.lab.emulation import Emulation
from edgeshard_agent.measuring.live_links import LiveLinks
from edgeshard_agent.measuring.node import MeasuredNode
from edgeshard_agent.net.link_receiver import StageServicer
from edgeshard_agent.store.cache import BlobCache, Pin

if TYPE_CHECKING:
    from edgeshard_agent.engine.head import Head
    from edgeshard_agent.engine.tokenizer import Tokenizer
    from edgeshard_agent.hosting.hosted_stage import HostedStage
    from edgeshard_agent.model.stage import StageModel

ModelKey = tuple[Digest, LayerRange, DType, Quantisation | None, DType, int]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A stage's weights and, on the first stage, what the head needs of the model. Reusable while `key` is the same."""

    key: ModelKey
    model: StageModel
    tokenizer: Tokenizer | None
    eos_tokens: frozenset[int]
    pin: Pin
    """Keeps the cached blobs that the weights may be mapped from; released with the stage."""


def model_key(prepare: PrepareStage) -> ModelKey:
    """What must be equal for loaded weights and their KV arena to serve another epoch."""
    spec, placed = prepare.spec, prepare.placed
    return (
        prepare.manifest_digest,
        placed.layers,
        spec.dtype,
        quantisation_of(prepare),
        spec.effective_kv_dtype,
        prepare.placement.kv_blocks,
    )


def quantisation_of(prepare: PrepareStage) -> Quantisation | None:
    return prepare.spec.quantisation_of(prepare.placed.node_name)


@dataclass(frozen=True, slots=True)
class HostServices:
    """What every stage of a box shares."""

    node_id: NodeId
    worker: ComputeThread
    servicer: StageServicer
    coordinator: grpc.aio.Channel
    tls: TlsFiles | None
    clock: Clock
    changed: Callable[[], None]
    """Called when a stage's status is worth telling the coordinator early."""
    emulation: Emulation | None = None
    """In the lab: the device and links that this box emulates."""
    links: LiveLinks | None = None
    """Takes the link samples of live traffic; None in the lab, whose links are not its sockets."""
    suspect: Callable[[LinkSuspected], None] = lambda suspected: None
    """Told when a link to a next stage carries nothing any more, and when it does again."""


Progress = Callable[[int, int], None]
Load = Callable[[PrepareStage, Progress], Awaitable[LoadedModel]]
"""Fetches and loads a stage; the callback is told the bytes fetched and the bytes in all."""
Measuring = Callable[[MeasuringTask], Awaitable[None]]
"""Measures and reports; cancelled, it leaves nothing in memory."""
Wire = Callable[
    [PrepareStage, LoadedModel, HostServices, Callable[[DeploymentName, Epoch], None], "Head | None"], "HostedStage"
]
"""A stage of loaded weights, not yet started; the callback is told when it breaks. The head is the former epoch's."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What needs torch. A box gets its tools when it has joined (`edgeshard_agent.hosting.tools`)."""

    load: Load
    measure: Measuring
    wire: Wire


@dataclass(frozen=True, slots=True)
class Reports:
    """Where measurements go: to the coordinator, and links to whoever compares live traffic with them."""

    report: Callable[[ProfileReport], Awaitable[None]]
    progress: Callable[[CommandProgress], None]
    probed: Callable[[tuple[MeasuredLink, ...]], None]


MakeTools = Callable[[MeasuredNode, Reports, BlobCache, grpc.aio.Channel, ComputeThread, float], Tools]
"""`edgeshard_agent.hosting.tools.make_tools`"""
ReadFacts = Callable[[str, int | None], DeviceFacts]
"""`edgeshard_agent.measuring.facts.read_facts`"""
