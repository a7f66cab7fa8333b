"""The part of the model store that the coordinator's services need, and what they say of a model that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from edgeshard.architectures import parse_config
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import Digest
from edgeshard.domain.model import ModelManifest
from edgeshard.domain.site import ServedModel
from edgeshard_coordinator.core.state import DeploymentRecord


class Models(Protocol):
    def get(self, name_or_digest: str) -> tuple[ModelManifest, Digest]:
        """Raises NotFoundError naming `model`."""
        ...

    def list(self) -> tuple[tuple[ModelManifest, Digest], ...]: ...

    def file_path(self, digest: Digest) -> Path:
        """Where a small file of a model lies."""
        ...

    def delete(self, name: str) -> None:
        """Blocking; raises NotFoundError."""
        ...


def served_model(record: DeploymentRecord, models: Models) -> ServedModel:
    """A deployment as applications see it."""
    return ServedModel(record.name, record.model, max_context(record, models), record.spec.max_new_tokens)


def max_context(record: DeploymentRecord, models: Models) -> int:
    """Positions that one request to a deployment may have; 0 where nobody can tell."""
    if record.spec.max_context:
        return record.spec.max_context
    try:
        manifest, _ = models.get(record.manifest_digest)
    except EdgeShardError:
        return 0  # Its manifest is damaged; the boxes still serve what they loaded.
    return parse_config(manifest.config).max_context
