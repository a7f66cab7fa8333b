"""Matrices in llama.cpp's block formats: their bytes as they are stored, and the numbers that those stand for.

A row is whole blocks, each of `BlockLayout.inputs` consecutive inputs. Layouts: ggml-common.h of
https://github.com/ggml-org/llama.cpp. Numbers are computed in float32 in the order in which the `gguf` package does it,
so that they are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from edgeshard.domain.models.dtypes import BlockLayout, IntegerFormat
from edgeshard_agent.ops.quantize import QuantizedWeight


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
