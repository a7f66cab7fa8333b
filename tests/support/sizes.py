"""Sizes that tests work out by themselves."""

from __future__ import annotations

from collections.abc import Iterable

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import TensorInfo


def parameter_bytes(tensors: Iterable[TensorInfo], dtype: DType) -> int:
    """Bytes of these tensors once loaded in `dtype`."""
    return sum(tensor.element_count for tensor in tensors) * dtype.itemsize
