"""From a prepare command to weights in memory: fetch what the stage needs, no more, and load it off the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog

from edgeshard.architectures import ModelShape, held_bytes, stage_tensors
from edgeshard.domain.commands import PrepareStage
from edgeshard.domain.errors import DataLossError, InternalError
from edgeshard.domain.model import ModelManifest, TensorInfo
from edgeshard.storage.checkpoint import check_file_size
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.engine.worker import ComputeThread
from edgeshard_agent.hosting.around import LoadedModel, model_key, quantisation_of
from edgeshard_agent.model.cached_source import CachedTensorSource
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.store.cache import BlobCache, Pin
from edgeshard_agent.store.fetcher import Fetcher

log = structlog.get_logger()

_HEAD_FILES = ("tokenizer.json", "generation_config.json")


class StageLoader:
    """Loads stages through the box's cache; the coordinator is asked only for what the cache lacks."""

    def __init__(
        self, cache: BlobCache, store: grpc.aio.Channel, worker: ComputeThread, device: str, idle_spin_s: float
    ) -> None:
        self._fetcher = Fetcher(cache, store)
        self._worker = worker
        self._device = device
        self._stay_awake_s = idle_spin_s

    async def load(self, prepare: PrepareStage, progress: Callable[[int, int], None]) -> LoadedModel:
        """Raises the store's and the model's typed errors; a failed load leaves nothing pinned or in memory."""
        manifest = await self._fetcher.manifest(prepare.manifest_digest)
        tensors = stage_tensors(manifest, prepare.placed.layers)
        files = [file for file in manifest.files if file.name in _HEAD_FILES] if prepare.stage == 0 else []
        for file in files:  # of a model that an older version added
            check_file_size(file.name, file.size)
        pin = await self._fetcher.fetch([*tensors, *files], progress)
        try:
            paths = {file.name: pin.path(file.sha256) for file in files}
            model = await self._worker.run(self._load_weights, prepare, manifest, tensors, pin)
            layers, spec = prepare.placed.layers, prepare.spec
            expected = held_bytes(manifest.config, tensors, layers, spec.dtype, quantisation_of(prepare))
            if model.parameter_bytes != expected:
                raise InternalError(
                    f"stage {prepare.stage} holds {model.parameter_bytes} parameter bytes, its manifest {expected}"
                )
            tokenizer = None
            if "tokenizer.json" in paths:  # many megabytes of JSON
                tokenizer = await asyncio.to_thread(Tokenizer.load, paths["tokenizer.json"])
            eos_tokens = await asyncio.to_thread(_eos_tokens, model.shape, paths.get("generation_config.json"))
        except BaseException:
            pin.release()
            raise
        return LoadedModel(model_key(prepare), model, tokenizer, eos_tokens, pin)

    def _load_weights(
        self, prepare: PrepareStage, manifest: ModelManifest, tensors: tuple[TensorInfo, ...], pin: Pin
    ) -> StageModel:
        return StageModel.load(
            CachedTensorSource(pin.path, tensors),
            manifest.config,
            prepare.placed.layers,
            dtype=prepare.spec.dtype,
            kv_dtype=prepare.spec.effective_kv_dtype,
            kv_blocks=prepare.placement.kv_blocks,
            block_tokens=prepare.placement.kv_block_tokens,
            device=self._device,
            quantisation=quantisation_of(prepare),
            idle_spin_s=self._stay_awake_s,
        )


def _eos_tokens(shape: ModelShape, generation_config: Path | None) -> frozenset[int]:
    """End-of-sequence ids of generation_config.json where there are any, of config.json otherwise."""
    if generation_config is not None:
        try:
            found = json.loads(generation_config.read_text(encoding="utf-8")).get("eos_token_id")
            if isinstance(found, int):
                return frozenset({found})
            if isinstance(found, list) and found:
                return frozenset(int(token) for token in found)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataLossError(
                f"generation_config.json cannot be read: {error}", field="generation_config.json"
            ) from None
    return frozenset(shape.eos_tokens)
