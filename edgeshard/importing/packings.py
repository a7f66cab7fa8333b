"""The forms of quantised matrices in published safetensors, each read as integers and scales.

A matrix is [outputs, inputs]. Each reader raises InvalidArgumentError naming the tensor for parts
that contradict one another, and UnsupportedModelError for a width that is not read.

Sources: compressed-tensors (`compressors/`), AutoAWQ (`utils/packing_utils.py`), AutoGPTQ and
GPTQModel (`nn_modules/qlinear`), DeepSeek-V3's FP8 blocks, the OCP microscaling formats (MXFP4),
Model Optimizer (`quantization/qtensor/nvfp4_tensor.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError
from edgeshard.domain.models.dtypes import STORED_GROUP
from edgeshard.importing.blocks import Floats, Integers

Parts = Mapping[str, NDArray[Any]]
"""The tensors of one module, by the ends of their names."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Values [rows, columns] times scales [rows, columns / 32]; without values, `scales` are the
    numbers themselves."""

    values: Integers | None
    scales: Floats


def packed(name: str, parts: Parts) -> Matrix:
    """A matrix of compressed-tensors' `pack-quantized`: values + 2^(bits - 1) in 32-bit words along
    the inputs."""
    words, scales = parts["weight_packed"], _scales(name, parts["weight_scale"])
    if "weight_shape" not in parts or parts["weight_shape"].size != 2:
        raise malformed(name, "has no weight_shape of two sizes")
    rows, columns = (int(size) for size in parts["weight_shape"].reshape(-1))
    if (
        words.dtype != np.int32
        or words.ndim != 2
        or not columns > 0
        or words.shape[0] != rows
        or rows != len(scales)
    ):
        raise malformed(name, "has packed weights, scales and a shape that contradict one another")
    bits = _bits(name, columns, words.shape[1])
    values = _unpacked(words, bits)[:, :columns].astype(np.int16) - (1 << (bits - 1))
    if (zeros := parts.get("weight_zero_point")) is not None:
        if zeros.dtype == np.int32:
            zeros = _unpacked(zeros.T, bits).T[:rows].astype(np.int16) - (1 << (bits - 1))
        if zeros.shape != scales.shape:
            raise malformed(name, "has zero points of another shape than its scales")
        values = values - _repeated(name, zeros.astype(np.int16), columns)
    return _grouped(name, values, scales, parts.get("weight_g_idx"))


def integers(name: str, parts: Parts) -> Matrix:
    """A matrix of compressed-tensors' `int-quantized`: a byte for each value, a scale for each row
    or for all."""
    values, scales = parts["weight"], _scales(name, parts["weight_scale"])
    if values.ndim != 2:
        raise malformed(name, "is not a matrix")
    if len(scales) == 1:
        scales = np.repeat(scales, len(values), 0)
    if (zeros := parts.get("weight_zero_point")) is not None and zeros.any():
        rows = (
            np.broadcast_to(zeros.reshape(-1, 1), (len(values), 1))
            if zeros.size in (1, len(values))
            else zeros
        )
        values = values.astype(np.int16) - _repeated(name, rows.astype(np.int16), values.shape[1])
    return _grouped(name, values.astype(np.int16), scales)


def floats(block: tuple[int, int] | None) -> Callable[[str, Parts], Matrix]:
    """The reader of FP8 with a scale for all, for each row, or for each `block` of rows and
    columns."""

    def read(name: str, parts: Parts) -> Matrix:
        weights = parts["weight"].astype(np.float32)
        scales = next(
            parts[key] for key in ("weight_scale_inv", "weight_scale") if key in parts
        ).astype(np.float32)
        if weights.ndim != 2:
            raise malformed(name, "is not a matrix")
        rows, columns = weights.shape
        high, wide = (
            block
            if block is not None and scales.size > 1
            else (rows if scales.size == 1 else 1, columns)
        )
        high, wide = min(high, rows), min(wide, columns)  # no more is repeated than there is
        if scales.size != -(-rows // high) * -(-columns // wide):
            raise malformed(name, "has scales that do not cover it")
        scales = scales.reshape(-(-rows // high), -1)
        return Matrix(
            None, weights * np.repeat(np.repeat(scales, high, 0)[:rows], wide, 1)[:, :columns]
        )

    return read


def awq(name: str, parts: Parts) -> Matrix:
    """A matrix of AWQ (gemm): words of eight outputs in the order 0 2 4 6 1 3 5 7; (value - zero) *
    scale by groups."""
    words = parts["qweight"]
    zero_words = parts["qzeros"]
    scales = parts["scales"].astype(np.float32)
    inputs, outputs = words.shape[0], words.shape[-1] * 8
    if (
        words.ndim != 2
        or not words.dtype == zero_words.dtype == np.int32
        or scales.ndim != 2
        or scales.shape[1] != outputs
        or zero_words.shape != (len(scales), outputs // 8)
    ):
        raise malformed(name, "has weights, zeros and scales that contradict one another")
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    values, zeros = (
        _unpacked(part, 4)
        .reshape(len(part), -1, 8)[:, :, order]
        .reshape(len(part), -1)
        .astype(np.int16)
        for part in (words, zero_words)
    )
    if inputs % len(scales):
        raise malformed(name, "has no whole number of inputs for each scale")
    return _grouped(name, (values - np.repeat(zeros, inputs // len(scales), 0)).T, scales.T)


def gptq(zero_offset: int) -> Callable[[str, Parts], Matrix]:
    """The reader of GPTQ: words along the inputs; (value - zero - `zero_offset`) * scale of each
    input's group."""

    def read(name: str, parts: Parts) -> Matrix:
        words = parts["qweight"]
        zero_words = parts["qzeros"]
        scales = parts["scales"].astype(np.float32)
        are_words = (
            words.dtype == zero_words.dtype == np.int32 and words.ndim == zero_words.ndim == 2
        )
        if not are_words or scales.ndim != 2 or scales.shape[1] != words.shape[1]:
            raise malformed(name, "has weights, zeros and scales that contradict one another")
        outputs = words.shape[1]
        bits = zero_words.shape[1] * 32 // outputs
        if bits not in (4, 8) or len(zero_words) != len(scales):
            raise _unsupported(
                name, f"has weights of {bits} bits; EdgeShard reads GPTQ with 4 and 8"
            )
        values = _unpacked(words.T, bits).astype(np.int16)
        zeros = _unpacked(zero_words, bits).astype(np.int16).T + zero_offset
        inputs = values.shape[1]
        group = parts.get("g_idx")
        if group is None or group.size != inputs:
            group = np.arange(inputs) // -(-inputs // len(scales))
        if group.min() < 0 or group.max() >= len(scales):
            raise malformed(name, "names a group in g_idx that has no scale")
        return _grouped(name, values - zeros[:, group], scales.T, group)

    return read


