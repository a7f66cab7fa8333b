"""Matrices that take nearly all of a stage's memory and time: filled part by part, then packed for the kernels.

What a checkpoint keeps as several matrices with one input (q, k and v; gate and up) is one matrix here, read in one go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from edgeshard.domain.dtypes import IntegerFormat
from edgeshard_agent.ops import PackedLinear, huge_pages

_CPU_SCHEMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def _passing_memory(shape: torch.Size, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory of its own for a tensor that will be packed.

    On the CPU straight from the system, which has it back at once: what the allocator is given back in between smaller
    tensors it keeps, and of a model in float32 that came to half of its weights again.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return huge_pages.mapped(shape, dtype)


class Projection(nn.Module):
    """y = x W^T + b, W [rows, columns] made of parts one under the other; packed as `integers` where given.

    The memory is taken when the first part arrives; when the last one has, the whole is packed and `weight` is gone.
    On the CPU a row of y depends on its row of x alone, bit for bit. Elsewhere, and for float16, torch multiplies.
    """

    def __init__(
        self, parts: Sequence[int], columns: int, *, bias: bool = False, integers: IntegerFormat | None = None
    ) -> None:
        super().__init__()
        self.rows = rows = sum(parts)
        self.columns = columns
        self.weight: torch.Tensor | None = nn.Parameter(torch.empty(rows, columns, device="meta"), requires_grad=False)
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, device="meta"), requires_grad=False)
        self._integers = integers
        self._awaited = rows * (2 if bias else 1)
        self._packed: PackedLinear | None = None
        self._dtype = torch.float32

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight without its bias; 0 while it is still a parameter."""
        if self._packed is None:
            return 0
        if self._integers is not None:
            return self._integers.matrix_bytes(self.rows, self.columns)
        return self.rows * self.columns * self._dtype.itemsize

    @property
    def packed(self) -> PackedLinear | None:
        """The packed weight; None while it is filled, and where the product is torch's."""
        return self._packed

    def row_vectors(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows [T, columns] of W by their indices [T]: how a head that is the embedding too looks tokens up."""
        if self._packed is not None:
            return self._packed.rows(indices)
        assert self.weight is not None
        return embedding(indices, self.weight)

    def fill(self, kind: str, first_row: int, value: torch.Tensor, dtype: torch.dtype, device: str) -> None:
        """Copy `value` to the rows from `first_row` on; `kind` is "weight" or "bias"."""
        parameter = self.get_parameter(kind)
        if parameter.is_meta:
            memory = _passing_memory(parameter.shape, dtype, device)
            parameter = nn.Parameter(memory, requires_grad=False)
            setattr(self, kind, parameter)
        parameter.data[first_row : first_row + len(value)].copy_(value)
        self._awaited -= len(value)
        if self._awaited == 0:
            self.pack()

    def pack(self) -> None:
        """Give the filled parameters to the kernels, where there are any for this device and dtype."""
        weight, bias = self.weight, self.bias
        assert weight is not None
        scheme = self._integers or _CPU_SCHEMES.get(weight.dtype)
        if weight.device.type != "cpu" or scheme is None:
            return
        self.weight = None
        self._dtype = weight.dtype
        group = None if self._integers is None else self._integers.group
        self._packed = PackedLinear.pack(weight.data, scheme, None if bias is None else bias.data, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, rows] from [T, columns]."""
        if self._packed is not None:
            return self._packed(x)
        assert self.weight is not None
        return linear(x, self.weight, self.bias)
