"""Weights as numbers and as small integers in blocks: writing those that must change, and counting
the loss.

A block is `STORED_GROUP` inputs of a row (`IntegerFormat.stored_block_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeshard.domain.models.dtypes import STORED_GROUP, IntegerFormat
from edgeshard.storage.checkpoint import StoredTensor
from edgeshard.storage.files import MOVE_SCRATCH, check_room, naming_full_disk

Floats = NDArray[np.float32]
Integers = NDArray[np.int8]
_MAX_UNSIGNED = 15
_LIMITS = {IntegerFormat.INT8: (-127, 127), IntegerFormat.INT4: (-8, 7)}
# A group none of whose numbers is larger counts as zeros: the inverse of its scale could overflow.
_NEGLIGIBLE = 1e-30
_INT4_DIVISORS = (-8.0, -9.0, -8.5, -7.5, -7.0, -6.5, 7.0, 7.5, 8.0)
_ALIGNMENT = 64
AT_ONCE = 1 << 22
"""The number of elements that are converted at a time."""


class Width(StrEnum):
    """The formats for weights that EdgeShard cannot keep exactly as they are."""

    INT4 = "int4"
    INT8 = "int8"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def integers(self) -> IntegerFormat | None:
        """The same as a format of small integers, None for one of floats."""
        return IntegerFormat(self) if self in (Width.INT4, Width.INT8) else None


_FLOATS = {Width.BFLOAT16: "BF16", Width.FLOAT16: "F16", Width.FLOAT32: "F32"}


@dataclass(slots=True)
class RoundingLoss:
    """The loss of the numbers that were rounded."""

    elements: int = 0
    squares: float = 0.0
    errors: float = 0.0

    def add(self, before: Floats, after: Floats) -> None:
        """Count numbers of any shape, as they were and as they are now."""
        self.elements += before.size
        self.squares += float(np.sum(np.square(before, dtype=np.float64)))
        self.errors += float(np.sum(np.square(before.astype(np.float64) - after)))

    @property
    def relative_error(self) -> float:
        """The root of the errors' squares by the weights' squares."""
        return math.sqrt(self.errors / self.squares) if self.squares else 0.0

    def __str__(self) -> str:
        return (
            f"{self.elements / 1e6:.1f} M weights changed by {100 * self.relative_error:.2g} % "
            "(root mean square)"
        )


_WHAT = "a conversion of the weights"
BYTES = {
    Width.INT4: 0.5625,
    Width.INT8: 1.0625,
    Width.BFLOAT16: 2.0,
    Width.FLOAT16: 2.0,
    Width.FLOAT32: 4.0,
}
"""Bytes of a weight, with its part of a group's scale."""


