"""What the coordinator says of its models."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.dtypes import DType
from edgeshard.ids import DeploymentName, Digest, ModelName


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the coordinator's store. `stored_bytes` is its size there; `max_context` is in tokens."""

    name: ModelName
    manifest_digest: Digest
    architecture: str
    layer_count: int
    parameter_count: int
    stored_bytes: int
    dtype: DType
    max_context: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A deployment that answers requests. `max_context` is prompt and new tokens together."""

    deployment: DeploymentName
    model: ModelName
    max_context: int
