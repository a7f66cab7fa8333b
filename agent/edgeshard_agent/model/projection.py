"""Matrices that take nearly all of a stage's memory and time: filled part by part, then packed for
the kernels.

If a checkpoint has several matrices with one input (q, k and v; gate and up), they are one matrix
here, read in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from edgeshard.domain.errors import InternalError
from edgeshard.domain.models.dtypes import IntegerFormat
from edgeshard_agent.ops import huge_pages
from edgeshard_agent.ops.block_formats import BlockWeight, Weight, joined
from edgeshard_agent.ops.linear import PackedLinear
from edgeshard_agent.ops.quantize import QuantizedWeight, Scheme

_CPU_SCHEMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Integers:
    """The form of a packed matrix: small integers, and how many consecutive inputs of a row share a
    scale."""

    format: IntegerFormat
    group: int


Forms = Mapping[str, Integers]
"""The forms of matrices by the names of their tensors; one that is absent keeps the dtype."""


_MLP_PARTS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


def mlp_forms(forms: Forms, path: str) -> Forms:
    """The forms of the MLP at this path by the parts of tensor names, as in
    `path.down_proj.weight`."""
    names = {part: f"{path}.{part}.weight" for part in _MLP_PARTS}
    return {part: forms[name] for part, name in names.items() if name in forms}


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of a checkpoint's tensor, or of some of its rows, in a projection: its path, and a
    first row."""

    path: str
    first_row: int = 0
    begin: int = 0
    end: int | None = None

    def of(self, value: Weight) -> Weight:
        """The rows of the tensor that go there."""
        rows = slice(self.begin, self.end)
        return value[rows] if isinstance(value, torch.Tensor) else value.rows(rows)


def _passing_memory(shape: torch.Size, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory of its own for a tensor that will be packed.

    On the CPU it comes straight from the system and returns to it at once. The allocator keeps
    memory that is freed between smaller tensors: for a model in float32, half of the weights' size.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return huge_pages.mapped(shape, dtype)


def whole(value: Weight) -> torch.Tensor:
    """The numbers that integers and their scales stand for, in float32, as they are stored in whole
    groups."""
    return value if isinstance(value, torch.Tensor) else value.dequantize()


class Projection(nn.Module):
    """y = x W^T + b, W [rows, columns] made of parts one under the other; packed as `integers` if
    given.

    The memory is taken when the first part arrives; when the last one has, the whole is packed and
    `weight` is gone. Parts that arrive as integers are packed unchanged if all of them fit
    `integers`. On the CPU a row of y depends only on its row of x, bit for bit. Elsewhere, and for
    float16, torch multiplies.
    """

    def __init__(
        self,
        parts: Sequence[int],
        columns: int,
        *,
        bias: bool = False,
        integers: Integers | None = None,
    ) -> None:
        super().__init__()
        self.rows = rows = sum(parts)
        self.columns = columns
        self.weight: torch.Tensor | None = nn.Parameter(
            torch.empty(rows, columns, device="meta"), requires_grad=False
        )
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, device="meta"), requires_grad=False)
        self._integers = integers
        self._awaited = rows * (2 if bias else 1)
        self.packed: PackedLinear | None = None
        """The packed weight; None while it is filled, and if torch computes the product."""
        self._stored: dict[int, QuantizedWeight | BlockWeight] = {}
        self.dtype = torch.float32
        """The dtype of the parameters that were packed."""

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight without its bias; 0 while it is still a parameter."""
        return 0 if self.packed is None else self.matrix_bytes(self.dtype.itemsize)

    def matrix_bytes(self, itemsize: int) -> int:
        """Bytes of the matrix once it is packed, for a dtype of this size; filled or not."""
        if self._integers is not None:
            return self._integers.format.matrix_bytes(self.rows, self.columns, self._integers.group)
        return self.rows * self.columns * itemsize

    def adopt(self, packed: PackedLinear, dtype: torch.dtype) -> None:
        """Use a matrix that is packed already, from parameters of this dtype; the bias is there."""
        self.weight = None
        self.dtype = dtype
        self.packed = packed
        self._awaited = 0

    def adopt_plain(self) -> None:
        """The parameters were given their memory by others; torch multiplies."""
        self._awaited = 0

    def row_vectors(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows [T, columns] of W by their indices [T]: how an embedding looks tokens up. Integers
        become float32."""
        if self.packed is not None:
            return self.packed.rows(indices)
        assert self.weight is not None
        return embedding(indices, self.weight)

    def fill(
        self, kind: str, first_row: int, value: Weight, dtype: torch.dtype, device: str
    ) -> None:
        """Copy `value` to the rows from `first_row` on; `kind` is "weight" or "bias"."""
        if not isinstance(value, torch.Tensor) and self._fits(value, device):
            self._stored[first_row] = value
            self._arrived(value.shape[0], dtype, device)
            return
        numbers = whole(value)
        self._copy(kind, first_row, numbers, dtype, device)
        self._arrived(len(numbers), dtype, device)

    def _fits(self, value: QuantizedWeight | BlockWeight, device: str) -> bool:
        integers = self._integers
        if integers is None or torch.device(device).type != "cpu":
            return False
        if isinstance(value, BlockWeight):
            return value.format is integers.format
        if value.group != integers.group or integers.format.layout is not None:
            return False
        return Scheme(integers.format) in (Scheme.INT8, value.scheme)

    def _copy(
        self, kind: str, first_row: int, value: torch.Tensor, dtype: torch.dtype, device: str
    ) -> None:
        parameter = self.get_parameter(kind)
        if parameter.is_meta:
            memory = _passing_memory(parameter.shape, dtype, device)
            parameter = nn.Parameter(memory, requires_grad=False)
            setattr(self, kind, parameter)
        parameter.data[first_row : first_row + len(value)].copy_(value)

    def _arrived(self, rows: int, dtype: torch.dtype, device: str) -> None:
        self._awaited -= rows
        if self._awaited:
            return
        if self._stored and sum(part.shape[0] for part in self._stored.values()) == self.rows:
            self._pack_stored(dtype)
            return
        for first_row, part in self._stored.items():  # mixed with parts that are no integers
            self._copy("weight", first_row, part.dequantize(), dtype, device)
        self._stored = {}
        self.pack()

    def _pack_stored(self, dtype: torch.dtype) -> None:
        assert self._integers is not None
        parts = [self._stored[first] for first in sorted(self._stored)]
        self._stored = {}
        if self._integers.format.layout is not None:
            self.pack_blocks(
                joined([part for part in parts if isinstance(part, BlockWeight)]), dtype
            )
            return
        rounded = [part for part in parts if isinstance(part, QuantizedWeight)]
        values = torch.cat([part.values for part in rounded])
        scales = torch.cat([part.scales for part in rounded])
        whole_weight = QuantizedWeight(
            values, scales, self._integers.group, Scheme(self._integers.format)
        )
        bias = None if self.bias is None else self.bias.data.float()
        self.weight, self.dtype = None, dtype
        self.packed = PackedLinear.pack_stored(whole_weight, self._integers.format, bias)

    @property
    def block_format(self) -> IntegerFormat | None:
        """The block format in which it is packed; None if it has another form."""
        form = None if self._integers is None else self._integers.format
        return None if form is None or form.layout is None else form

    def pack_blocks(self, weight: BlockWeight, dtype: torch.dtype) -> None:
        """Give all of its rows, in blocks, to the kernels; the bias is there. `dtype` is the
        stage's dtype."""
        bias = None if self.bias is None else self.bias.data.float()
        self.weight = None
        self.dtype = dtype
        self._awaited = 0
        self.packed = PackedLinear.pack_blocks(weight, bias)

    def pack(self) -> None:
        """Give the filled parameters to the kernels, if there are any for this device and dtype."""
        weight, bias = self.weight, self.bias
        assert weight is not None
        integers = self._integers
        if self.block_format is not None:
            raise InternalError(
                f"received unquantised values for a matrix that is stored as {self.block_format}"
            )
        scheme = _CPU_SCHEMES.get(weight.dtype) if integers is None else integers.format
        if weight.device.type != "cpu" or scheme is None:
            return
        self.weight = None
        self.dtype = weight.dtype
        group = None if integers is None else integers.group
        self.packed = PackedLinear.pack(
            weight.data, scheme, None if bias is None else bias.data, group
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, rows] from [T, columns], in x's dtype."""
        if self.packed is not None:
            # rows of integer matrices, which the kernels take in float32
            if x.dtype is torch.float16:
                return self.packed(x.float()).half()
            return self.packed(x)
        assert self.weight is not None
        return linear(x, self.weight, self.bias)


