"""From a prepare command to weights in memory: fetch only what the stage needs, and load it off the
loop.

`make_tools` returns all tools that a node computes with. Importing this imports torch, so a node
does it when it has joined.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import structlog

from edgeshard.architectures import (
    canonical_name,
    for_context,
    held_bytes,
    named_eos_tokens,
    parse_config,
    stage_tensors,
    unit_of,
)
from edgeshard.architectures.units import UnitForm, tensors_of_units
from edgeshard.domain.control.commands import KeepStandby, PrepareStage
from edgeshard.domain.deployments.deployment import draft_spec
from edgeshard.domain.deployments.placement import Placement, Speculation
from edgeshard.domain.errors import (
    DataLossError,
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
)
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import FileInfo, LayerRange, ModelManifest, TensorInfo
from edgeshard.domain.models.residency import DISK_BLOCK_BYTES
from edgeshard.domain.nodes.device import StageFilling
from edgeshard.storage import forms
from edgeshard.storage.blobs import in_thread
from edgeshard.storage.checkpoint import check_file_size
from edgeshard_agent.engine.compute_thread import BackgroundThread, ComputeThread
from edgeshard_agent.engine.drafter import Drafter
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.guides.guide_messages import Setup
from edgeshard_agent.guides.guides import Guides
from edgeshard_agent.hosting.around import (
    ForHead,
    HeldWeights,
    LoadedModel,
    LoadProgress,
    Tools,
    model_key,
    quantisation_of,
    weights_key,
)
from edgeshard_agent.hosting.hosted_stage import HostedStage
from edgeshard_agent.measuring.facts import read_facts
from edgeshard_agent.measuring.measurer import Measurer
from edgeshard_agent.measuring.node import MeasuredNode, Reports
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.draft_steps import DraftSteps
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.cached_source import CachedTensorSource
from edgeshard_agent.model.weights.weight_loading import Packing, reads_packed
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.store.blob_cache import CACHE_LIMIT, BlobCache, Pin
from edgeshard_agent.store.fetcher import Fetcher
from edgeshard_agent.store.packed_files import PACKED_DAMAGED
from edgeshard_agent.store.unit_sources import UnitSources

T = TypeVar("T", bound=StageModel | StageWeights)
R = TypeVar("R")

log = structlog.get_logger()

# Files of the head. The last stage fetches them too, for guides: some megabytes.
_HEAD_FILES = (forms.TOKENIZER, forms.GENERATION, forms.TOKENIZER_SETTINGS)
_PADDING_BYTES = 4 * DISK_BLOCK_BYTES
"""Padding of a packed file: its header, and the ends of its two parts."""


@dataclass(eq=False)
class StageLoader:
    """Loads stages through the node's cache; only what the cache lacks is fetched from the
    coordinator."""

    cache: BlobCache
    store: grpc.aio.Channel
    """To the coordinator's models."""
    worker: ComputeThread
    background: BackgroundThread
    """A thread for standbys, so that they do not hold up the steps of this node."""
    device: str
    idle_spin_s: float
    packs: bool
    """Whether loaded weights are kept packed, so that the next load only reads them; only on the
    CPU."""

    def __post_init__(self) -> None:
        self._fetcher = Fetcher(self.cache, self.store)
        self.packs = self.packs and self.device == "cpu"

    async def load(
        self,
        prepare: PrepareStage,
        progress: LoadProgress,
        held_weights: Sequence[HeldWeights] = (),
    ) -> LoadedModel:
        """Raises the store's and the model's typed errors; a failed load leaves nothing pinned or
        in memory."""
        began, layers = time.monotonic(), prepare.placed.layers

        async def fill(fetched: _Fetched) -> StageModel:
            guides = await asyncio.to_thread(_guides, fetched)
            reuse = [item.weights for item in held_weights]
            return await self._filled(prepare, fetched, reuse, guides, progress, self.idle_spin_s)

        model, for_head, pin = await self._load(prepare, layers, held_weights, progress, fill)
        loaded = LoadedModel(model_key(prepare), model, for_head, pin, 0.0)
        try:
            drafter = await self._load_draft(prepare, model.shape.vocab_size, pin)
        except BaseException:
            pin.release()
            self.worker.submit(loaded.release)
            raise
        return replace(loaded, load_s=time.monotonic() - began, drafter=drafter)

    async def _load_draft(self, prepare: PrepareStage, vocab_size: int, pin: Pin) -> Drafter | None:
        """The draft of a head, whose blobs stay as long as `pin`; None if there is no draft or it
        cannot be loaded. Then only guesses are lost."""
        command = _draft_command(prepare)
        if command is None:
            return None

        async def fill(fetched: _Fetched) -> StageModel:
            return await self._filled(command, fetched, (), None, LoadProgress())

        try:
            layers = command.placed.layers
            model, _, draft_pin = await self._load(
                command, layers, (), LoadProgress(), fill, with_files=False
            )
        except EdgeShardError as error:
            log.warning(
                "draft_not_loaded",
                deployment=prepare.deployment,
                reason=error.reason,
                why=error.message,
            )
            return None
        pin.join(draft_pin)
        assert prepare.placement.draft is not None
        places = prepare.placement.draft.requests
        return Drafter(DraftSteps(model, places), places, vocab_size)

    async def _filled(
        self,
        prepare: PrepareStage,
        fetched: _Fetched,
        reuse: Sequence[StageWeights],
        guides: Guides | None,
        progress: LoadProgress,
        idle_spin_s: float = 0.0,
    ) -> StageModel:
        """A stage with its weights, made on the compute thread."""
        filling = asyncio.ensure_future(
            self.worker.run(
                self._load_stage, prepare, fetched, reuse, guides, progress, idle_spin_s
            )
        )
        try:
            return await asyncio.shield(filling)
        except asyncio.CancelledError:
            # the thread continues, and only this callback releases its result
            filling.add_done_callback(self._release)
            raise

    def _release(self, filling: asyncio.Future[StageModel]) -> None:
        if not filling.cancelled() and filling.exception() is None:
            with suppress(RuntimeError):  # if the node is gone, its thread is, too
                self.worker.submit(filling.result().release)

    async def load_standby(
        self,
        command: KeepStandby,
        layers: LayerRange,
        progress: LoadProgress,
        held_weights: Sequence[HeldWeights] = (),
    ) -> HeldWeights:
        """Load weights as `load` does, but without memory for keys and values; cancelled, it stops
        at the next tensor."""
        began = time.monotonic()
        reuse = [item.weights for item in held_weights]

        async def fill(fetched: _Fetched) -> StageWeights:
            def load(go_on: Callable[[], None]) -> StageWeights:
                def filled(filling: StageFilling) -> None:
                    go_on()
                    progress.filled(filling)

                return self._load_weights(fetched, reuse, filled)

            return await self.background.run(load)

        weights, for_head, pin = await self._load(command, layers, held_weights, progress, fill)
        return HeldWeights(weights_key(command), weights, for_head, pin, time.monotonic() - began)

    async def _load(
        self,
        command: PrepareStage | KeepStandby,
        layers: LayerRange,
        held_weights: Sequence[HeldWeights],
        progress: LoadProgress,
        fill: Callable[[_Fetched], Awaitable[T]],
        with_files: bool = True,
    ) -> tuple[T, ForHead | None, Pin]:
        """A stage that `fill` makes, with the parts of the model for its head, or without its
        files. Sources that do not serve are chosen again."""
        needs = await self._needs(command, layers, held_weights, with_files)
        damaged, most = set[str](), None
        while True:
            sources = UnitSources(self.cache.packed, needs.form, needs.units)
            try:
                if (self.packs or needs.budget) and reads_packed(self.device):
                    await in_thread(sources.choose, most)
                return await self._load_from(sources, needs, held_weights, progress, fill)
            except BaseException as error:
                sources.release()
                if not isinstance(error, EdgeShardError):
                    raise
                blobs = needs.blob_bytes
                if error.reason == PACKED_DAMAGED and error.message not in damaged:
                    # The file is gone: its unit is loaded from blobs now, and packed again.
                    damaged.add(error.message)
                    log.warning(
                        "packed_file_damaged", deployment=command.deployment, why=error.message
                    )
                elif error.reason == CACHE_LIMIT and any(
                    size > blobs[unit] for unit, size in sources.sizes.items()
                ):
                    # files that take more room than the blobs of their units make way, once
                    most = blobs
                    log.info(
                        "packed_files_dropped", deployment=command.deployment, why=error.message
                    )
                else:
                    raise

    async def _load_from(
        self,
        sources: UnitSources,
        needs: _Needs,
        held_weights: Sequence[HeldWeights],
        progress: LoadProgress,
        fill: Callable[[_Fetched], Awaitable[T]],
    ) -> tuple[T, ForHead | None, Pin]:
        tensors = needs.from_blobs(sources)
        pin = await self._fetcher.fetch([*tensors, *needs.files], progress.fetched)
        pin.hold(sources)
        try:
            packing = None
            if self.packs or needs.budget:
                packing = Packing(sources, needs.budget, writes=self.packs)
                await self.cache.make_room_for_packed(needs.packed_bytes(tensors, sources))
            fetched = _Fetched(needs, pin, packing)
            if packing is not None and forms.EXPERT_TABLE in fetched.paths:
                values = await asyncio.to_thread(_expert_table, fetched.paths[forms.EXPERT_TABLE])
                fetched = replace(fetched, packing=replace(packing, expert_table=values))
            for_head = await _for_head(fetched, held_weights)
            loaded = await fill(fetched)
            needs.check_size(loaded.parameter_bytes)
            await pin.drop(needs.blobs_in(sources.kept))
        except BaseException:
            pin.release()
            raise
        return loaded, for_head, pin

    async def _needs(
        self,
        command: PrepareStage | KeepStandby,
        layers: LayerRange,
        held_weights: Sequence[HeldWeights],
        with_files: bool,
    ) -> _Needs:
        digest, quantisation = command.manifest_digest, quantisation_of(command)
        manifest = await self._fetcher.manifest(digest)
        shape = parse_config(manifest.config)
        tensors = stage_tensors(manifest, layers)
        there = frozenset[int]().union(*(item.weights.shareable(layers) for item in held_weights))
        missing_tensors = {
            canonical_name(shape.architecture, tensor.name): tensor
            for tensor in tensors
            if unit_of(shape.architecture, tensor.name, manifest.config) not in there
        }
        units = tensors_of_units(manifest.config, layers, quantisation)
        units = {
            unit: names for unit, names in units.items() if not names.isdisjoint(missing_tensors)
        }
        budget = command.placed.weight_budget_bytes if isinstance(command, PrepareStage) else 0
        at_end = with_files and (layers.first == 0 or layers.end == shape.layer_count)
        files = [file for file in manifest.files if file.name in _HEAD_FILES] if at_end else []
        for file in files:  # of a model that an older version added
            check_file_size(file.name, file.size)
        if budget:
            files += [file for file in manifest.files if file.name == forms.EXPERT_TABLE]
        form = UnitForm(digest, command.spec.dtype, quantisation, shape)
        return _Needs(
            manifest,
            layers,
            command.spec.max_context,
            tensors,
            missing_tensors,
            files,
            form,
            units,
            budget or None,
        )

    def _load_stage(
        self,
        prepare: PrepareStage,
        fetched: _Fetched,
        reuse: Sequence[StageWeights],
        guides: Guides | None,
        progress: LoadProgress,
        idle_spin_s: float,
    ) -> StageModel:
        weights = self._load_weights(fetched, reuse, progress.filled)
        spec, placement = prepare.spec, prepare.placement
        directory = self.cache.directory if spec.kv_swap_on_disk else None
        kv = KvMemory(
            spec.effective_kv_dtype,
            placement.kv_blocks,
            placement.kv_block_tokens,
            spec.kv_swap_bytes,
            directory,
            slots=placement.slots_of(spec.max_context or weights.shape.max_context),
            guess_slots=placement.used_guess_slots,
        )
        return StageModel.with_kv(weights, kv, idle_spin_s=idle_spin_s, guides=guides)

    def _load_weights(
        self,
        fetched: _Fetched,
        reuse: Sequence[StageWeights],
        progress: Callable[[StageFilling], None],
    ) -> StageWeights:
        needs = fetched.needs
        return StageWeights.load(
            fetched.source,
            for_context(needs.manifest.config, needs.max_context),
            needs.layers,
            dtype=needs.form.dtype,
            device=self.device,
            quantisation=needs.form.quantisation,
            progress=progress,
            reuse=reuse,
            packing=fetched.packing,
        )


