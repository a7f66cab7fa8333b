"""Matrices in block formats: their bytes in the store and packed for the kernels.

A row is whole blocks, each of `BlockLayout.inputs` consecutive inputs. block_numbers.py has their
numbers, kernels.h the packed layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from edgeshard.domain.models.dtypes import BlockLayout, IntegerFormat
from edgeshard_agent.ops.block_numbers import (
    DECODERS,
    codes_of_iq4_xs,
    grid_of,
    levels,
    nibbles,
    scales_and_minima,
    scales_of_bytes,
    scales_of_iq4_xs,
    values_of_q5_k,
    values_of_q6_k,
)
from edgeshard_agent.ops.huge_pages import WEIGHTS
from edgeshard_agent.ops.packing import PANEL
from edgeshard_agent.ops.quantize import ELEMENTS_AT_ONCE, QuantizedWeight


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix [rows, columns]: `data` [rows, bytes of a row] uint8, of blocks of `format`."""

    data: torch.Tensor
    format: IntegerFormat
    columns: int

    @classmethod
    def of(cls, data: torch.Tensor, shape: tuple[int, ...], kind: IntegerFormat) -> BlockWeight:
        """The matrix of this shape in `data`, uint8."""
        rows, columns = shape
        return cls(data.view(rows, -1), kind, columns)

    @classmethod
    def random(cls, rows: int, columns: int, kind: IntegerFormat) -> BlockWeight:
        """A matrix of random integers with small scales, the same each time."""
        layout = layout_of(kind)
        generator = torch.Generator().manual_seed(7)
        blocks = torch.randint(
            0, 256, (rows * columns // layout.inputs, layout.stored_bytes), generator=generator
        )
        blocks = blocks.to(torch.uint8)
        for first, modest in _MODEST.get(kind, _FIRST_FACTOR):
            blocks[:, first : first + len(modest)] = torch.tensor(list(modest), dtype=torch.uint8)
        return cls(blocks.view(rows, -1), kind, columns)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.columns

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, selection: slice | torch.Tensor) -> BlockWeight:
        """Some of its rows."""
        return BlockWeight(self.data[selection], self.format, self.columns)

    def dequantize(self) -> torch.Tensor:
        """[rows, columns] float32."""
        layout = layout_of(self.format)
        blocks = self.data.reshape(-1, layout.stored_bytes)
        return DECODERS[self.format](blocks).view(len(self.data), self.columns)


Weight = torch.Tensor | QuantizedWeight | BlockWeight
"""A tensor as a checkpoint has it."""


def layout_of(kind: IntegerFormat) -> BlockLayout:
    """The sizes of a block format."""
    layout = kind.layout
    assert layout is not None
    return layout


def joined(parts: list[BlockWeight]) -> BlockWeight:
    """Matrices of one format and width, one under the other."""
    first = parts[0]
    return BlockWeight(torch.cat([part.data for part in parts]), first.format, first.columns)


_MODEST = {
    **dict.fromkeys(("q4_k", "q5_k"), ((0, b"\0\4\0\4"),)),
    "q6_k": ((208, b"\0\4"),),
    "q2_k": ((80, b"\0\4\0\4"),),
    "q3_k": ((108, b"\0\4"),),
    **dict.fromkeys(("q4_1", "q5_1"), ((0, b"\0\4\0\4"),)),
    "iq1_m": ((49, b"\0"), (51, b"\0"), (53, b"\x40"), (55, b"\0")),
    "tq1_0": ((52, b"\0\4"),),
    "tq2_0": ((64, b"\0\4"),),
    "mxfp4": ((0, b"\x70"),),
    "nvfp4": ((0, b"\1\2\3\4"),),
    "int4_zeros": ((0, b"\0\4\x08"),),
}
"""Bytes that make the numbers of a random block small, with their places: most set a float16 factor
to 2^-14."""
_FIRST_FACTOR = ((0, b"\0\4"),)