class TensorWriter:
    """A writer of converted tensors, one behind the other, into a file of `directory`; `loss`
    counts its rounding.

    `on_bytes` is called with the bytes written so far. Every method raises ResourceExhaustedError
    for a full disk; so does the beginning if there is no room for `least_bytes`.
    """

    def __init__(
        self, directory: Path, least_bytes: int, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        self._path = directory / "converted.tensors"
        self._least_bytes = least_bytes
        self._on_bytes = on_bytes
        self._file: BinaryIO | None = None
        self.loss = RoundingLoss()

    def __enter__(self) -> TensorWriter:
        check_room(self._path, _WHAT, self._least_bytes, remedy=MOVE_SCRATCH)
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def raw(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        parts: Iterator[bytes],
        integers: IntegerFormat | None = None,
    ) -> StoredTensor:
        """Write bytes as they are. `dtype` is the type's name in safetensors."""
        assert self._file is not None
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        for part in parts:
            with naming_full_disk(self._path, _WHAT, self._file.tell() + len(part), MOVE_SCRATCH):
                self._file.write(part)
            if self._on_bytes is not None:
                self._on_bytes(self._file.tell())
        return StoredTensor(
            name, dtype, shape, self._path, offset, self._file.tell() - offset, integers
        )

    def integers(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: Iterator[tuple[Integers, Floats]],
        integers: IntegerFormat,
    ) -> StoredTensor:
        """Write values [rows, columns] and scales [rows, columns / 32], each a float16 already,
        some rows at a time."""
        return self.raw(
            name, "F32", shape, (to_blocks(*part, integers) for part in parts), integers
        )

    def rounded(
        self, name: str, shape: tuple[int, ...], parts: Iterator[Floats], width: Width
    ) -> StoredTensor:
        """Write numbers, some rows at a time, in this width; a matrix without whole groups becomes
        bfloat16."""
        integers = width.integers
        if integers is not None and (len(shape) != 2 or shape[1] % STORED_GROUP):
            integers, width = None, Width.BFLOAT16
        if integers is not None:
            integer_format = integers
            return self.integers(
                name,
                shape,
                (self._quantised(part, integer_format) for part in parts),
                integer_format,
            )
        return self.raw(name, _FLOATS[width], shape, (self._floats(part, width) for part in parts))

    def _quantised(self, weights: Floats, integers: IntegerFormat) -> tuple[Integers, Floats]:
        values, scales = quantise(weights, integers)
        self.loss.add(weights, dequantised(values, scales))
        return values, scales

    def _floats(self, numbers: Floats, width: Width) -> bytes:
        if width is Width.BFLOAT16:
            halves = to_bfloat16(numbers)
            self.loss.add(numbers, from_bfloat16(halves))
            return halves.tobytes()
        stored_numbers = numbers.astype(np.float16 if width is Width.FLOAT16 else np.float32)
        self.loss.add(numbers, stored_numbers.astype(np.float32))
        return stored_numbers.tobytes()


def to_blocks(values: Integers, scales: Floats, integers: IntegerFormat) -> bytes:
    """The blocks of values [rows, columns] with scales [rows, groups] that float16 holds."""
    rows, groups = scales.shape
    grouped = values.reshape(rows, groups, STORED_GROUP)
    blocks = np.empty((rows, groups, integers.stored_block_bytes), np.uint8)
    blocks[..., :2] = scales.astype("<f2").reshape(rows, groups, 1).view(np.uint8)
    if integers is IntegerFormat.INT8:
        blocks[..., 2:] = grouped.view(np.uint8)
        return blocks.tobytes()
    zeros: NDArray[np.int16] = np.full((rows, groups, 1), 8, np.int16)
    if integers is IntegerFormat.INT4_ZEROS:
        zeros = _zeros_of(grouped)
        blocks[..., 2:3] = zeros
    unsigned = (grouped + zeros).astype(np.uint8)
    blocks[..., -16:] = unsigned[..., :16] | unsigned[..., 16:] << 4
    return blocks.tobytes()


def fits_zeros(values: Integers) -> bool:
    """Whether values [rows, columns] are four bits each in every group once it has a zero of its
    own."""
    grouped = values.reshape(len(values), -1, STORED_GROUP)
    return bool((grouped.max(-1, keepdims=True) + _zeros_of(grouped) <= _MAX_UNSIGNED).all())


def _zeros_of(grouped: Integers) -> NDArray[np.int16]:
    """The least integer for each group [rows, groups, 1] that makes its values [rows, groups, 32]
    not negative."""
    least = grouped.min(-1, keepdims=True).astype(np.int16)
    zeros: NDArray[np.int16] = np.maximum(-least, 0)
    return zeros


def dequantised(values: Integers, scales: Floats) -> Floats:
    """Values [rows, columns] times scales [rows, groups], each of as many columns: [rows,
    columns]."""
    rows, columns = values.shape
    grouped = values.reshape(rows, scales.shape[1], -1).astype(np.float32) * scales[..., None]
    return grouped.reshape(rows, columns)


def quantise(weights: Floats, integers: IntegerFormat) -> tuple[Integers, Floats]:
    """Weights [rows, columns] as the nearest integers [rows, columns] and float16 scales [rows,
    columns / 32].

    int4 tries several scales for each group and keeps the best.
    """
    rows, columns = weights.shape
    grouped = weights.reshape(rows, -1, STORED_GROUP)
    if integers is IntegerFormat.INT8:
        scales = _half(np.abs(grouped).max(-1) / 127)
        return _rounded(grouped, scales, integers).reshape(rows, columns), scales
    extreme = np.take_along_axis(grouped, np.abs(grouped).argmax(-1)[..., None], -1)[..., 0]
    best, least = np.zeros_like(extreme), np.full_like(extreme, np.inf)
    for divisor in _INT4_DIVISORS:
        scales = _half(extreme / divisor)
        restored = _rounded(grouped, scales, integers).astype(np.float32) * scales[..., None]
        error = np.square(restored - grouped).sum(-1)
        best = np.where(error < least, scales, best)
        least = np.minimum(error, least)
    return _rounded(grouped, best, integers).reshape(rows, columns), best


def _rounded(grouped: Floats, scales: Floats, integers: IntegerFormat) -> Integers:
    low, high = _LIMITS[integers]
    divisors = scales[..., None]
    with np.errstate(divide="ignore"):
        inverse = np.where(np.abs(divisors) < _NEGLIGIBLE, np.float32(0), np.float32(1) / divisors)
    return np.clip(np.rint(grouped * inverse), low, high).astype(np.int8)


def _half(scales: Floats) -> Floats:
    """The scales rounded to float16, whose largest number is 65504."""
    return np.clip(scales, -65504, 65504).astype(np.float16).astype(np.float32)


def kept_scales(scales: Floats) -> Floats | None:
    """The scales rounded to float16; None where that would change one by more than a thousandth."""
    halves = _half(scales)
    with np.errstate(invalid="ignore"):
        near = np.abs(halves - scales) <= np.abs(scales) * 2.0**-10
    return halves if bool(near.all()) else None


def to_bfloat16(numbers: Floats) -> NDArray[np.uint16]:
    """The bits of numbers of any shape as bfloat16, rounded to the nearest, ties to even; a NaN
    stays one."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(halves: NDArray[np.uint16]) -> Floats:
    """The numbers behind the bits of bfloat16, of the same shape."""
    return (halves.astype(np.uint32) << 16).view(np.float32)
