"""The part of the model store that the coordinator's services need."""

from __future__ import annotations

from typing import Protocol

from edgeshard.domain.ids import Digest
from edgeshard.domain.model import ModelManifest


class Models(Protocol):
    def get(self, name_or_digest: str) -> tuple[ModelManifest, Digest]:
        """Raises NotFoundError naming `model`."""
        ...

    def list(self) -> tuple[tuple[ModelManifest, Digest], ...]: ...

    def delete(self, name: str) -> None:
        """Blocking; raises NotFoundError."""
        ...