@dataclass(frozen=True, slots=True)
class _Needs:
    """The parts of a model that a stage needs: its tensors, the ones in no memory yet, and the
    head's files.

    `missing_tensors` are by canonical name; `units` are the units that have some of them. `budget`
    is given for a stage that streams.
    """

    manifest: ModelManifest
    layers: LayerRange
    max_context: int
    tensors: tuple[TensorInfo, ...]
    missing_tensors: dict[str, TensorInfo]
    files: list[FileInfo]
    form: UnitForm
    units: dict[str, frozenset[str]]
    budget: int | None

    @property
    def blob_bytes(self) -> dict[str, int]:
        """Bytes of each unit's tensors."""
        sizes = {name: tensor.stored_bytes for name, tensor in self.missing_tensors.items()}
        return {
            unit: sum(sizes.get(name, 0) for name in names) for unit, names in self.units.items()
        }

    def from_blobs(self, sources: UnitSources) -> list[TensorInfo]:
        return [
            tensor for name, tensor in self.missing_tensors.items() if name in sources.from_blobs
        ]

    def packed_bytes(self, tensors: Sequence[TensorInfo], sources: UnitSources) -> int:
        """Bytes that these tensors take in packed files: rows are padded, and so are the parts of
        each file."""
        size = self._held_bytes(tensors)
        return size + size // 16 + _PADDING_BYTES * (len(sources.tensors) - len(sources.sizes))

    def blobs_in(self, packed: frozenset[str]) -> frozenset[Digest]:
        """Blobs whose numbers only these units need."""
        others = frozenset[str]().union(
            *(names for unit, names in self.units.items() if unit not in packed)
        )
        kept_blobs = {
            tensor.sha256 for name, tensor in self.missing_tensors.items() if name in others
        }
        kept_blobs |= {file.sha256 for file in self.files}
        return frozenset(tensor.sha256 for tensor in self.missing_tensors.values()) - kept_blobs

    def check_size(self, size: int) -> None:
        expected = self._held_bytes(self.tensors)
        if size != expected:
            raise InternalError(
                f"layers {self.layers} hold {size} parameter bytes, their manifest {expected}"
            )

    def _held_bytes(self, tensors: Sequence[TensorInfo]) -> int:
        return held_bytes(
            self.manifest.config, tensors, self.layers, self.form.dtype, self.form.quantisation
        )


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Blobs and packed files that a stage needs, pinned."""

    needs: _Needs
    pin: Pin
    packing: Packing | None = None

    @property
    def source(self) -> CachedTensorSource:
        return CachedTensorSource(self.pin.location, self.needs.missing_tensors.values())

    @property
    def paths(self) -> dict[str, Path]:
        """Paths of the head's files, by their names."""
        return {file.name: self.pin.location(file.sha256).path for file in self.needs.files}


