"""Conversion between torch tensors and raw little-endian bytes."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}

if sys.byteorder != "little":
    raise ImportError("EdgeShard's frames are little-endian; this machine is not")


def hidden_to_bytes(hidden: torch.Tensor) -> bytes:
    """The tensor's elements in row-major order."""
    if hidden.device.type != "cpu" or not hidden.is_contiguous():
        hidden = hidden.to("cpu").contiguous()
    # Not by way of numpy, which has no bfloat16; and each of torch's operators that this would take
    # costs as much as all of it while the caches hold weights.
    return ctypes.string_at(hidden.data_ptr(), hidden.nbytes)


def bytes_to_hidden(
    buffer: bytes | bytearray | memoryview, dtype: DType, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor on the CPU with its own memory, of `shape`, from raw little-endian bytes.

    Raises InvalidArgumentError when the number of bytes does not fit the shape.
    """
    expected = math.prod(shape) * dtype.itemsize
    size = memoryview(buffer).nbytes
    if size != expected or any(length < 0 for length in shape):
        raise InvalidArgumentError(
            f"a {dtype} tensor of shape {list(shape)} takes {expected} bytes, not {size}",
            field="tensor",
        )
    if size == 0:
        return torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype])
    # A bytearray is writable, which torch wants; the copy also frees the frame's buffer for its
    # next use.
    return torch.frombuffer(bytearray(buffer), dtype=TORCH_DTYPES[dtype]).view(tuple(shape))
