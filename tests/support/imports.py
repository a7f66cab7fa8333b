"""Imported models as the agent reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.cached_source import CachedTensorSource
from edgeshard_agent.model.weights.weights import StageWeights
from safetensors.torch import save_file

from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange, ModelManifest
from edgeshard.importing.imported import Imported
from edgeshard.storage.checkpoint import blob_locations, build_manifest

CONTEXT, BLOCK = 512, 16


def nothing(what: str, done: int, total: int) -> None:
    """The progress is ignored."""


def tensors_of(imported: Imported) -> tuple[ModelManifest, CachedTensorSource]:
    """The manifest, as it goes into the store, and its tensors as a node reads them."""
    manifest = build_manifest("imported", imported.checkpoint)
    locations = blob_locations(imported.checkpoint, manifest)
    return manifest, CachedTensorSource(locations.__getitem__, manifest.tensors)


def stage_of(
    manifest: ModelManifest, source: Any, dtype: DType, quantisation: Quantisation | None = None
) -> StageModel:
    """All layers in one stage."""
    return StageModel.with_kv(
        StageWeights.load(
            source,
            manifest.config,
            LayerRange(0, manifest.config["num_hidden_layers"]),
            dtype=dtype,
            device="cpu",
            quantisation=quantisation,
        ),
        KvMemory(dtype, CONTEXT // BLOCK, BLOCK),
    )


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Path:
    """A directory of safetensors."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory
