"""The bytes of a stage's units for packed files, and modules that use bytes which are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from edgeshard.domain.errors import DataLossError
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.ops.huge_pages import HUGE_PAGE, SMALL_WEIGHTS, mapped
from edgeshard_agent.ops.linear import PackedForm, PackedLinear
from edgeshard_agent.ops.native import crc32c
from edgeshard_agent.store.packed_files import (
    PackedEntry,
    PackedFile,
    UnitBytes,
    checksum,
    laid_out,
)

SMALL_TENSOR_BYTES = 64 << 10
"""Plain tensors up to this size stay in memory if a unit is streamed, as biases do."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """A unit of a stage: its modules, each with what begins its entries' names; those below
    `without` are not in it."""

    name: str
    parts: tuple[tuple[str, nn.Module], ...]
    without: str = ""

    def projections(self) -> Iterator[tuple[str, Projection]]:
        """The matrices, by entry name."""
        for prefix, part in self.parts:
            for path, module in part.named_modules():
                name = _joined(prefix, path)
                if isinstance(module, Projection) and not self._is_left_out(name):
                    yield name, module

    def tensors(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """All that is no packed matrix: (entry name, owner, its attribute, tensor)."""
        for prefix, part in self.parts:
            for path, module in part.named_modules():
                stored = module._buffers.keys() - module._non_persistent_buffers_set
                for leaf in (*module._parameters, *sorted(stored)):
                    tensor, name = getattr(module, leaf), _joined(prefix, path, leaf)
                    if tensor is not None and not self._is_left_out(name):
                        yield name, module, leaf, tensor

    def _is_left_out(self, name: str) -> bool:
        return bool(self.without) and name.startswith(self.without)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def unit_bytes(unit: ModelUnit) -> UnitBytes | None:
    """The bytes of a filled unit; None if one of its matrices is not packed for native kernels.

    The large pieces are views of the modules' memory, with what aligns them between.
    """
    small: list[tuple[PackedEntry, torch.Tensor]] = []
    large: list[tuple[PackedEntry, torch.Tensor]] = []
    for name, projection in unit.projections():
        packed = projection.packed
        if packed is None:
            if projection.weight is None or projection.weight.dtype is not torch.float16:
                return None
            continue  # torch multiplies it: a plain tensor
        form, memory = packed.form, packed.packed_memory
        if form is None or memory is None:
            return None
        shape, dtype = (form.out_features, form.in_features), _dtype_name(projection.dtype)
        entry = PackedEntry(
            name, 0, memory.numel(), shape, dtype, form.scheme, form.group, form.half_scales
        )
        large.append((entry, memory))
    for name, _, _, tensor in unit.tensors():
        data = tensor.detach()
        entry = PackedEntry(name, 0, data.nbytes, tuple(data.shape), _dtype_name(data.dtype))
        (small if data.nbytes <= SMALL_TENSOR_BYTES else large).append((entry, data.contiguous()))
    offsets, small_end = laid_out([entry.size for entry, _ in small], _ALIGNMENT)
    head = bytearray(-(-small_end // 4096) * 4096)
    entries = []
    for (entry, data), offset in zip(small, offsets, strict=True):
        head[offset : offset + entry.size] = _raw(data)
        entries.append(replace(entry, offset=offset))
    offsets, end = laid_out([entry.size for entry, _ in large], _ALIGNMENT)
    pieces: list[memoryview] = []
    written = 0
    for (entry, data), offset in zip(large, offsets, strict=True):
        pieces += [memoryview(bytes(offset - written)), _raw(data)]
        written = offset + entry.size
        entries.append(replace(entry, offset=len(head) + offset))
    return UnitBytes(tuple(entries), bytes(head), tuple(pieces), end)


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DataLossError(
            f"packed tensors of dtype {name!r} are unknown", field="packed", reason="PACKED_DAMAGED"
        )
    return dtype


def unit_memory(size: int) -> torch.Tensor:
    """Memory for `size` bytes of a unit, aligned to whole blocks; in huge pages of its own if there
    are any."""
    return (
        mapped((size,), torch.uint8)
        if size >= HUGE_PAGE
        else SMALL_WEIGHTS.take((size,), torch.uint8, 4096)
    )


def unit_checksum(data: memoryview) -> int:
    """CRC32C, by the processor's instruction if it has one."""
    crc = crc32c(data)
    return checksum(data) if crc is None else crc


