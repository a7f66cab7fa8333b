"""The models a site runs: manifests by name and digest, and the blobs they name."""

from __future__ import annotations

from edgeshard_coordinator.store.models import ModelStore
from edgeshard_coordinator.store.servicer import ModelStoreServicer

__all__ = ["ModelStore", "ModelStoreServicer"]
