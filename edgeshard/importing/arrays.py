"""Tensors of a safetensors file as numpy arrays, in any type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeshard.domain.errors import DataLossError
from edgeshard.importing.blocks import Floats, from_bfloat16
from edgeshard.storage.checkpoint import StoredTensor
from edgeshard.storage.model_directory import open_regular

_PLAIN = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


def read_array(tensor: StoredTensor) -> NDArray[Any]:
    """The tensor's numbers, of its shape. Floats are read as float32, integers as they are, F8_E8M0 as bytes.

    Raises DataLossError naming the tensor where its file ends too early.
    """
    with open_regular(tensor.file) as file:
        file.seek(tensor.offset)
        data = file.read(tensor.size)
    if len(data) != tensor.size:
        raise DataLossError(f"{tensor.file.name} ends before the end of {tensor.name}", field=tensor.name)
    kind = tensor.stored_dtype
    if kind == "BF16":
        return from_bfloat16(np.frombuffer(data, "<u2")).reshape(tensor.shape)
    if kind == "F8_E4M3":
        return _E4M3[np.frombuffer(data, np.uint8)].reshape(tensor.shape)
    if kind == "F8_E5M2":  # the upper half of a float16
        halves = np.frombuffer(data, np.uint8).astype(np.uint16) << 8
        return halves.view(np.float16).astype(np.float32).reshape(tensor.shape)
    numbers = np.frombuffer(data, _PLAIN.get(kind, "u1")).reshape(tensor.shape)
    return numbers.astype(np.float32) if kind in ("F16", "F64") else numbers


def _e4m3() -> Floats:
    """The 256 numbers of eight bits with four of exponent and three of fraction, without infinities, by their bits."""
    bits = np.arange(256, dtype=np.int32)
    exponent, fraction = (bits >> 3) & 15, (bits & 7) / 8
    magnitude = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * np.exp2(exponent - 7.0))
    magnitude[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3()
