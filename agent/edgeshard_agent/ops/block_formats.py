"""Matrices in llama.cpp's block formats: their bytes in the store and packed for the kernels, and their numbers.

A row is whole blocks, each of `BlockLayout.inputs` consecutive inputs. Layouts: ggml-common.h of
https://github.com/ggml-org/llama.cpp. Numbers are computed in float32 in the order in which the `gguf` package does it,
so that they are equal bit for bit. kernels.h has the packed layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from edgeshard.domain.models.dtypes import BlockLayout, IntegerFormat
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
        blocks = torch.randint(0, 256, (rows * columns // layout.inputs, layout.stored_bytes), generator=generator)
        blocks = blocks.to(torch.uint8)
        scales = torch.tensor(_RANDOM_SCALE, dtype=torch.float16).view(torch.uint8)
        for first in _SCALES_AT[kind]:
            blocks[:, first : first + 2] = scales
        return cls(blocks.view(rows, -1), kind, columns)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.columns

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, chosen: slice | torch.Tensor) -> BlockWeight:
        """Some of its rows."""
        return BlockWeight(self.data[chosen], self.format, self.columns)

    def dequantize(self) -> torch.Tensor:
        """[rows, columns] float32."""
        layout = layout_of(self.format)
        blocks = self.data.reshape(-1, layout.stored_bytes)
        return _DECODERS[self.format](blocks).view(len(self.data), self.columns)


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


_RANDOM_SCALE = [2.0**-14]


def _half(data: torch.Tensor) -> torch.Tensor:
    """The float16 in two bytes [n, 2], as float32 [n, 1]."""
    return data.contiguous().view(torch.float16).float()


def scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 6-bit scales and minima, both [n, 8] uint8, in the 12 bytes [n, 12] of Q4_K and Q5_K."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), 1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), 1)
    return scales, minima


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The 4-bit values [n, 8, 32] uint8 in 128 bytes [n, 128]: those of two groups share 32 bytes, the lower first."""
    pairs = packed.view(-1, 4, 1, 32)
    return torch.cat((pairs & 15, pairs >> 4), 2).view(-1, 8, 32)


def values_of_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """The 5-bit values [n, 8, 32] uint8 of blocks [n, 176]: the highest bits of group g are bit g of 32 bytes."""
    bits = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = (blocks[:, None, 16:48] >> bits) & 1
    return nibbles(blocks[:, 48:].contiguous()) | (high << 4)


def values_of_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """The 6-bit values [n, 256] uint8 of blocks [n, 210]: halves of 128, in each four quarters of 32."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    return (low | (high << 4)).view(-1, 256)


def _with_minima(blocks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[n, 256] from values [n, 8, 32] and the 16 bytes that begin a block of Q4_K and of Q5_K."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    by_group = (_half(blocks[:, :2]) * scales.float()).unsqueeze(-1)
    taken = (_half(blocks[:, 2:4]) * minima.float()).unsqueeze(-1)
    return (by_group * values.float() - taken).view(-1, 256)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, nibbles(blocks[:, 16:].contiguous()))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, values_of_q5_k(blocks))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    values = values_of_q6_k(blocks).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    by_group = (_half(blocks[:, 208:]) * scales.float()).unsqueeze(-1)
    return (by_group * values.view(-1, 16, 16).float()).view(-1, 256)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values that 4 bits of IQ4_XS stand for."""


def scales_of_iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """The 6-bit scales [n, 8] uint8, 32 too large: their high bits are two bytes, their low ones nibbles of four."""
    high = blocks[:, 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1)
    return low.flatten(1) | ((high.flatten(1) & 3) << 4)


def codes_of_iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """The places in `LEVELS` [n, 8, 32] uint8: 16 bytes for each group, the first half in their low nibbles."""
    pairs = blocks[:, 8:].reshape(-1, 8, 16)
    return torch.cat((pairs & 15, pairs >> 4), -1)


def levels(codes: torch.Tensor) -> torch.Tensor:
    """The values of codes of any shape, float32."""
    return torch.tensor(LEVELS, dtype=torch.float32)[codes.long()]


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    by_group = _half(blocks[:, :2]) * (scales_of_iq4_xs(blocks).to(torch.int8) - 32).float()
    return (by_group.unsqueeze(-1) * levels(codes_of_iq4_xs(blocks))).view(-1, 256)


