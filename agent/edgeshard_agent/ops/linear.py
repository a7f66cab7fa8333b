"""Linear layers with weights packed once for the kernels that read them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from edgeshard.domain.errors import FailedPreconditionError, InternalError, InvalidArgumentError
from edgeshard.domain.models.dtypes import BLOCK_FORMATS, IntegerFormat
from edgeshard_agent.ops import layouts, native, packing
from edgeshard_agent.ops.block_formats import (
    BlockWeight,
    block_rows,
    layout_of,
    pack_blocks,
    table_address,
)
from edgeshard_agent.ops.huge_pages import WEIGHTS
from edgeshard_agent.ops.quantize import (
    DEFAULT_GROUPS,
    GROUPS,
    QuantizedWeight,
    Scheme,
    quantize_activation,
    quantize_weight,
)

_FLOATS = (Scheme.FLOAT32, Scheme.BFLOAT16)
# The numbers of `Scheme` in kernels.h.
_SCHEMES = {Scheme.FLOAT32: 0, Scheme.BFLOAT16: 1, Scheme.INT8: 2, Scheme.INT4: 3, Scheme.INT2: 4}
_SCHEMES |= {Scheme(kind): 5 + place for place, kind in enumerate(BLOCK_FORMATS)}
ROW_GROUP = 32
"""Inputs of a row that are rounded with one scale for matrices in block formats, whatever their own
groups."""
ROW_DTYPES = {
    Scheme.FLOAT32: (torch.float32,),
    Scheme.BFLOAT16: (torch.bfloat16,),
    **{scheme: (torch.float32, torch.bfloat16) for scheme in Scheme if scheme not in _FLOATS},
}
"""Of the rows that each scheme's layers take."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The form of packed bytes: their scheme, how many inputs share a scale (0 for floats), and the
    matrix [out, in]."""

    scheme: str
    group: int
    out_features: int
    in_features: int
    half_scales: bool = False

    @property
    def in_padded(self) -> int:
        return packing.padded_inputs(Scheme.parse(self.scheme), self.group, self.in_features)

    @property
    def panels(self) -> int:
        return -(-self.out_features // packing.PANEL)

    @property
    def padded_rows(self) -> int:
        return self.panels * packing.PANEL

    @property
    def size(self) -> int:
        """Bytes of the packed matrix without its bias."""
        return packing.packed_size(
            Scheme.parse(self.scheme), self.group, self.out_features, self.in_features
        )


class PackedLinear:
    """y = x W^T + b, with W stored as `scheme` says; accumulated in float32.

    A row's result depends on no other row: in the native kernels it is the same, bit for bit, for
    any number of rows. The integer schemes round x too, to 8 bits with a scale
    for each row and group; block formats do it in groups of 32 inputs. Without native kernels these
    do not: their numbers become float32, some rows at a time, which is slow.
    """

    __slots__ = ("_held", "_next", "group", "in_features", "out_features", "scheme")

    def __init__(
        self,
        weight: Tensor | QuantizedWeight | BlockWeight,
        scheme: Scheme,
        bias: Tensor | None,
        group: int,
    ) -> None:
        self.scheme = scheme
        self.group = group
        self._next: PackedLinear | None = None
        self.out_features, self.in_features = weight.shape
        self._held: _NativeWeight | _ReferenceWeight | _BlockReference
        has_kernels = native.native_available()
        if isinstance(weight, BlockWeight) and not has_kernels:
            form = PackedForm(scheme.value, group, *weight.shape)
            memory = WEIGHTS.take((weight.nbytes,), torch.uint8).copy_(weight.data.view(-1))
            self._held = _BlockReference(form, memory, bias)
        elif isinstance(weight, BlockWeight) or has_kernels:
            self._held = _NativeWeight.pack(weight, scheme, bias, group)
        else:
            if scheme.is_quantized and isinstance(weight, Tensor):
                weight = quantize_weight(weight, scheme, group)
            self._held = _ReferenceWeight(weight, scheme, bias, group)

    @classmethod
    def pack(
        cls,
        weight: Tensor | Sequence[Tensor],
        scheme: str,
        bias: Tensor | Sequence[Tensor | None] | None = None,
        group: int | None = None,
    ) -> PackedLinear:
        """Pack a weight [out, in], or several of the same `in`, whose outputs then follow one
        another.

        `bias` is [out], or one (or None) for each weight. `group` is for the integer schemes: how
        many inputs share a scale. The weights may be dropped afterwards. Raises
        InvalidArgumentError for an unknown scheme or group, and for shapes that do not fit.
        """
        parsed_scheme = Scheme.parse(scheme)
        weights = [weight] if isinstance(weight, Tensor) else list(weight)
        biases = [bias] if bias is None or isinstance(bias, Tensor) else list(bias)
        _check_weights(weights)
        size = DEFAULT_GROUPS.get(parsed_scheme, 0) if group is None else group
        if size not in (GROUPS if parsed_scheme.is_quantized else (0,)):
            allowed = (
                f"use one of {GROUPS}"
                if parsed_scheme.is_quantized
                else "only the integer schemes have groups"
            )
            raise InvalidArgumentError(
                f"group is {size} for {parsed_scheme}: {allowed}", field="group"
            )
        joined = (
            weights[0].detach()
            if len(weights) == 1
            else torch.cat([part.detach() for part in weights])
        )
        with _one_thread():
            return cls(joined, parsed_scheme, _joined_bias(weights, biases), size)

    @classmethod
    def pack_stored(
        cls, weight: QuantizedWeight, scheme: str, bias: Tensor | None = None
    ) -> PackedLinear:
        """The same for integers that there are already, of whole groups; nothing is rounded."""
        parsed_scheme = Scheme.parse(scheme)
        if Scheme.INT2 in (parsed_scheme, weight.scheme) or (
            parsed_scheme is not weight.scheme and parsed_scheme is not Scheme.INT8
        ):
            raise InvalidArgumentError(
                f"{weight.scheme} values do not fit {parsed_scheme}", field="scheme"
            )
        with _one_thread():
            return cls(weight, parsed_scheme, bias, weight.group)

    @classmethod
    def pack_blocks(cls, weight: BlockWeight, bias: Tensor | None = None) -> PackedLinear:
        """The same for blocks that there are already; `bias` is [out]."""
        with _one_thread():
            return cls(weight, Scheme(weight.format), bias, layout_of(weight.format).inputs)

    @classmethod
    def adopt(cls, form: PackedForm, memory: Tensor | None, bias: Tensor | None) -> PackedLinear:
        """A layer whose packed bytes are there already: `memory`, of `form.size` bytes aligned to a
        cache line.

        Nothing is copied or computed. Without memory the layer must be `place`d before it is
        called. `bias` is in float32, padded to whole panels. Raises InvalidArgumentError where
        memory or bias do not fit the form, and FailedPreconditionError without native kernels.
        """
        if not native.native_available():
            raise FailedPreconditionError(
                "packed weights need the native kernels, which are missing or switched off"
            )
        layer = cls.__new__(cls)
        layer.scheme = Scheme.parse(form.scheme)
        layer.group = form.group
        layer._next = None
        layer.out_features, layer.in_features = form.out_features, form.in_features
        if bias is not None and (bias.dtype, bias.numel()) != (torch.float32, form.padded_rows):
            raise InvalidArgumentError("bias does not fit the packed matrix", field="bias")
        if memory is not None and (memory.dtype, memory.numel()) != (torch.uint8, form.size):
            raise InvalidArgumentError(
                f"{memory.numel()} bytes are not the {form.size} of a packed matrix", field="memory"
            )
        layer._held = _NativeWeight(form, memory, bias)
        return layer

    def copied(self) -> PackedLinear:
        """The same layer, with its weights in memory of its own."""
        layer = PackedLinear.__new__(PackedLinear)
        layer.scheme = self.scheme
        layer.group = self.group
        layer._next = None
        layer._held = self._held.copied()
        layer.out_features, layer.in_features = self.out_features, self.in_features
        return layer

    @property
    def _native(self) -> _NativeWeight | _BlockReference | None:
        return None if isinstance(self._held, _ReferenceWeight) else self._held

    @property
    def form(self) -> PackedForm | None:
        """The form that `adopt` takes for this layer; None if it is not packed for native
        kernels."""
        return None if self._native is None else self._native.form

    @property
    def packed_memory(self) -> Tensor | None:
        """The packed bytes, uint8; None where the layer has none now."""
        return None if self._native is None else self._native.packed

    def place(self, memory: Tensor | None) -> None:
        """Read the packed bytes from `memory` from now on; None takes them away, and the layer
        cannot be called."""
        assert self._native is not None
        self._native.place(memory)

    @property
    def nbytes(self) -> int:
        """Bytes held: weights, scales and bias, and what pads them. Native kernels read all of them
        in every call."""
        return self._held.nbytes

    @property
    def native_address(self) -> int | None:
        """The address of the kernels' description of this layer; None if it has none, or if rows
        must be padded."""
        return None if self._native is None or self._native.padding else self._native.address

    def continue_with(self, following: PackedLinear) -> None:
        """Compute its outputs too in each call, after these. Both have a `native_address` and the
        same inputs."""
        assert isinstance(self._held, _NativeWeight) and following.native_address is not None
        self._next = following
        self._held.continue_with(following.native_address)

    @property
    def outputs(self) -> int:
        """Outputs of a call: its own, then the outputs of the layers that follow."""
        return self.out_features + (0 if self._next is None else self._next.outputs)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows [n, in] of the weight, by their indices [n]: an embedding is looked up so. Integers
        become float32."""
        return self._held.rows(indices, self.scheme)[:, : self.in_features]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, out] in x's dtype from x [rows, in]; into `out` where given.

        Raises InvalidArgumentError where shape or dtype does not fit: bf16 weights take bfloat16
        rows, fp32 weights float32 ones, and the integer schemes both.
        """
        if (
            x.dim() != 2
            or x.shape[1] != self.in_features
            or x.dtype not in ROW_DTYPES[self.scheme]
            or not x.is_cpu
        ):
            raise InvalidArgumentError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; this {self.scheme} layer takes "
                f"[rows, {self.in_features}] of {' or '.join(map(str, ROW_DTYPES[self.scheme]))} "
                "on the CPU",
                field="x",
            )
        rows = x.shape[0]
        if out is None:
            out = torch.empty((rows, self.outputs), dtype=x.dtype)
        elif out.shape != (rows, self.outputs) or out.dtype is not x.dtype or out.stride(1) != 1:
            raise InvalidArgumentError(
                f"out is {out.dtype} {tuple(out.shape)}; it must be {x.dtype} ({rows}, "
                f"{self.outputs}), each row "
                "contiguous",
                field="out",
            )
        self._held.apply(x, out)
        return out


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let the calling thread compute alone.

    Packing is thousands of operations of some 100 µs. If threads share them, each operation waits
    until the last thread got a core, and the others spin. On a busy machine that takes several
    times as long. torch's number of threads is the caller's, and later threads inherit it; ours set
    their own.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _NativeWeight:
    """A weight in the layout of the native kernels, and the struct that describes it to them."""

    __slots__ = ("_function", "_struct", "address", "bias", "form", "packed", "padding")

    @classmethod
    def pack(
        cls,
        weight: Tensor | QuantizedWeight | BlockWeight,
        scheme: Scheme,
        bias: Tensor | None,
        group: int,
    ) -> _NativeWeight:
        out_features, in_features = weight.shape
        half_scales = isinstance(weight, QuantizedWeight) and weight.scales.dtype is torch.float16
        if isinstance(weight, BlockWeight):
            packed = pack_blocks(weight)
        elif scheme.is_quantized:
            packed = packing.pack_quantized(weight, scheme, group)
        else:
            packed = packing.pack_float(packing.matrix(weight), scheme)
        form = PackedForm(scheme.value, group, out_features, in_features, half_scales)
        padded = None if bias is None else pad(bias.float(), (0, form.padded_rows - out_features))
        return cls(form, packed, padded)

    def __init__(self, form: PackedForm, packed: Tensor | None, bias: Tensor | None) -> None:
        library = native.active()
        assert library is not None
        self._function = library.edgeshard_linear
        self.form = form
        self.packed = packed
        self.bias = bias
        scheme = Scheme.parse(form.scheme)
        is_rounded = scheme.is_quantized or scheme.is_block_format
        # Rows are padded where they are rounded to integers; for floats the caller pads them.
        self.padding = 0 if is_rounded else form.in_padded - form.in_features
        pointers = [None if part is None else part.data_ptr() for part in (packed, bias)]
        sizes = form.in_features, form.in_padded, form.out_features, form.panels
        group = ROW_GROUP if scheme.is_block_format else form.group
        table = table_address(IntegerFormat(scheme)) if scheme.is_block_format else None
        self._struct = layouts.LinearStruct(
            *pointers, _SCHEMES[scheme], group, *sizes, form.half_scales, None, table
        )
        self.address = ctypes.addressof(self._struct)

    def continue_with(self, address: int) -> None:
        self._struct.next = address

    def place(self, memory: Tensor | None) -> None:
        self.packed = memory
        self._struct.weights = None if memory is None else memory.data_ptr()

    @property
    def nbytes(self) -> int:
        return (0 if self.packed is None else self.packed.numel()) + (
            0 if self.bias is None else self.bias.nbytes
        )

    def copied(self) -> _NativeWeight:
        assert self.packed is not None
        return _NativeWeight(
            self.form, WEIGHTS.take(self.packed.shape, torch.uint8).copy_(self.packed), self.bias
        )

    def rows(self, indices: Tensor, scheme: Scheme) -> Tensor:
        assert self.packed is not None
        in_padded = self.form.in_padded
        if scheme.is_block_format:
            return block_rows(self.packed, IntegerFormat(scheme), self.form.in_features, indices)
        if scheme.is_quantized:
            group, half_scales = self.form.group, self.form.half_scales
            return packing.integer_rows(self.packed, scheme, group, in_padded, half_scales, indices)
        return packing.float_rows(self.packed, scheme, in_padded, indices)

    def apply(self, x: Tensor, out: Tensor) -> None:
        if self.packed is None:
            raise InternalError("a layer was called whose weights are not in memory")
        if self.padding:
            x = pad(x, (0, self.padding))
        elif x.stride(1) != 1:
            x = x.contiguous()
        self._function(
            self.address,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            out.data_ptr(),
            out.stride(0),
            native.ELEMENTS[x.dtype],
            torch.get_num_threads(),
        )


class _ReferenceWeight:
    """The same in plain torch. It converts integers to floats at every call: slow, but the
    definition."""

    __slots__ = ("_bias", "_group", "_weight")

    def __init__(
        self, stored: Tensor | QuantizedWeight, scheme: Scheme, bias: Tensor | None, group: int
    ) -> None:
        self._group = group
        if isinstance(stored, Tensor):
            dtype = torch.float32 if scheme is Scheme.FLOAT32 else torch.bfloat16
            self._weight: Tensor | QuantizedWeight = stored.to(dtype, copy=True)
        else:
            self._weight = stored
        self._bias = None if bias is None else bias.float()

    @property
    def nbytes(self) -> int:
        bias = 0 if self._bias is None else self._bias.nbytes
        return bias + self._weight.nbytes

    def copied(self) -> _ReferenceWeight:
        copy, weight = _ReferenceWeight.__new__(_ReferenceWeight), self._weight
        copy._group, copy._bias = self._group, self._bias
        copy._weight = (
            weight.clone()
            if isinstance(weight, Tensor)
            else replace(weight, values=weight.values.clone())
        )
        return copy

    def rows(self, indices: Tensor, _: Scheme) -> Tensor:
        if isinstance(self._weight, Tensor):
            return self._weight[indices]
        return self._weight.rows(indices).dequantize()

    def apply(self, x: Tensor, out: Tensor) -> None:
        if isinstance(self._weight, QuantizedWeight):
            rounded = quantize_activation(pad(x, (0, -x.shape[1] % self._group)), self._group)
            result = linear(rounded, self._weight.dequantize(), self._bias)
        else:
            result = linear(x, self._weight, None if self._bias is None else self._bias.to(x.dtype))
        out.copy_(result)


class _BlockReference:
    """A weight in a block format, computed by its meaning: float32 numbers of some outputs at a
    time.

    The fp32 kernel multiplies them, so that a row's bits depend on that row only.
    """

    __slots__ = ("bias", "form", "packed")
    address = None
    padding = 0

    def __init__(self, form: PackedForm, packed: Tensor | None, bias: Tensor | None) -> None:
        self.form, self.packed = form, packed
        self.bias = None if bias is None else bias.float()

    def place(self, memory: Tensor | None) -> None:
        self.packed = memory

    @property
    def nbytes(self) -> int:
        return (0 if self.packed is None else self.packed.numel()) + (
            0 if self.bias is None else self.bias.nbytes
        )

    def copied(self) -> _BlockReference:
        assert self.packed is not None
        memory = WEIGHTS.take(self.packed.shape, torch.uint8).copy_(self.packed)
        return _BlockReference(self.form, memory, self.bias)

    @property
    def _weight(self) -> BlockWeight:
        if self.packed is None:
            raise InternalError("a layer was called whose weights are not in memory")
        form = self.form
        return BlockWeight.of(
            self.packed, (form.out_features, form.in_features), IntegerFormat(form.scheme)
        )

    def rows(self, indices: Tensor, _: Scheme) -> Tensor:
        return self._weight.rows(indices).dequantize()

    def apply(self, x: Tensor, out: Tensor) -> None:
        weight, rows = self._weight, x.float().contiguous()
        at_once = max(packing.PANEL, _REFERENCE_ELEMENTS // self.form.in_features)
        for first in range(0, self.form.out_features, at_once):
            some = slice(first, first + at_once)
            bias = None if self.bias is None else self.bias[some]
            part = PackedLinear.pack(weight.rows(some).dequantize(), Scheme.FLOAT32, bias)
            out[:, some] = part(rows)


_REFERENCE_ELEMENTS = 1 << 22
"""Elements of a block format that are numbers at the same time."""


def _check_weights(weights: Sequence[Tensor]) -> None:
    shapes = [tuple(weight.shape) for weight in weights]
    if not shapes or any(
        len(shape) != 2 or 0 in shape or shape[1] != shapes[0][1] for shape in shapes
    ):
        raise InvalidArgumentError(
            f"weights of shapes {shapes} cannot be packed together: each must be [out, in], of one "
            "`in`",
            field="weight",
        )


def _joined_bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    total = sum(weight.shape[0] for weight in weights)
    if len(biases) == len(weights):
        parts = [
            torch.zeros(weight.shape[0]) if bias is None else bias.detach().float()
            for weight, bias in zip(weights, biases, strict=True)
        ]
        joined = torch.cat(parts)
        if joined.shape == (total,):
            return joined
    elif len(biases) == 1 and biases[0] is not None and biases[0].shape == (total,):
        return biases[0].detach().float()
    raise InvalidArgumentError(
        f"bias must have {total} elements, or one bias (or None) for each weight", field="bias"
    )
