"""Tensors straight from the blob cache's files."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch

from edgeshard.domain.dtypes import STORED_GROUP, IntegerFormat
from edgeshard.domain.errors import DataLossError
from edgeshard.domain.ids import Digest
from edgeshard.domain.model import TensorInfo
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.ops import QuantizedWeight, Scheme


class CachedTensorSource:
    """A TensorSource over fetched blobs: `path_of` gives the file of a digest, as `Pin.path` does.

    The tensors share their files' pages. The files must stay while a tensor is in use, which the pin sees to; their
    contents were verified when they were fetched.
    """

    def __init__(self, path_of: Callable[[Digest], Path], tensors: Iterable[TensorInfo]) -> None:
        self._path_of = path_of
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> torch.Tensor | QuantizedWeight:
        """The tensor on the CPU as it is stored, mapped from its file. Raises DataLossError naming it."""
        info = self._tensors.get(name)
        if info is None:
            raise DataLossError(f"tensor {name} is not in the checkpoint", field=name, reason="MISSING_TENSOR")
        dtype = TORCH_DTYPES[info.dtype]
        if info.element_count == 0:
            return torch.empty(info.shape, dtype=dtype)
        try:
            with self._path_of(info.sha256).open("rb") as file:
                # The file is open for reading only and never changes; a write to the tensor would go to a private copy
                # of the page. A plainly read-only mapping would turn such a write into a crash of the process.
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise DataLossError(
                f"tensor {name} cannot be read from the cache: {error}", field=name, reason="UNREADABLE_TENSOR"
            ) from None
        if len(mapping) != info.stored_bytes:
            raise DataLossError(
                f"the cached file of tensor {name} has {len(mapping)} bytes, not {info.stored_bytes}",
                field=name,
                reason="TRUNCATED",
            )
        if info.integers is not None:
            return from_blocks(torch.frombuffer(mapping, dtype=torch.uint8), info.shape, info.integers)
        return torch.frombuffer(mapping, dtype=dtype).view(info.shape)


def from_blocks(data: torch.Tensor, shape: tuple[int, ...], integers: IntegerFormat) -> QuantizedWeight:
    """A matrix [rows, columns] from the bytes of its blocks (`IntegerFormat.stored_block_bytes`)."""
    rows, columns = shape
    blocks = data.view(rows, columns // STORED_GROUP, integers.stored_block_bytes)
    scales = blocks[..., :2].contiguous().view(torch.float16).view(rows, -1)
    packed = blocks[..., 2:]
    if integers is IntegerFormat.INT8:
        values = packed.contiguous().view(torch.int8)
    else:
        values = torch.cat((packed & 15, packed >> 4), dim=-1).view(torch.int8) - 8
    return QuantizedWeight(values.view(shape), scales, STORED_GROUP, Scheme(integers))
