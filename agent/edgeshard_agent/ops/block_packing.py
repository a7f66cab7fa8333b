"""Block formats in the order the native kernels read them (`Linear` in kernels.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from edgeshard.domain.models.dtypes import IntegerFormat
from edgeshard_agent.ops.block_formats import (
    BlockWeight,
    codes_of_iq4_xs,
    layout_of,
    levels,
    nibbles,
    scales_and_minima,
    scales_of_iq4_xs,
    values_of_q5_k,
    values_of_q6_k,
)
from edgeshard_agent.ops.huge_pages import WEIGHTS
from edgeshard_agent.ops.packing import PANEL
from edgeshard_agent.ops.quantize import ELEMENTS_AT_ONCE

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