async def _for_head(fetched: _Fetched, held_weights: Sequence[HeldWeights]) -> ForHead | None:
    """The head's parts of the model, for layers that begin it."""
    if fetched.needs.layers.first:
        return None
    for_head = next((item.for_head for item in held_weights if item.for_head is not None), None)
    if for_head is not None:
        return for_head
    paths, tokenizer = fetched.paths, None
    if forms.TOKENIZER in paths:  # many megabytes of JSON
        tokenizer = await asyncio.to_thread(Tokenizer.load, paths[forms.TOKENIZER])
    return ForHead(tokenizer, await asyncio.to_thread(_eos_tokens, fetched))


def _draft_command(prepare: PrepareStage) -> PrepareStage | None:
    """The draft of a head as a pipeline of one stage on its node; None if no draft is used."""
    placement, draft = prepare.placement, prepare.placement.draft
    if prepare.stage or draft is None or placement.speculation is not Speculation.GUESSES:
        return None
    placed = replace(
        prepare.placed,
        layers=LayerRange(0, draft.layer_count),
        parameter_bytes=draft.parameter_bytes,
        kv_bytes=draft.kv_bytes,
        workspace_bytes=draft.workspace_bytes,
        weight_budget_bytes=0,
        streamed_bytes=0,
    )
    return replace(
        prepare,
        spec=draft_spec(prepare.spec),
        placement=Placement((placed,), placement.kv_block_tokens, draft.kv_blocks, 1, 1),
        manifest_digest=draft.manifest_digest,
    )


