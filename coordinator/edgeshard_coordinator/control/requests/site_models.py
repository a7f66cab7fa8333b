"""The part of the model store that the coordinator's services need, and views of stored and served
models."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from edgeshard.architectures import parse_config
from edgeshard.domain.control.site import ServedModel, StoredModel, WeightsFile
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import ModelManifest
from edgeshard_coordinator.core.values.state import DeploymentRecord


class Models(Protocol):
    def get(self, name_or_digest: str) -> tuple[ModelManifest, Digest]:
        """Raises NotFoundError naming `model`."""

    def list(self) -> tuple[tuple[ModelManifest, Digest], ...]: ...

    def added_at(self, digest: Digest) -> float:
        """When the model was added, in seconds since 1970. Raises OSError for one that is not
        there."""

    def weights_files(self, manifest: ModelManifest) -> tuple[WeightsFile, ...]:
        """The files outside of the store that have weights of a model."""

    def file_path(self, digest: Digest) -> Path:
        """The path of a small file of a model."""

    def delete(self, name: str) -> None:
        """Blocking; raises NotFoundError."""


def served_model(record: DeploymentRecord, models: Models) -> ServedModel:
    """A deployment as applications see it."""
    context = max_context(record, models)
    return ServedModel(
        record.served_name, record.model, context, record.spec.most_new_tokens(context)
    )


def max_context(record: DeploymentRecord, models: Models) -> int:
    """Positions that one request to a deployment may have; 0 if that is unknown."""
    if record.spec.max_context:
        return record.spec.max_context
    try:
        manifest, _ = models.get(record.manifest_digest)
    except EdgeShardError:
        return 0  # Its manifest is damaged; the nodes still serve what they loaded.
    return parse_config(manifest.config).max_context


def stored_model(
    manifest: ModelManifest, digest: Digest, weights_files: tuple[WeightsFile, ...] = ()
) -> StoredModel:
    """A model as operators see it."""
    shape = parse_config(manifest.config)
    return StoredModel(
        name=manifest.name,
        manifest_digest=digest,
        architecture=manifest.architecture,
        layer_count=shape.layer_count,
        parameter_count=manifest.parameter_count,
        stored_bytes=manifest.stored_bytes,
        dtype=_main_dtype(manifest),
        max_context=shape.max_context,
        further=manifest.further,
        weights_files=weights_files,
    )


def _main_dtype(manifest: ModelManifest) -> DType:
    """The type most of the elements have; a checkpoint may keep a few tensors wider."""
    totals = dict.fromkeys(DType, 0)
    for tensor in manifest.tensors:
        totals[tensor.dtype] += tensor.element_count
    return max(totals, key=lambda dtype: totals[dtype])
