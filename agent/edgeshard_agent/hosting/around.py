"""Values around the stages of a node, without torch, which comes when the node has joined."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from edgeshard.domain.clock import Clock
from edgeshard.domain.control.commands import KeepStandby, PrepareStage
from edgeshard.domain.deployments.placement import PlacedDraft
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts, StageFilling
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.rpc.tls import TlsFiles
from edgeshard_agent.core.measuring import MeasuringTask
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.engine.long_texts import LEAST_BYTES
from edgeshard_agent.measuring.live_links import LiveLinks
from edgeshard_agent.measuring.node import MeasuredNode, NodeEmulation, Reports
from edgeshard_agent.net.link_receiver import StageServicer
from edgeshard_agent.store.blob_cache import BlobCache, Pin

if TYPE_CHECKING:
    from edgeshard_agent.engine.drafter import Drafter
    from edgeshard_agent.engine.pipeline_head import Head
    from edgeshard_agent.engine.tokenizer import Tokenizer
    from edgeshard_agent.hosting.hosted_stage import HostedStage
    from edgeshard_agent.model.stage import StageModel
    from edgeshard_agent.model.weights.weights import StageWeights

WeightsKey = tuple[Digest, DType, Quantisation | None]
ModelKey = tuple[
    WeightsKey,
    LayerRange,
    KvFormat,
    tuple[int, int, int, int],
    int,
    tuple[int, bool],
    PlacedDraft | None,
]


@dataclass(slots=True)
class LoadProgress:
    """The progress of a load: bytes fetched, of all that were missing; then of filling memory, None
    before that.

    The loader calls `fetched` on the event loop and `filled` in a thread; each only sets values.
    """

    fetched_bytes: int = 0
    total_bytes: int = 0
    filling: StageFilling | None = None

    def fetched(self, fetched_bytes: int, total_bytes: int) -> None:
        self.fetched_bytes = fetched_bytes
        self.total_bytes = total_bytes
        self.filling = None

    def filled(self, filling: StageFilling) -> None:
        self.filling = filling


@dataclass(frozen=True, slots=True)
class ForHead:
    """A model's tokenizer and the tokens that end a text, for the head."""

    tokenizer: Tokenizer | None
    eos_tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Weights without memory for keys and values. A stage of the same `key` can share them."""

    key: WeightsKey
    weights: StageWeights
    for_head: ForHead | None
    pin: Pin
    """Keeps the cached blobs that the weights may be mapped from; released with them."""
    load_s: float
    """How long they took to fetch and load."""

    def serves(self, command: KeepStandby, layers: LayerRange) -> bool:
        """Whether these are the very weights that a command names."""
        return (self.key, self.weights.layers) == (weights_key(command), layers)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A stage's weights and, on the first stage, the head's parts of the model. Reusable while
    `key` is the same."""

    key: ModelKey
    model: StageModel
    for_head: ForHead | None
    pin: Pin
    load_s: float
    drafter: Drafter | None = None
    """Guesses tokens for the head, if there is a draft."""

    def reset(self) -> None:
        """Forget every request."""
        self.model.reset()
        if self.drafter is not None:
            self.drafter.reset()

    def release(self) -> None:
        """Give the memory back. It runs no more."""
        self.model.release()
        if self.drafter is not None:
            self.drafter.release()

    def retired(self, layers: LayerRange) -> HeldWeights:
        """Its weights of these layers for another stage; the memory of all else goes back. It runs
        no more."""
        if self.drafter is not None:
            self.drafter.release()
        weights = self.model.retire()
        weights.keep(layers)
        return HeldWeights(self.key[0], weights, self.for_head, self.pin, self.load_s)


def model_key(prepare: PrepareStage) -> ModelKey:
    """The key that must be equal for loaded weights and their KV arena to serve another epoch."""
    kv_dtype = prepare.spec.effective_kv_dtype
    placed = prepare.placed
    placement = prepare.placement
    slots = placement.saved_states, placement.used_guess_slots
    pool = placement.kv_blocks, prepare.spec.max_context, *slots
    swap = prepare.spec.kv_swap_bytes, prepare.spec.kv_swap_on_disk
    draft = None if prepare.stage else placement.draft
    return (
        weights_key(prepare),
        placed.layers,
        kv_dtype,
        pool,
        placed.weight_budget_bytes,
        swap,
        draft,
    )


def weights_key(command: PrepareStage | KeepStandby) -> WeightsKey:
    """The key that must be equal for stages to share weights."""
    return command.manifest_digest, command.spec.dtype, quantisation_of(command)


def quantisation_of(command: PrepareStage | KeepStandby) -> Quantisation | None:
    node = command.placed.node_name if isinstance(command, PrepareStage) else command.node
    return command.spec.quantisation_of(node)


@dataclass(frozen=True, slots=True)
class HostServices:
    """Services that all stages of a node share."""

    node_id: NodeId
    worker: ComputeThread
    servicer: StageServicer
    dial: Callable[[], grpc.aio.Channel]
    """A channel to the coordinator, of a connection of its own; the caller closes it."""
    tls: TlsFiles | None
    clock: Clock
    changed: Callable[[], None]
    """Called when a stage's status is worth telling the coordinator early."""
    emulation: NodeEmulation | None = None
    """In the lab: the device and links that this node emulates."""
    links: LiveLinks | None = None
    """Takes the link samples of live traffic; None in the lab, whose links are not its sockets."""
    suspect: Callable[[LinkSuspected], None] = lambda suspected: None
    """Told when a link to a next stage carries nothing any more, and when it does again."""
    text_memory_bytes: int = LEAST_BYTES
    """Memory that a long prompt may take in the tokenizer process of a head."""


LoadStandby = Callable[
    [KeepStandby, LayerRange, LoadProgress, Sequence[HeldWeights]], Awaitable[HeldWeights]
]
"""Fetches and loads a standby while this node computes steps, except the weights that are in memory
already."""
Broken = Callable[[DeploymentName, Epoch], None]
"""Told when a stage breaks."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that need torch. A node gets its tools when it has joined
    (`edgeshard_agent.hosting.loading`)."""

    load: Callable[[PrepareStage, LoadProgress, Sequence[HeldWeights]], Awaitable[LoadedModel]]
    """Fetches and loads a stage, except the weights that are in memory already."""
    load_standby: LoadStandby
    measure: Callable[[MeasuringTask, int | None], Awaitable[None]]
    """Measures and reports; cancelled, it leaves nothing in memory. The number is the bytes that
    the node's stages and standbys hold, None if it has no stage and no standby."""
    wire: Callable[[PrepareStage, LoadedModel, HostServices, Broken, Head | None], HostedStage]
    """Makes a stage of loaded weights, and does not start it. The head is the one of the former
    epoch."""


MakeTools = Callable[
    [MeasuredNode, Reports, BlobCache, grpc.aio.Channel, ComputeThread, float, bool], Tools
]
"""`edgeshard_agent.hosting.loading.make_tools`"""
ReadFacts = Callable[[str, int | None], DeviceFacts]
"""`edgeshard_agent.measuring.facts.read_facts`"""