_DECODERS: Mapping[IntegerFormat, Callable[[torch.Tensor], torch.Tensor]] = {
    IntegerFormat.Q4_K: _q4_k,
    IntegerFormat.Q5_K: _q5_k,
    IntegerFormat.Q6_K: _q6_k,
    IntegerFormat.IQ4_XS: _iq4_xs,
}
"""[n, inputs] float32 from blocks [n, bytes] uint8."""
_SCALES_AT: Mapping[IntegerFormat, tuple[int, ...]] = {
    IntegerFormat.Q4_K: (0, 2),
    IntegerFormat.Q5_K: (0, 2),
    IntegerFormat.Q6_K: (208,),
    IntegerFormat.IQ4_XS: (0,),
}
"""Where the float16 numbers of a block begin."""

_CHUNK_BYTES = 4 * PANEL
_BLOCK = 256
_RUN = 32


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """The parts of a packed block: groups of so many inputs, and the bits of a weight above the low four."""

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


PACKED = {
    IntegerFormat.Q4_K: PackedBlocks(32, 0, True),
    IntegerFormat.Q5_K: PackedBlocks(32, 1, True),
    IntegerFormat.Q6_K: PackedBlocks(16, 2, False),
    IntegerFormat.IQ4_XS: PackedBlocks(32, 0, False, has_levels=True),
}
"""The formats that have kernels."""


class _Parts(NamedTuple):
    """Blocks [n] taken apart: factors [n, 1 or 2, 2], scales [n, groups, 1 or 2] and values [n, 256], all uint8."""

    factors: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def _parts(blocks: torch.Tensor, kind: IntegerFormat) -> _Parts:
    if kind is IntegerFormat.Q6_K:
        return _Parts(blocks[:, None, 208:], blocks[:, 192:208, None], values_of_q6_k(blocks))
    if kind is IntegerFormat.IQ4_XS:
        scales = scales_of_iq4_xs(blocks) - 32
        return _Parts(blocks[:, None, :2], scales.unsqueeze(-1), codes_of_iq4_xs(blocks).flatten(1))
    values = nibbles(blocks[:, 16:].contiguous()) if kind is IntegerFormat.Q4_K else values_of_q5_k(blocks)
    scales = torch.stack(scales_and_minima(blocks[:, 4:16]), -1)
    return _Parts(blocks[:, :4].unflatten(1, (2, 2)), scales, values.flatten(1))


def pack_blocks(weight: BlockWeight) -> torch.Tensor:
    """The bytes of a matrix for the kernels, uint8; some panels are packed at a time."""
    form, layout = PACKED[weight.format], layout_of(weight.format)
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
    packed[..., form.factors_bytes :] = torch.cat((scales.flatten(2).unflatten(2, (runs, -1)), weights), -1).flatten(2)


def block_rows(packed: torch.Tensor, kind: IntegerFormat, columns: int, indices: torch.Tensor) -> torch.Tensor:
    """Rows [n, columns] float32 of what `pack_blocks` packed, by their indices [n]."""
    form, count = PACKED[kind], len(indices)
    panels = packed.view(-1, columns // _BLOCK, form.block_bytes)
    panel, row = indices // PANEL, indices % PANEL
    pairs = panels[..., : form.factors_bytes].unflatten(-1, (-1, PANEL, 2))[panel, :, :, row]
    factors = pairs.contiguous().view(torch.float16).float()  # [n, blocks, 1 or 2, 1]
    runs = panels[..., form.factors_bytes :].unflatten(-1, (_BLOCK // _RUN, form.run_bytes))
    scales = runs[..., : form.scales_bytes].unflatten(-1, (-1, PANEL))[panel, :, :, :, row]  # [n, blocks, runs, 1 or 2]
    scales = scales if form.has_minima else scales.flatten(2).unsqueeze(-1)
    chunks = runs[..., form.scales_bytes :].unflatten(-1, (_RUN // form.group, -1, PANEL, 4))[panel, :, :, :, :, row]
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
    found: torch.Tensor = numbers.reshape(count, columns)
    return found
