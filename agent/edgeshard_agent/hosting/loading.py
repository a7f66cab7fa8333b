"""From a prepare command to weights in memory: fetch what the stage needs, no more, and load it off the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog

from edgeshard.architectures import ModelShape, canonical_name, held_bytes, parse_config, stage_tensors, unit_of
from edgeshard.architectures.unit_forms import UnitForm
from edgeshard.architectures.units import tensors_of_units
from edgeshard.domain.commands import KeepStandby, PrepareStage
from edgeshard.domain.device import StageFilling
from edgeshard.domain.errors import DataLossError, InternalError, InvalidArgumentError
from edgeshard.domain.model import FileInfo, LayerRange, ModelManifest, TensorInfo
from edgeshard.storage.checkpoint import check_file_size
from edgeshard.storage.forms import (
    EXPERT_TABLE,
    GENERATION,
    TOKENIZER,
    eos_tokens_of,
    expert_table_of,
    parse_json_object,
)
from edgeshard_agent.engine.aside import AsideThread
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.engine.worker import ComputeThread
from edgeshard_agent.guides.guides import Guides
from edgeshard_agent.guides.messages import Setup
from edgeshard_agent.hosting.around import ForHead, HeldWeights, LoadedModel, model_key, quantisation_of, weights_key
from edgeshard_agent.hosting.progress import LoadProgress
from edgeshard_agent.model.cached_source import CachedTensorSource
from edgeshard_agent.model.filling import Packing
from edgeshard_agent.model.stage import StageModel, check_weights
from edgeshard_agent.model.weights import StageWeights
from edgeshard_agent.store.cache import BlobCache, Pin
from edgeshard_agent.store.fetcher import Fetcher
from edgeshard_agent.store.packed import PACKED_DAMAGED

log = structlog.get_logger()

# Of the head; the last stage has them for guides, also where none comes: some megabytes beside its weights.
_HEAD_FILES = (TOKENIZER, GENERATION)


class StageLoader:
    """Loads stages through the box's cache; the coordinator is asked only for what the cache lacks.

    `aside` has a thread for standbys, so that they do not hold up the steps of this box. With `packs`, what was loaded
    is kept packed, and the next load of it only reads.
    """

    def __init__(
        self,
        cache: BlobCache,
        store: grpc.aio.Channel,
        worker: ComputeThread,
        aside: AsideThread,
        device: str,
        idle_spin_s: float,
        packs: bool,
    ) -> None:
        self._cache = cache
        self._fetcher = Fetcher(cache, store)
        self._packs = packs and device == "cpu"
        self._worker = worker
        self._aside = aside
        self._device = device
        self._stay_awake_s = idle_spin_s

    async def load(
        self, prepare: PrepareStage, progress: LoadProgress, held: Sequence[HeldWeights] = ()
    ) -> LoadedModel:
        """Raises the store's and the model's typed errors; a failed load leaves nothing pinned or in memory."""
        damaged = set[str]()
        while True:
            try:
                return await self._load(prepare, progress, held)
            except DataLossError as error:
                # A damaged file is gone, so that the next try makes it anew: once. A tensor that cannot be read was
                # packed a moment ago, and is not any more.
                if error.reason not in (PACKED_DAMAGED, "UNREADABLE_TENSOR") or error.message in damaged:
                    raise
                damaged.add(error.message)
                log.warning("packed_file_damaged", deployment=prepare.deployment, why=error.message)

    async def _load(self, prepare: PrepareStage, progress: LoadProgress, held: Sequence[HeldWeights]) -> LoadedModel:
        began, layers = time.monotonic(), prepare.placed.layers
        reuse = [item.weights for item in held]
        fetched = await self._fetch(prepare, layers, reuse, progress)
        try:
            guides = await asyncio.to_thread(_guides, layers, fetched)
            model = await self._worker.run(self._load_stage, prepare, fetched, reuse, guides, progress)
            self._check_size(prepare, fetched, layers, model.parameter_bytes)
            fetched.keep_packed(model.weights.packed_files)
            for_head = await _for_head(model.shape, layers, fetched, held)
        except BaseException:
            fetched.pin.release()
            raise
        return LoadedModel(model_key(prepare), model, for_head, fetched.pin, time.monotonic() - began)

    async def load_standby(
        self,
        command: KeepStandby,
        layers: LayerRange,
        progress: LoadProgress,
        held: Sequence[HeldWeights] = (),
    ) -> HeldWeights:
        """As `load`, but without memory for keys and values; cancelled, it stops at the next tensor."""
        began = time.monotonic()
        reuse = [item.weights for item in held]
        fetched = await self._fetch(command, layers, reuse, progress)
        try:
            weights = await self._aside.run(partial(self._load_weights, command, layers, fetched, reuse, progress))
            self._check_size(command, fetched, layers, weights.parameter_bytes)
            fetched.keep_packed(weights.packed_files)
            for_head = await _for_head(weights.shape, layers, fetched, held)
        except BaseException:
            fetched.pin.release()
            raise
        return HeldWeights(weights_key(command), weights, for_head, fetched.pin, time.monotonic() - began)

    async def _fetch(
        self,
        command: PrepareStage | KeepStandby,
        layers: LayerRange,
        reuse: Sequence[StageWeights],
        progress: LoadProgress,
    ) -> _Fetched:
        """What is neither in memory nor packed, in the cache and pinned."""
        digest, quantisation = command.manifest_digest, quantisation_of(command)
        manifest = await self._fetcher.manifest(digest)
        tensors = stage_tensors(manifest, layers)
        there = frozenset[int]().union(*(weights.shareable(layers) for weights in reuse))
        shape = parse_config(manifest.config)
        wanted = [t for t in tensors if unit_of(shape.architecture, t.name, manifest.config) not in there]
        budget = command.placed.weight_budget_bytes if isinstance(command, PrepareStage) else 0
        packing, packed = None, frozenset[str]()
        if self._packs or budget:
            packing = Packing(self._cache.packed, digest, budget or None, writes=self._packs)
            form = UnitForm(digest, command.spec.dtype, quantisation, shape)
            units = tensors_of_units(manifest.config, layers, quantisation)
            lacking = [names for unit, names in units.items() if not self._cache.packed.has(form.name(unit))]
            needed = frozenset[str]().union(*lacking)
            packed = frozenset(t.name for t in wanted if canonical_name(shape.architecture, t.name) not in needed)
        at_end = layers.first == 0 or layers.end == shape.layer_count
        files = [file for file in manifest.files if file.name in _HEAD_FILES] if at_end else []
        for file in files:  # of a model that an older version added
            check_file_size(file.name, file.size)
        if packing is not None and packing.budget is not None:
            files += [file for file in manifest.files if file.name == EXPERT_TABLE]
        fetched = [tensor for tensor in wanted if tensor.name not in packed]
        pin = await self._fetcher.fetch([*fetched, *files], progress.fetched)
        if packing is not None and fetched:
            size = held_bytes(manifest.config, fetched, layers, command.spec.dtype, quantisation)
            await self._cache.allow_packed(size + size // 16)  # rows are padded, and files have headers
        result = _Fetched(manifest, tensors, tuple(wanted), files, pin, packing)
        if packing is not None and EXPERT_TABLE in result.paths:
            values = await asyncio.to_thread(_expert_table, result.paths[EXPERT_TABLE])
            result = replace(result, packing=replace(packing, expert_table=values))
        return result

    def _load_stage(
        self,
        prepare: PrepareStage,
        fetched: _Fetched,
        reuse: Sequence[StageWeights],
        guides: Guides | None,
        progress: LoadProgress,
    ) -> StageModel:
        return StageModel.load(
            CachedTensorSource(fetched.pin.location, fetched.wanted),
            fetched.manifest.config,
            prepare.placed.layers,
            dtype=prepare.spec.dtype,
            kv_dtype=prepare.spec.effective_kv_dtype,
            kv_blocks=prepare.placement.kv_blocks,
            block_tokens=prepare.placement.kv_block_tokens,
            device=self._device,
            quantisation=quantisation_of(prepare),
            progress=progress.filled,
            idle_spin_s=self._stay_awake_s,
            reuse=reuse,
            guides=guides,
            packing=fetched.packing,
            swap_bytes=prepare.spec.kv_swap_bytes,
            swap_directory=self._cache.directory if prepare.spec.kv_swap_on_disk else None,
        )

    def _load_weights(
        self,
        command: KeepStandby,
        layers: LayerRange,
        fetched: _Fetched,
        reuse: Sequence[StageWeights],
        progress: LoadProgress,
        go_on: Callable[[], None],
    ) -> StageWeights:
        def filled(filling: StageFilling) -> None:
            go_on()
            progress.filled(filling)

        check_weights(parse_config(fetched.manifest.config), self._device, quantisation_of(command))
        return StageWeights.load(
            CachedTensorSource(fetched.pin.location, fetched.wanted),
            fetched.manifest.config,
            layers,
            dtype=command.spec.dtype,
            device=self._device,
            quantisation=quantisation_of(command),
            progress=filled,
            reuse=reuse,
            packing=fetched.packing,
        )

    @staticmethod
    def _check_size(command: PrepareStage | KeepStandby, fetched: _Fetched, layers: LayerRange, size: int) -> None:
        config, dtype = fetched.manifest.config, command.spec.dtype
        expected = held_bytes(config, fetched.tensors, layers, dtype, quantisation_of(command))
        if size != expected:
            raise InternalError(f"layers {layers} hold {size} parameter bytes, their manifest {expected}")


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A stage's tensors, and those of them that are to be loaded, whose blobs are pinned with the head's files."""

    manifest: ModelManifest
    tensors: tuple[TensorInfo, ...]
    wanted: tuple[TensorInfo, ...]
    files: list[FileInfo]
    pin: Pin
    packing: Packing | None = None

    def keep_packed(self, names: Sequence[str]) -> None:
        """Hold the packed files that the weights came from or went to, instead of the blobs of their tensors."""
        if names:
            files = {file.sha256 for file in self.files}
            self.pin.keep_packed(names, {tensor.sha256 for tensor in self.wanted} - files)

    @property
    def paths(self) -> dict[str, Path]:
        """Of the head's files, by their names."""
        return {file.name: self.pin.location(file.sha256).path for file in self.files}


