"""What a model's tensors weigh once a box has loaded them, whole or as small integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from edgeshard.architectures.config import ModelShape, parse_config
from edgeshard.architectures.tensors import HEAD_WEIGHT, canonical_name
from edgeshard.dtypes import DType, Quantisation
from edgeshard.errors import UnsupportedModelError
from edgeshard.model import TensorInfo

_NEVER = frozenset({"gpt2", "opt"})
"""Architectures whose layers are not ours, and so keep their weights as they are."""
_ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")


def check_quantisation(architecture: str) -> None:
    """Raise UnsupportedModelError for an architecture whose weights cannot be made small integers."""
    if architecture in _NEVER:
        raise UnsupportedModelError(
            f"quantisation: {architecture} runs with whole weights only; remove quantisation",
            field="quantisation",
            reason="UNSUPPORTED_QUANTISATION",
        )


def is_quantised(shape: ModelShape, name: str, dimensions: int) -> bool:
    """Whether a tensor, by canonical name, becomes integers: matrices of the blocks, and an LM head of its own.

    Embeddings are looked up row by row and keep the dtype, and with them a head that is tied to one. Routers of experts
    are small and decide much.
    """
    if dimensions != 2 or shape.architecture in _NEVER or name.endswith(_ROUTERS):
        return False
    return name.startswith("layers.") or (name == HEAD_WEIGHT and not shape.tied)


def tensor_bytes(shape: ModelShape, tensor: TensorInfo, dtype: DType, quantisation: Quantisation | None) -> int:
    """Bytes of a tensor that a stage holds."""
    name = canonical_name(shape.architecture, tensor.name)
    if quantisation is not None and is_quantised(shape, name, len(tensor.shape)):
        rows, columns = tensor.shape
        return quantisation.matrix_bytes(rows, columns)
    return math.prod(tensor.shape) * dtype.itemsize


def held_bytes(
    config: Mapping[str, Any], tensors: Iterable[TensorInfo], dtype: DType, quantisation: Quantisation | None = None
) -> int:
    """Bytes of a stage's tensors once loaded."""
    shape = parse_config(config)
    return sum(tensor_bytes(shape, tensor, dtype, quantisation) for tensor in tensors)