class AdoptedUnit:
    """A unit whose modules read bytes as a packed file has them: wherever its large tensors are
    placed."""

    def __init__(self, unit: ModelUnit, file: PackedFile, small: torch.Tensor) -> None:
        """`small` has the data of the file's small tensors. Raises DataLossError if the file
        belongs to another unit.
        """
        self.file = file
        self._matrices: list[tuple[PackedLinear, int, int]] = []
        self._tensors: list[tuple[nn.Module, str, PackedEntry, int]] = []
        entries = {entry.name: entry for entry in file.header.entries}
        formed = {name for name, entry in entries.items() if entry.scheme}
        matrices = [(name, projection) for name, projection in unit.projections() if name in formed]
        packed = {id(projection) for _, projection in matrices}
        for name, owner, leaf, tensor in list(unit.tensors()):
            if leaf == "weight" and id(owner) in packed:
                continue
            entry = entries.pop(name, None)
            if entry is None or entry.scheme or tuple(tensor.shape) != entry.shape:
                raise _other_unit(file, name)
            self._adopt_tensor(owner, leaf, entry, small)
        for name, projection in matrices:
            self._adopt_matrix(name, projection, entries.pop(name))
        if entries:
            raise _other_unit(file, next(iter(entries)))

    def _adopt_tensor(
        self, owner: nn.Module, leaf: str, entry: PackedEntry, small: torch.Tensor
    ) -> None:
        offset = entry.offset - self.file.header.small_bytes
        if offset >= 0:
            self._tensors.append((owner, leaf, entry, offset))
        else:
            _set(owner, leaf, _viewed(small, entry.offset, entry))
        if isinstance(owner, Projection) and leaf == "weight":
            owner.adopt_plain()

    def _adopt_matrix(self, name: str, projection: Projection, entry: PackedEntry) -> None:
        rows, columns = projection.rows, projection.columns
        form = PackedForm(entry.scheme, entry.group, rows, columns, entry.half_scales)
        if entry.shape != (rows, columns) or form.size != entry.size:
            raise _other_unit(self.file, name)
        bias = None if projection.bias is None else projection.bias.data.float()
        if bias is not None:
            bias = pad(bias, (0, form.padded_rows - rows))
        packed = PackedLinear.adopt(form, None, bias)
        projection.adopt(packed, _dtype(entry.dtype))
        self._matrices.append((packed, entry.offset - self.file.header.small_bytes, entry.size))

    @property
    def large_bytes(self) -> int:
        return self.file.header.large_bytes

    def place(self, memory: torch.Tensor | None) -> None:
        """Use the large tensors' data in `memory`, [large_bytes] uint8; None: they are in no memory
        now."""
        for packed, offset, size in self._matrices:
            packed.place(None if memory is None else memory[offset : offset + size])
        for owner, leaf, entry, offset in self._tensors:
            if memory is None:
                _set(
                    owner, leaf, torch.empty(entry.shape, dtype=_dtype(entry.dtype), device="meta")
                )
            else:
                _set(owner, leaf, _viewed(memory, offset, entry))


def _viewed(memory: torch.Tensor, offset: int, entry: PackedEntry) -> torch.Tensor:
    return memory[offset : offset + entry.size].view(_dtype(entry.dtype)).view(entry.shape)


def _set(owner: nn.Module, leaf: str, data: torch.Tensor) -> None:
    value: Any = data if leaf in owner._buffers else nn.Parameter(data, requires_grad=False)
    setattr(owner, leaf, value)


def _other_unit(file: PackedFile, name: str) -> DataLossError:
    return DataLossError(
        f"packed file {file.path.name} does not fit {name}; it is made again",
        field="packed",
        reason="PACKED_DAMAGED",
    )