async def _for_head(
    shape: ModelShape, layers: LayerRange, fetched: _Fetched, held: Sequence[HeldWeights]
) -> ForHead | None:
    """For layers that begin the model."""
    if layers.first:
        return None
    known = next((item.for_head for item in held if item.for_head is not None), None)
    if known is not None:
        return known
    paths, tokenizer = fetched.paths, None
    if TOKENIZER in paths:  # many megabytes of JSON
        tokenizer = await asyncio.to_thread(Tokenizer.load, paths[TOKENIZER])
    eos_tokens = await asyncio.to_thread(_eos_tokens, shape, paths.get(GENERATION))
    return ForHead(tokenizer, eos_tokens)


def _expert_table(path: Path) -> dict[str, list[Any]]:
    return expert_table_of(parse_json_object(path.read_text(encoding="utf-8"), EXPERT_TABLE))


def _guides(layers: LayerRange, fetched: _Fetched) -> Guides | None:
    """For layers that end the model, where it has a tokenizer."""
    shape, paths = parse_config(fetched.manifest.config), fetched.paths
    if layers.end < shape.layer_count or TOKENIZER not in paths:
        return None
    eos_tokens = tuple(sorted(_eos_tokens(shape, paths.get(GENERATION))))
    return Guides(Setup(str(paths[TOKENIZER]), shape.vocab_size, eos_tokens))


def _eos_tokens(shape: ModelShape, generation_config: Path | None) -> frozenset[int]:
    """End-of-sequence ids of generation_config.json where there are any, of config.json otherwise."""
    if generation_config is not None:
        try:
            found = eos_tokens_of(parse_json_object(generation_config.read_text(encoding="utf-8"), GENERATION))
            if found is not None:
                return found
        except (OSError, ValueError, InvalidArgumentError) as error:
            raise DataLossError(
                f"generation_config.json cannot be read: {error}", field="generation_config.json"
            ) from None
    return frozenset(shape.eos_tokens)