def _expert_table(path: Path) -> dict[str, list[Any]]:
    return forms.expert_table_of(
        forms.parse_json_object(path.read_text(encoding="utf-8"), forms.EXPERT_TABLE)
    )


def _guides(fetched: _Fetched) -> Guides | None:
    """The guides of layers that end the model, if it has a tokenizer."""
    shape, paths = fetched.needs.form.shape, fetched.paths
    if fetched.needs.layers.end < shape.layer_count or forms.TOKENIZER not in paths:
        return None
    eos_tokens = tuple(sorted(_eos_tokens(fetched)))
    return Guides(Setup(str(paths[forms.TOKENIZER]), shape.vocab_size, eos_tokens))


def _eos_tokens(fetched: _Fetched) -> frozenset[int]:
    """The ids of the tokens that end an answer: those that any of the model's files names.

    The default of a family counts only if neither config.json nor generation_config.json names a
    token.
    """
    needs = fetched.needs
    shape = needs.form.shape
    ends = set(_small_file(fetched, forms.GENERATION, forms.eos_tokens_of) or ())
    ends.update(named_eos_tokens(needs.manifest.config) if ends else shape.eos_tokens)
    text = _small_file(fetched, forms.TOKENIZER_SETTINGS, forms.end_text_of)
    if text is not None:
        token_id = _small_file(
            fetched, forms.TOKENIZER, lambda tokenizer: forms.token_id(tokenizer, text)
        )
        ends.update(() if token_id is None else (token_id,))
    return frozenset(token for token in ends if token < shape.vocab_size)


def _small_file(
    fetched: _Fetched, name: str, read: Callable[[dict[str, Any]], R | None]
) -> R | None:
    """The result of `read` for the JSON object of one of the model's files; None without the file.

    Raises DataLossError naming the file.
    """
    path = fetched.paths.get(name)
    if path is None:
        return None
    try:
        return read(forms.parse_json_object(path.read_text(encoding="utf-8"), name))
    except (OSError, ValueError, InvalidArgumentError) as error:
        raise DataLossError(f"{name} cannot be read: {error}", field=name) from None


__all__ = ["make_tools", "read_facts"]


def make_tools(
    node: MeasuredNode,
    reports: Reports,
    cache: BlobCache,
    store: grpc.aio.Channel,
    worker: ComputeThread,
    idle_spin_s: float,
    packs: bool,
) -> Tools:
    """The tools of this node, whose `node.facts` are complete. `store` is a channel to the
    coordinator's models.

    With `packs`, weights are kept packed once they were loaded.
    """
    loader = StageLoader(
        cache, store, worker, BackgroundThread(worker), node.device, idle_spin_s, packs
    )
    return Tools(loader.load, loader.load_standby, Measurer(node, reports, worker).run, HostedStage)
