"""What a model's tensors weigh once a box has loaded them, whole or as small integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from edgeshard.architectures.config import parse_config
from edgeshard.architectures.registry import architecture_named
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.tensors import HEAD_WEIGHT, canonical_name, name_in_block
from edgeshard.domain.dtypes import DType, Quantisation
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.model import TensorInfo


def check_quantisation(architecture: str) -> None:
    """Raise UnsupportedModelError for an architecture whose weights cannot be made small integers."""
    if not architecture_named(architecture).quantises:
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
    record = architecture_named(shape.architecture)
    if name == HEAD_WEIGHT:
        return record.quantises and not shape.tied
    return name.startswith(f"{record.block_list}.") and record.is_quantised(name_in_block(name), dimensions)


def keeps_float32(shape: ModelShape, name: str) -> bool:
    """Whether a tensor, by canonical name, keeps full precision in any dtype."""
    record = architecture_named(shape.architecture)
    return name.startswith(f"{record.block_list}.") and record.keeps_float32(name_in_block(name))


def tensor_bytes(shape: ModelShape, tensor: TensorInfo, dtype: DType, quantisation: Quantisation | None) -> int:
    """Bytes of a tensor that a stage holds."""
    name = canonical_name(shape.architecture, tensor.name)
    if keeps_float32(shape, name):
        dtype = DType.FLOAT32
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
