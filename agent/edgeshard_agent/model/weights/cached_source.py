"""Tensors straight from the blob cache's files."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import torch

from edgeshard.domain.errors import DataLossError, NotFoundError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import STORED_GROUP, IntegerFormat
from edgeshard.domain.models.model import TensorInfo
from edgeshard.storage.locations import CHANGED_SINCE_ADDED, BlobLocation, open_location, read_into
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.ops.block_formats import BlockWeight, Weight
from edgeshard_agent.ops.quantize import QuantizedWeight, Scheme

_PIECE_BYTES = 1 << 20
"""So that it is still in the processor's cache when it is hashed."""


class CachedTensorSource:
    """A TensorSource over fetched blobs: `location_of` returns the place of the blob of a digest,
    as `Pin.location` does.

    A tensor with a file of its own shares its pages. The pin keeps that file while the tensor is in
    use; its contents were verified when it was fetched. A tensor in a linked file, or in a file
    with others, is read and compared with its sha256. Another owner of that file may write to it at
    any time.
    """

    def __init__(
        self, location_of: Callable[[Digest], BlobLocation], tensors: Iterable[TensorInfo]
    ) -> None:
        self._location_of = location_of
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> Weight:
        """The tensor on the CPU as it is stored. Raises DataLossError naming it."""
        info = self._tensors.get(name)
        if info is None:
            raise DataLossError(
                f"tensor {name} is not in the checkpoint", field=name, reason="MISSING_TENSOR"
            )
        dtype = TORCH_DTYPES[info.dtype]
        if info.element_count == 0:
            return torch.empty(info.shape, dtype=dtype)
        try:
            location = self._location_of(info.sha256)
            if location.size != info.stored_bytes:
                raise _wrong_size(info, location.size)
            with open_location(location) as file:
                data = (
                    _mapped(file) if _has_own_file(location, file) else _read(file, location, info)
                )
        except (OSError, ValueError, NotFoundError) as error:
            raise DataLossError(
                f"tensor {name} cannot be read from the cache: {error}",
                field=name,
                reason="UNREADABLE_TENSOR",
            ) from None
        if len(data) != info.stored_bytes:
            raise _wrong_size(info, len(data))
        if info.integers is not None:
            return from_blocks(torch.frombuffer(data, dtype=torch.uint8), info.shape, info.integers)
        return torch.frombuffer(data, dtype=dtype).view(info.shape)


def from_blocks(
    data: torch.Tensor, shape: tuple[int, ...], integers: IntegerFormat
) -> QuantizedWeight | BlockWeight:
    """A matrix [rows, columns] from the bytes of its blocks
    (`IntegerFormat.stored_block_bytes`)."""
    if integers.layout is not None:
        return BlockWeight.of(data, shape, integers)
    rows, columns = shape
    blocks = data.view(rows, columns // STORED_GROUP, integers.stored_block_bytes)
    scales = blocks[..., :2].contiguous().view(torch.float16).view(rows, -1)
    packed = blocks[..., 2:]
    if integers is IntegerFormat.INT8:
        values = packed.contiguous().view(torch.int8)
    else:
        values = torch.cat((packed & 15, packed >> 4), dim=-1).view(torch.int8) - 8
    return QuantizedWeight(values.view(shape), scales, STORED_GROUP, Scheme(integers))


def _wrong_size(info: TensorInfo, size: int) -> DataLossError:
    return DataLossError(
        f"the cached file of tensor {info.name} has {size} bytes, not {info.stored_bytes}",
        field=info.name,
        reason="TRUNCATED",
    )


def _has_own_file(location: BlobLocation, file: BinaryIO) -> bool:
    """Whether this blob is all of the file, and only this process may write to it."""
    if location.is_linked or location.order is not None or location.offset:
        return False
    return os.fstat(file.fileno()).st_size == location.size


def _mapped(file: BinaryIO) -> mmap.mmap:
    # The file is open for reading only and never changes; a write to the tensor would go to a
    # private copy of the page. A plainly read-only mapping would turn such a write into a crash of
    # the process.
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _read(file: BinaryIO, location: BlobLocation, info: TensorInfo) -> memoryview:
    """Raises DataLossError if the bytes do not match the tensor."""
    data = memoryview(bytearray(location.size))
    sha256 = hashlib.sha256()
    done = 0
    # Each piece is hashed while the next one is read: neither holds the interpreter.
    with ThreadPoolExecutor(1, "hash-weights") as hashing:
        while done < len(data):
            count = read_into(file, location, done, data[done : done + _PIECE_BYTES])
            if not count:
                break
            hashing.submit(sha256.update, data[done : done + count])
            done += count
    if done == len(data) and sha256.hexdigest() != info.sha256:
        raise DataLossError(
            f"tensor {info.name} is not as it was added: somebody has written to "
            f"{location.source or location.path}; "
            "add the model again from files that stay as they are",
            field=info.name,
            reason=CHANGED_SINCE_ADDED,
        )
    return data[:done]