def mxfp4(name: str, parts: Parts) -> Matrix:
    """A matrix of MXFP4: two numbers of four bits a byte, the first in the low half; 2^(scale -
    127) for each 32."""
    (data,) = (parts[key] for key in ("weight_packed", "weight_blocks", "_blocks") if key in parts)
    (exponents,) = (
        parts[key] for key in ("weight_scale", "weight_scales", "_scales") if key in parts
    )
    rows = data.shape[0]
    if (
        data.dtype != np.uint8
        or exponents.dtype != np.uint8
        or data.size != exponents.size * STORED_GROUP // 2
    ):
        raise malformed(name, "has MXFP4 blocks and scales that contradict one another")
    return Matrix(
        _fp4_halves(data.reshape(rows, -1)),
        np.exp2(exponents.reshape(rows, -1).astype(np.float32) - 128),
    )


def nvfp4(name: str, parts: Parts) -> Matrix:
    """A matrix of NVFP4: the bytes of MXFP4, an FP8 scale for each 16 inputs, and one for all of
    them.

    compressed-tensors divides by the latter (`weight_global_scale`), Model Optimizer multiplies
    (`weight_scale_2`).
    """
    (data,) = (parts[key] for key in ("weight_packed", "weight") if key in parts)
    scales = parts["weight_scale"].astype(np.float32)
    (together,) = (parts[key] for key in ("weight_global_scale", "weight_scale_2") if key in parts)
    if (
        data.dtype != np.uint8
        or data.ndim != 2
        or together.size != 1
        or scales.shape != (len(data), data.shape[1] * 2 // _NVFP4_GROUP)
        or data.shape[1] * 2 % _NVFP4_GROUP
    ):
        raise malformed(name, "has NVFP4 weights and scales that contradict one another")
    whole = together.astype(np.float32).reshape(())
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # told by name
        scales = scales / whole if "weight_global_scale" in parts else scales * whole
        halves = _fp4_halves(data).reshape(*scales.shape, _NVFP4_GROUP)
        numbers: Floats = np.multiply(halves, (scales / 2)[..., None], dtype=np.float32)
    return Matrix(None, numbers.reshape(len(data), -1))


_NVFP4_GROUP = 16


def _fp4_halves(data: NDArray[np.uint8]) -> Integers:
    """Twice the numbers of four bits in bytes [rows, n], which are integers [rows, 2 n]; the first
    in the low half."""
    return _FP4_HALVES[np.stack((data & 15, data >> 4), -1).reshape(len(data), -1)]


_FP4_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """The values [rows, n] in 32-bit words [rows, n * bits / 32], the first value lowest."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    spread = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & ((1 << bits) - 1)
    return spread.astype(np.uint8).reshape(len(words), -1)


def _grouped(
    name: str, values: NDArray[Any], scales: Floats, group: NDArray[Any] | None = None
) -> Matrix:
    """The matrix of values [rows, columns] and scales [rows, groups]; `group` [columns] has each
    column's scale.

    Without `group`, scales are of as many columns each, in order.
    """
    columns = values.shape[1]
    in_order = group is None or np.array_equal(
        group, np.arange(columns) * scales.shape[1] // columns
    )
    if group is not None and not in_order:
        if group.size != columns or group.min() < 0 or group.max() >= scales.shape[1]:
            raise malformed(name, "names a group that has no scale")
        return Matrix(None, values.astype(np.float32) * scales[:, group])
    whole = columns // scales.shape[1]
    fits = columns % scales.shape[1] == 0 and whole % STORED_GROUP == 0
    if not fits or values.min(initial=0) < -128 or values.max(initial=0) > 127:
        return Matrix(None, values.astype(np.float32) * _repeated(name, scales, columns))
    return Matrix(values.astype(np.int8), np.repeat(scales, whole // STORED_GROUP, 1))


def _repeated(name: str, of_groups: NDArray[Any], columns: int) -> NDArray[Any]:
    if columns % of_groups.shape[1]:
        raise malformed(name, "has no whole number of inputs for each scale")
    return np.repeat(of_groups, columns // of_groups.shape[1], 1)


def _scales(name: str, scales: NDArray[Any]) -> Floats:
    values = scales.astype(np.float32)
    return values.reshape(1, 1) if values.size == 1 else values.reshape(len(values), -1)


def _bits(name: str, columns: int, words: int) -> int:
    for bits in (4, 8):
        if -(-columns * bits // 32) == words:
            return bits
    raise _unsupported(name, "has weights of other than 4 or 8 bits")


def malformed(name: str, what: str) -> InvalidArgumentError:
    """The error of a tensor whose parts cannot be; `what` goes on with the sentence."""
    return InvalidArgumentError(
        f"tensor {name} {what}; fetch the checkpoint again",
        field=name,
        reason="MALFORMED_CHECKPOINT",
    )


def _unsupported(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tensor {name} {what}", field=name, reason="UNSUPPORTED_QUANTISATION"
    )
