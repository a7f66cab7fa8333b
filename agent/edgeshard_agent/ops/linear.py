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
from edgeshard_agent.ops import native, packing
from edgeshard_agent.ops.huge_pages import WEIGHTS
from edgeshard_agent.ops.quantize import (
    DEFAULT_GROUPS,
    GROUPS,
    QuantizedWeight,
    Scheme,
    quantize_activation,
    quantize_weight,
)

# The numbers of `Scheme` in kernels.h.
_SCHEMES = {Scheme.FLOAT32: 0, Scheme.BFLOAT16: 1, Scheme.INT8: 2, Scheme.INT4: 3, Scheme.INT2: 4}
ROW_DTYPES = {
    Scheme.FLOAT32: (torch.float32,),
    Scheme.BFLOAT16: (torch.bfloat16,),
    **dict.fromkeys((Scheme.INT8, Scheme.INT4, Scheme.INT2), (torch.float32, torch.bfloat16)),
}
"""Of the rows that each scheme's layers take."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The form of packed bytes: their scheme, how many inputs share a scale (0 for floats), and the matrix [out,
    in]."""

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
        return packing.packed_size(Scheme.parse(self.scheme), self.group, self.out_features, self.in_features)


class PackedLinear:
    """y = x W^T + b, with W stored as `scheme` says; accumulated in float32.

    A row's result depends on that row alone: in the native kernels it is the same, bit for bit, however many rows are
    computed together. The integer schemes round x too, to 8 bits with a scale for each row and group.
    """

    __slots__ = ("_held", "group", "in_features", "out_features", "scheme")

    def __init__(self, weight: Tensor | QuantizedWeight, scheme: Scheme, bias: Tensor | None, group: int) -> None:
        self.scheme = scheme
        self.group = group
        self.out_features, self.in_features = packing.matrix(weight).shape
        self._held: _NativeWeight | _ReferenceWeight
        if native.native_available():
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
        """Pack a weight [out, in], or several of the same `in`, whose outputs then follow one another.

        `bias` is [out], or one (or None) for each weight. `group` is for the integer schemes: how many inputs share a
        scale. The weights may be dropped afterwards. Raises InvalidArgumentError for an unknown scheme or group, and
        for shapes that do not fit.
        """
        chosen = Scheme.parse(scheme)
        weights = [weight] if isinstance(weight, Tensor) else list(weight)
        biases = [bias] if bias is None or isinstance(bias, Tensor) else list(bias)
        _check_weights(weights)
        size = DEFAULT_GROUPS.get(chosen, 0) if group is None else group
        if size not in (GROUPS if chosen.is_quantized else (0,)):
            allowed = f"use one of {GROUPS}" if chosen.is_quantized else "only the integer schemes have groups"
            raise InvalidArgumentError(f"group is {size} for {chosen}: {allowed}", field="group")
        joined = weights[0].detach() if len(weights) == 1 else torch.cat([part.detach() for part in weights])
        with _one_thread():
            return cls(joined, chosen, _joined_bias(weights, biases), size)

    @classmethod
    def pack_stored(cls, weight: QuantizedWeight, scheme: str, bias: Tensor | None = None) -> PackedLinear:
        """The same for integers that there are already, of whole groups; nothing is rounded."""
        chosen = Scheme.parse(scheme)
        if Scheme.INT2 in (chosen, weight.scheme) or (chosen is not weight.scheme and chosen is not Scheme.INT8):
            raise InvalidArgumentError(f"{weight.scheme} values do not fit {chosen}", field="scheme")
        with _one_thread():
            return cls(weight, chosen, bias, weight.group)

    @classmethod
    def adopt(cls, form: PackedForm, memory: Tensor | None, bias: Tensor | None) -> PackedLinear:
        """A layer whose packed bytes are there already: `memory`, of `form.size` bytes aligned to a cache line.

        Nothing is copied or computed. Without memory the layer must be `place`d before it is called. `bias` is
        in float32, padded to whole panels. Raises InvalidArgumentError where memory or bias do not fit the form, and
        FailedPreconditionError without native kernels.
        """
        if not native.native_available():
            raise FailedPreconditionError("packed weights need the native kernels, which are missing or switched off")
        made = cls.__new__(cls)
        made.scheme, made.group = Scheme.parse(form.scheme), form.group
        made.out_features, made.in_features = form.out_features, form.in_features
        if bias is not None and (bias.dtype, bias.numel()) != (torch.float32, form.padded_rows):
            raise InvalidArgumentError("bias does not fit the packed matrix", field="bias")
        if memory is not None and (memory.dtype, memory.numel()) != (torch.uint8, form.size):
            raise InvalidArgumentError(
                f"{memory.numel()} bytes are not the {form.size} of a packed matrix", field="memory"
            )
        made._held = _NativeWeight(form, memory, bias)
        return made

    def copied(self) -> PackedLinear:
        """The same layer, with its weights in memory of its own."""
        made = PackedLinear.__new__(PackedLinear)
        made.scheme, made.group, made._held = self.scheme, self.group, self._held.copied()
        made.out_features, made.in_features = self.out_features, self.in_features
        return made

    @property
    def _native(self) -> _NativeWeight | None:
        return self._held if isinstance(self._held, _NativeWeight) else None

    @property
    def form(self) -> PackedForm | None:
        """The form that `adopt` takes for this layer; None where it is not packed for native kernels."""
        return None if self._native is None else self._native.form

    @property
    def packed_memory(self) -> Tensor | None:
        """The packed bytes, uint8; None where the layer has none now."""
        return None if self._native is None else self._native.packed

    def place(self, memory: Tensor | None) -> None:
        """Read the packed bytes from `memory` from now on; None takes them away, and the layer cannot be called."""
        assert self._native is not None
        self._native.place(memory)

    @property
    def nbytes(self) -> int:
        """Bytes held: weights, scales and bias, and what pads them. Native kernels read all of them in every call."""
        return self._held.nbytes

    @property
    def native_address(self) -> int | None:
        """The address of the kernels' description of this layer; None where it has none, or where rows must be
        padded."""
        return None if self._native is None or self._native.padding else self._native.address

    def rows(self, indices: Tensor) -> Tensor:
        """Rows [n, in] of a weight that is not quantised, by their indices [n]: a tied embedding is looked up so."""
        assert not self.scheme.is_quantized
        return self._held.rows(indices, self.scheme)[:, : self.in_features]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, out] in x's dtype from x [rows, in]; into `out` where given.

        Raises InvalidArgumentError where shape or dtype does not fit: bf16 weights take bfloat16 rows, fp32 weights
        float32 ones, and the integer schemes both.
        """
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype not in ROW_DTYPES[self.scheme] or not x.is_cpu:
            raise InvalidArgumentError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; this {self.scheme} layer takes "
                f"[rows, {self.in_features}] of {' or '.join(map(str, ROW_DTYPES[self.scheme]))} on the CPU",
                field="x",
            )
        rows = x.shape[0]
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=x.dtype)
        elif out.shape != (rows, self.out_features) or out.dtype is not x.dtype or out.stride(1) != 1:
            raise InvalidArgumentError(
                f"out is {out.dtype} {tuple(out.shape)}; it must be {x.dtype} ({rows}, {self.out_features}), each row "
                "contiguous",
                field="out",
            )
        self._held.apply(x, out)
        return out


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let the calling thread compute alone.

    Packing is thousands of operations of some 100 µs. Shared among threads, each of them waits until the last thread
    was on a core, and spins meanwhile: on a busy machine that takes several times as long. torch's number of threads is
    the caller's, and what threads that begin later start with: those of ours set their own.
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
    def pack(cls, weight: Tensor | QuantizedWeight, scheme: Scheme, bias: Tensor | None, group: int) -> _NativeWeight:
        out_features, in_features = packing.matrix(weight).shape
        half_scales = isinstance(weight, QuantizedWeight) and weight.scales.dtype is torch.float16
        if scheme.is_quantized:
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
        self.form, self.packed, self.bias = form, packed, bias
        scheme = Scheme.parse(form.scheme)
        # Rows are padded where they are rounded to integers; for floats the caller pads them.
        self.padding = 0 if scheme.is_quantized else form.in_padded - form.in_features
        pointers = [None if part is None else part.data_ptr() for part in (packed, bias)]
        sizes = form.in_features, form.in_padded, form.out_features, form.panels
        self._struct = native.LinearStruct(*pointers, _SCHEMES[scheme], form.group, *sizes, form.half_scales)
        self.address = ctypes.addressof(self._struct)

    def place(self, memory: Tensor | None) -> None:
        self.packed = memory
        self._struct.weights = None if memory is None else memory.data_ptr()

    @property
    def nbytes(self) -> int:
        return (0 if self.packed is None else self.packed.numel()) + (0 if self.bias is None else self.bias.nbytes)

    def copied(self) -> _NativeWeight:
        assert self.packed is not None
        return _NativeWeight(self.form, WEIGHTS.take(self.packed.shape, torch.uint8).copy_(self.packed), self.bias)

    def rows(self, indices: Tensor, scheme: Scheme) -> Tensor:
        assert self.packed is not None
        return packing.float_rows(self.packed, scheme, self._struct.in_padded, indices)

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
    """The same in plain torch; integers are made floats at every call, which is slow and says what is meant."""

    __slots__ = ("_bias", "_group", "_weight")

    def __init__(self, stored: Tensor | QuantizedWeight, scheme: Scheme, bias: Tensor | None, group: int) -> None:
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
        made, weight = _ReferenceWeight.__new__(_ReferenceWeight), self._weight
        made._group, made._bias = self._group, self._bias
        made._weight = weight.clone() if isinstance(weight, Tensor) else replace(weight, values=weight.values.clone())
        return made

    def rows(self, indices: Tensor, _: Scheme) -> Tensor:
        assert isinstance(self._weight, Tensor)
        return self._weight[indices]

    def apply(self, x: Tensor, out: Tensor) -> None:
        if isinstance(self._weight, QuantizedWeight):
            rounded = quantize_activation(pad(x, (0, -x.shape[1] % self._group)), self._group)
            result = linear(rounded, self._weight.dequantize(), self._bias)
        else:
            result = linear(x, self._weight, None if self._bias is None else self._bias.to(x.dtype))
        out.copy_(result)


def _check_weights(weights: Sequence[Tensor]) -> None:
    shapes = [tuple(weight.shape) for weight in weights]
    if not shapes or any(len(shape) != 2 or 0 in shape or shape[1] != shapes[0][1] for shape in shapes):
        raise InvalidArgumentError(
            f"weights of shapes {shapes} cannot be packed together: each must be [out, in], of one `in`", field="weight"
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
    raise InvalidArgumentError(f"bias must have {total} elements, or one bias (or None) for each weight", field="bias")
