"""From a prepare command to weights in memory: fetch what the stage needs, no more, and load it off the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import structlog

from edgeshard.architectures import ModelShape, held_bytes, parse_config, stage_tensors, unit_of
from edgeshard.domain.commands import KeepStandby, PrepareStage
from edgeshard.domain.errors import DataLossError, InternalError, InvalidArgumentError
from edgeshard.domain.ids import Digest
from edgeshard.domain.model import FileInfo, LayerRange, ModelManifest, TensorInfo
from edgeshard.storage.checkpoint import check_file_size
from edgeshard.storage.forms import GENERATION, TOKENIZER, eos_tokens_of, parse_json_object
from edgeshard_agent.engine.aside import AsideThread
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.engine.worker import ComputeThread
from edgeshard_agent.guides.guides import Guides
from edgeshard_agent.guides.messages import Setup
from edgeshard_agent.hosting.around import ForHead, HeldWeights, LoadedModel, model_key, quantisation_of, weights_key
from edgeshard_agent.model.cached_source import CachedTensorSource
from edgeshard_agent.model.stage import StageModel, check_weights
from edgeshard_agent.model.weights import StageWeights
from edgeshard_agent.store.cache import BlobCache, Pin
from edgeshard_agent.store.fetcher import Fetcher

log = structlog.get_logger()

# Of the head; the last stage has them for guides, also where none comes: some megabytes beside its weights.
_HEAD_FILES = (TOKENIZER, GENERATION)


class StageLoader:
    """Loads stages through the box's cache; the coordinator is asked only for what the cache lacks.

    `aside` has a thread for standbys, so that they do not hold up the steps of this box.
    """

    def __init__(
        self,
        cache: BlobCache,
        store: grpc.aio.Channel,
        worker: ComputeThread,
        aside: AsideThread,
        device: str,
        idle_spin_s: float,
    ) -> None:
        self._fetcher = Fetcher(cache, store)
        self._worker = worker
        self._aside = aside
        self._device = device
        self._stay_awake_s = idle_spin_s

    async def load(
        self, prepare: PrepareStage, progress: Callable[[int, int], None], held: Sequence[HeldWeights] = ()
    ) -> LoadedModel:
        """Raises the store's and the model's typed errors; a failed load leaves nothing pinned or in memory."""
        began, layers = time.monotonic(), prepare.placed.layers
        reuse = [item.weights for item in held]
        fetched = await self._fetch(prepare.manifest_digest, layers, reuse, progress)
        try:
            guides = await asyncio.to_thread(_guides, layers, fetched)
            model = await self._worker.run(self._load_stage, prepare, fetched, reuse, guides)
            self._check_size(prepare, fetched, layers, model.parameter_bytes)
            for_head = await _for_head(model.shape, layers, fetched, held)
        except BaseException:
            fetched.pin.release()
            raise
        return LoadedModel(model_key(prepare), model, for_head, fetched.pin, time.monotonic() - began)

    async def load_standby(
        self,
        command: KeepStandby,
        layers: LayerRange,
        progress: Callable[[int, int], None],
        held: Sequence[HeldWeights] = (),
    ) -> HeldWeights:
        """As `load`, but without memory for keys and values; cancelled, it stops at the next tensor."""
        began = time.monotonic()
        reuse = [item.weights for item in held]
        fetched = await self._fetch(command.manifest_digest, layers, reuse, progress)
        try:
            weights = await self._aside.run(partial(self._load_weights, command, layers, fetched, reuse))
            self._check_size(command, fetched, layers, weights.parameter_bytes)
            for_head = await _for_head(weights.shape, layers, fetched, held)
        except BaseException:
            fetched.pin.release()
            raise
        return HeldWeights(weights_key(command), weights, for_head, fetched.pin, time.monotonic() - began)

    async def _fetch(
        self, digest: Digest, layers: LayerRange, reuse: Sequence[StageWeights], progress: Callable[[int, int], None]
    ) -> _Fetched:
        """What is not in memory yet, in the cache and pinned."""
        manifest = await self._fetcher.manifest(digest)
        tensors = stage_tensors(manifest, layers)
        there = frozenset[int]().union(*(weights.shareable(layers) for weights in reuse))
        shape = parse_config(manifest.config)
        wanted = [t for t in tensors if unit_of(shape.architecture, t.name, manifest.config) not in there]
        at_end = layers.first == 0 or layers.end == shape.layer_count
        files = [file for file in manifest.files if file.name in _HEAD_FILES] if at_end else []
        for file in files:  # of a model that an older version added
            check_file_size(file.name, file.size)
        pin = await self._fetcher.fetch([*wanted, *files], progress)
        return _Fetched(manifest, tensors, tuple(wanted), files, pin)

    def _load_stage(
        self,
        prepare: PrepareStage,
        fetched: _Fetched,
        reuse: Sequence[StageWeights],
        guides: Guides | None,
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
            idle_spin_s=self._stay_awake_s,
            reuse=reuse,
            guides=guides,
        )

    def _load_weights(
        self,
        command: KeepStandby,
        layers: LayerRange,
        fetched: _Fetched,
        reuse: Sequence[StageWeights],
        go_on: Callable[[int], None],
    ) -> StageWeights:
        check_weights(parse_config(fetched.manifest.config), self._device, quantisation_of(command))
        return StageWeights.load(
            CachedTensorSource(fetched.pin.location, fetched.wanted),
            fetched.manifest.config,
            layers,
            dtype=command.spec.dtype,
            device=self._device,
            quantisation=quantisation_of(command),
            progress=go_on,
            reuse=reuse,
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