class JoinedProjection(nn.Module):
    """The same for parts of different forms: neighbours of the same form are one `Projection`.

    Each row of y has the bits that it has in a `Projection` of its own part.
    """

    def __init__(
        self,
        parts: Sequence[int],
        columns: int,
        *,
        bias: bool = False,
        integers: Sequence[Integers | None],
    ) -> None:
        super().__init__()
        self.rows = sum(parts)
        self.columns = columns
        self.parts = nn.ModuleList()
        self._first_rows: list[int] = []
        self._packed: PackedLinear | None = None
        first_row = 0
        for form, run in groupby(zip(parts, integers, strict=True), lambda part: part[1]):
            sizes = [size for size, _ in run]
            self._first_rows.append(first_row)
            self.parts.append(Projection(sizes, columns, bias=bias, integers=form))
            first_row += sum(sizes)

    @property
    def _placed(self) -> list[tuple[int, Projection]]:
        """The parts, each with its first row."""
        parts: list[Any] = list(self.parts)
        return list(zip(self._first_rows, parts, strict=True))

    @property
    def packed(self) -> PackedLinear | None:
        """The packed weights as a list, each linked to the next; None if native kernels lack
        one."""
        if self._packed is not None:
            return self._packed
        packed = [part.packed for _, part in self._placed]
        native = [part for part in packed if part is not None and part.native_address is not None]
        if len(native) < len(packed):
            return None
        for part, following in pairwise(native):
            part.continue_with(following)
        self._packed = native[0]
        return self._packed

    def fill(
        self, kind: str, first_row: int, value: Weight, dtype: torch.dtype, device: str
    ) -> None:
        """Fill the part that has these rows; `value` has rows of one part only."""
        first, part = next(item for item in reversed(self._placed) if item[0] <= first_row)
        part.fill(kind, first_row - first, value, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, rows] from [T, columns], in x's dtype."""
        if self.packed is not None:
            return self.packed(x.float()).half() if x.dtype is torch.float16 else self.packed(x)
        return torch.cat([part(x) for _, part in self._placed], dim=-1)


Matrix = Projection | JoinedProjection


def projection(
    parts: Sequence[int], columns: int, *, bias: bool = False, integers: Sequence[Integers | None]
) -> Matrix:
    """y = x W^T + b for W made of parts one under the other, each in the form that `integers` has
    for it."""
    first = integers[0]
    if all(form == first for form in integers):
        return Projection(parts, columns, bias=bias, integers=first)
    return JoinedProjection(parts, columns, bias=bias, integers=integers)