_CHUNK_BYTES = 4 * PANEL
_BLOCK = 256
_RUN = 32


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """The parts of a packed block: groups of so many inputs, and the bits of a weight above the low
    four."""

    group: int
    high_bits: int
    has_minima: bool
    has_levels: bool = False
    """Its weights are places in `LEVELS`."""

    @property
    def factors_bytes(self) -> int:
        return 2 * PANEL * (1 + self.has_minima)

    @property
    def group_bytes(self) -> int:
        return _CHUNK_BYTES * (self.group // 8 + (self.high_bits > 0))

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales and minima of `_RUN` inputs."""
        return PANEL * (_RUN // self.group + self.has_minima)

    @property
    def run_bytes(self) -> int:
        """Bytes of `_RUN` inputs."""
        return self.scales_bytes + self.group_bytes * (_RUN // self.group)

    @property
    def block_bytes(self) -> int:
        return self.factors_bytes + _BLOCK // _RUN * self.run_bytes


_PANELS = {
    IntegerFormat.Q4_K: PackedBlocks(32, 0, True),
    IntegerFormat.Q5_K: PackedBlocks(32, 1, True),
    IntegerFormat.Q6_K: PackedBlocks(16, 2, False),
    IntegerFormat.IQ4_XS: PackedBlocks(32, 0, False, has_levels=True),
}
"""The formats that are taken apart for the kernels."""

_UNITS: Mapping[IntegerFormat, tuple[tuple[int, int], ...]] = {
    IntegerFormat.Q2_K: ((20, 4), (2, 2)),
    IntegerFormat.Q3_K: ((27, 4), (1, 2)),
    IntegerFormat.Q4_1: ((2, 2), (4, 4)),
    IntegerFormat.Q5_0: ((1, 2), (5, 4)),
    IntegerFormat.Q5_1: ((2, 2), (5, 4)),
    IntegerFormat.IQ4_NL: ((1, 2), (4, 4)),
    IntegerFormat.IQ3_S: ((1, 2), (27, 4)),
    IntegerFormat.IQ3_XXS: ((1, 2), (24, 4)),
    IntegerFormat.IQ2_S: ((1, 2), (20, 4)),
    IntegerFormat.IQ2_XS: ((1, 2), (18, 4)),
    IntegerFormat.IQ2_XXS: ((1, 2), (16, 4)),
    IntegerFormat.IQ1_S: ((1, 2), (12, 4)),
    IntegerFormat.IQ1_M: ((14, 4),),
    IntegerFormat.TQ1_0: ((13, 4), (1, 2)),
    IntegerFormat.TQ2_0: ((16, 4), (1, 2)),
    IntegerFormat.MXFP4: ((1, 1), (4, 4)),
    IntegerFormat.NVFP4: ((9, 4),),
    IntegerFormat.Q1_0: ((1, 2), (4, 4)),
    IntegerFormat.Q2_0: ((1, 2), (4, 4)),
    IntegerFormat.INT4_ZEROS: ((1, 2), (1, 1), (4, 4)),
}
"""The formats that the kernels read as they are stored: the units of a block in order, how many of
how many bytes.

A unit of 32 rows lies together.
"""


@cache
def _table(kind: IntegerFormat) -> torch.Tensor | None:
    """What the kernels look up for a format: scales by their byte, or vectors of a grid; None if it
    needs no table."""
    if kind in (IntegerFormat.MXFP4, IntegerFormat.NVFP4):
        return scales_of_bytes(kind)
    if not kind.startswith(("iq1", "iq2", "iq3")):
        return None
    vectors = grid_of(kind)
    if kind.startswith("iq1"):
        vectors = 8 * (vectors + 1)
    return vectors.to(torch.uint8)


def table_address(kind: IntegerFormat) -> int | None:
    """The address of what the kernels look up for a format, which stays; None if it needs no
    table."""
    table = _table(kind)
    return None if table is None else table.data_ptr()


class _Parts(NamedTuple):
    """Blocks [n] taken apart: factors [n, 1 or 2, 2], scales [n, groups, 1 or 2] and values [n,
    256], all uint8."""

    factors: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def _parts(blocks: torch.Tensor, kind: IntegerFormat) -> _Parts:
    if kind is IntegerFormat.Q6_K:
        return _Parts(blocks[:, None, 208:], blocks[:, 192:208, None], values_of_q6_k(blocks))
    if kind is IntegerFormat.IQ4_XS:
        scales = scales_of_iq4_xs(blocks) - 32
        return _Parts(blocks[:, None, :2], scales.unsqueeze(-1), codes_of_iq4_xs(blocks).flatten(1))
    values = (
        nibbles(blocks[:, 16:].contiguous())
        if kind is IntegerFormat.Q4_K
        else values_of_q5_k(blocks)
    )
    scales = torch.stack(scales_and_minima(blocks[:, 4:16]), -1)
    return _Parts(blocks[:, :4].unflatten(1, (2, 2)), scales, values.flatten(1))


def pack_blocks(weight: BlockWeight) -> torch.Tensor:
    """The bytes of a matrix for the kernels, uint8; some panels are packed at a time."""
    if weight.format in _UNITS:
        return _pack_units(weight)
    form, layout = _PANELS[weight.format], layout_of(weight.format)
    rows, columns = weight.shape
    panels, blocks = -(-rows // PANEL), columns // _BLOCK
    packed = WEIGHTS.take((panels, blocks, form.block_bytes), torch.uint8)
    at_once = max(1, ELEMENTS_AT_ONCE // (PANEL * columns))
    for first in range(0, panels, at_once):
        data = weight.data[first * PANEL : (first + at_once) * PANEL]
        data = pad(data, (0, 0, 0, -len(data) % PANEL))
        parts = _parts(data.reshape(-1, layout.stored_bytes), weight.format)
        _pack_panels(form, parts, packed[first : first + at_once])
    return packed.view(-1)


def _pack_units(weight: BlockWeight) -> torch.Tensor:
    """The same for the formats of `_UNITS`."""
    layout = layout_of(weight.format)
    panels, blocks = -(-len(weight.data) // PANEL), weight.columns // layout.inputs
    packed = WEIGHTS.take((panels, blocks, PANEL * layout.stored_bytes), torch.uint8)
    at_once = max(1, ELEMENTS_AT_ONCE // (PANEL * weight.columns))
    for first in range(0, panels, at_once):
        data = weight.data[first * PANEL : (first + at_once) * PANEL]
        data = pad(data, (0, 0, 0, -len(data) % PANEL))
        stored = data.view(-1, PANEL, blocks, layout.stored_bytes)
        place = 0
        for count, size in _UNITS[weight.format]:
            units = stored[..., place : place + count * size].unflatten(-1, (count, size))
            interleaved = units.permute(0, 2, 3, 1, 4).flatten(2)
            packed[first : first + at_once, :, PANEL * place : PANEL * (place + count * size)] = (
                interleaved
            )
            place += count * size
    return packed.view(-1)


def _rows_of_units(
    packed: torch.Tensor, kind: IntegerFormat, columns: int, indices: torch.Tensor
) -> BlockWeight:
    """Rows of what `_pack_units` packed, by their indices [n]."""
    layout = layout_of(kind)
    panel = indices // PANEL
    row = indices % PANEL
    panels = packed.view(-1, columns // layout.inputs, PANEL * layout.stored_bytes)
    parts, place = [], 0
    for count, size in _UNITS[kind]:
        units = panels[..., PANEL * place : PANEL * (place + count * size)].unflatten(
            -1, (count, PANEL, size)
        )
        parts.append(units[panel, :, :, row].flatten(2))
        place += count * size
    return BlockWeight(torch.cat(parts, -1).flatten(1), kind, columns)


def _pack_panels(form: PackedBlocks, parts: _Parts, packed: torch.Tensor) -> None:
    """Write panels [P, blocks, bytes] from parts of P * 32 rows of blocks."""
    panels, blocks = packed.shape[:2]
    factors = parts.factors.unflatten(0, (panels, PANEL, blocks)).permute(0, 2, 3, 1, 4)
    scales = parts.scales.unflatten(0, (panels, PANEL, blocks)).permute(0, 2, 3, 4, 1)
    values = parts.values.view(panels, PANEL, blocks, -1, form.group).permute(0, 2, 3, 4, 1)
    eights = (values & 15).unflatten(3, (-1, 2, 4))  # [P, blocks, groups, chunks, 2, 4, 32]
    low = (eights[:, :, :, :, 0] | (eights[:, :, :, :, 1] << 4)).transpose(-1, -2).flatten(3)
    chunks = [low]
    if form.high_bits:
        fours = (values >> 4).unflatten(3, (-1, 4))  # [P, blocks, groups, quarters, 4, 32]
        shifts = torch.arange(fours.shape[3], dtype=torch.uint8).mul(form.high_bits).view(-1, 1, 1)
        high = (fours << shifts).sum(3, dtype=torch.uint8).transpose(-1, -2)
        chunks.append(high.flatten(3))
    runs = _BLOCK // _RUN
    weights = torch.cat(chunks, -1).flatten(2).unflatten(2, (runs, -1))
    packed[..., : form.factors_bytes] = factors.flatten(2)
    packed[..., form.factors_bytes :] = torch.cat(
        (scales.flatten(2).unflatten(2, (runs, -1)), weights), -1
    ).flatten(2)


def block_rows(
    packed: torch.Tensor, kind: IntegerFormat, columns: int, indices: torch.Tensor
) -> torch.Tensor:
    """Rows [n, columns] float32 of what `pack_blocks` packed, by their indices [n]."""
    if kind in _UNITS:
        return _rows_of_units(packed, kind, columns, indices).dequantize()
    form, count = _PANELS[kind], len(indices)
    panels = packed.view(-1, columns // _BLOCK, form.block_bytes)
    panel, row = indices // PANEL, indices % PANEL
    pairs = panels[..., : form.factors_bytes].unflatten(-1, (-1, PANEL, 2))[panel, :, :, row]
    factors = pairs.contiguous().view(torch.float16).float()  # [n, blocks, 1 or 2, 1]
    runs = panels[..., form.factors_bytes :].unflatten(-1, (_BLOCK // _RUN, form.run_bytes))
    # [n, blocks, runs, 1 or 2]
    scales = runs[..., : form.scales_bytes].unflatten(-1, (-1, PANEL))[panel, :, :, :, row]
    scales = scales if form.has_minima else scales.flatten(2).unsqueeze(-1)
    chunks = runs[..., form.scales_bytes :].unflatten(-1, (_RUN // form.group, -1, PANEL, 4))[
        panel, :, :, :, :, row
    ]
    groups = chunks.flatten(2, 3)  # [n, blocks, groups, chunks, 4]
    low = groups[:, :, :, : form.group // 8]
    values = torch.stack((low & 15, low >> 4), -2).view(*groups.shape[:3], form.group)
    if form.high_bits:
        shifts = torch.arange(form.group // 4, dtype=torch.uint8).mul(form.high_bits).view(-1, 1)
        high = (groups[:, :, :, -1:] >> shifts) & ((1 << form.high_bits) - 1)
        values = values | (high.flatten(3) << 4)
    if form.has_minima:
        numbers = (factors[:, :, :1] * scales[..., :1].float()) * values.float()
        numbers = numbers - factors[:, :, 1:] * scales[..., 1:].float()
    else:
        signed = scales.contiguous().view(torch.int8).float()
        whole = levels(values) if form.has_levels else (values.to(torch.int8) - 32).float()
        numbers = (factors * signed) * whole
    rows: torch.Tensor = numbers.reshape(count, columns)
    return rows
