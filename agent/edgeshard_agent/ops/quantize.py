"""Weight-only number formats: symmetric integers with one scale for each group of consecutive
inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import BLOCK_FORMATS


class Scheme(StrEnum):
    """The number format of a packed weight. `BLOCK_FORMATS` have the same names here."""

    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    IQ4_XS = "iq4_xs"
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    IQ4_NL = "iq4_nl"
    IQ3_S = "iq3_s"
    IQ3_XXS = "iq3_xxs"
    IQ2_S = "iq2_s"
    IQ2_XS = "iq2_xs"
    IQ2_XXS = "iq2_xxs"
    IQ1_S = "iq1_s"
    IQ1_M = "iq1_m"
    TQ1_0 = "tq1_0"
    TQ2_0 = "tq2_0"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    Q1_0 = "q1_0"
    Q2_0 = "q2_0"
    INT4_ZEROS = "int4_zeros"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        try:
            return cls(text)
        except ValueError:
            choices = ", ".join(cls)
            raise InvalidArgumentError(
                f"scheme {text!r} is unknown: use one of {choices}", field="scheme"
            ) from None

    @property
    def is_quantized(self) -> bool:
        return self in (Scheme.INT8, Scheme.INT4, Scheme.INT2)

    @property
    def is_block_format(self) -> bool:
        return self.value in BLOCK_FORMATS

    @property
    def bits(self) -> int:
        """Bits of one weight, without its scale; not of a block format."""
        return {
            Scheme.FLOAT32: 32,
            Scheme.BFLOAT16: 16,
            Scheme.INT8: 8,
            Scheme.INT4: 4,
            Scheme.INT2: 2,
        }[self]


PLAIN_SCHEMES = tuple(scheme for scheme in Scheme if not scheme.is_block_format)
"""Those in which `PackedLinear.pack` packs numbers."""

# Smaller groups follow the weights more closely and cost more scales: 2 bytes each.
DEFAULT_GROUPS = {Scheme.INT8: 64, Scheme.INT4: 32, Scheme.INT2: 32}
GROUPS = (32, 64, 128)
_LIMITS = {Scheme.INT8: (-127, 127), Scheme.INT4: (-8, 7), Scheme.INT2: (-3, 3)}
_ACTIVATION_LIMIT = 127.0
# A group none of whose numbers is larger counts as zeros: the inverse of its scale could overflow.
_NEGLIGIBLE = 1e-30
ELEMENTS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """`values` [out, in] int8 and `scales` [out, groups] bfloat16; group g is the inputs [g *
    group, (g+1) * group).

    `in` is padded with zeros to whole groups. A model may be stored so; its `scales` are float16.
    `scheme` is the narrowest that holds the values.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int
    scheme: Scheme

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def shape(self) -> torch.Size:
        """[out, in], padding included."""
        return self.values.shape

    def rows(self, selection: slice | torch.Tensor) -> QuantizedWeight:
        """Some of its rows."""
        return replace(self, values=self.values[selection], scales=self.scales[selection])

    def dequantize(self) -> torch.Tensor:
        """[out, in] float32, padding included."""
        out_features = self.values.shape[0]
        grouped = self.values.view(
            out_features, -1, self.group
        ).float() * self.scales.float().unsqueeze(-1)
        return grouped.view(out_features, -1)


def quantize_weight(weight: torch.Tensor, scheme: Scheme, group: int) -> QuantizedWeight:
    """Round a weight [out, in] to the nearest integers times a scale.

    int8 takes the scale from the largest magnitude. int4 tries several scales for each group, and
    keeps the one with the least squared error. It tries both signs, because -8 has no positive
    counterpart. int2 has the values -3, -1, 1 and 3, evenly about zero. It tries several scales,
    too, each fitted to the values that it gives.
    """
    out_features, in_features = weight.shape
    groups = -(-in_features // group)
    values = torch.empty((out_features, groups, group), dtype=torch.int8)
    scales = torch.empty((out_features, groups), dtype=torch.bfloat16)
    # A few rows at a time: what lies between stays in the cache, and takes no memory to speak of.
    at_once = max(1, ELEMENTS_AT_ONCE // (groups * group))
    for first in range(0, out_features, at_once):
        rows = slice(first, first + at_once)
        padded = torch.nn.functional.pad(weight[rows].float(), (0, -in_features % group)).view(
            -1, groups, group
        )
        scales[rows] = _SCALES[scheme](padded)
        values[rows] = _rounded(padded, scales[rows], scheme)
    return QuantizedWeight(values.view(out_features, -1), scales, group, scheme)


def _int8_scales(grouped: torch.Tensor) -> torch.Tensor:
    return (grouped.abs().amax(-1) / 127).bfloat16()


def _int4_scales(grouped: torch.Tensor) -> torch.Tensor:
    extreme = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)).squeeze(-1)
    divisors = (-8.0, -9.0, -8.5, -7.5, -7.0, -6.5, 7.0, 7.5, 8.0)
    return _closest(grouped, ((extreme / divisor).bfloat16() for divisor in divisors), Scheme.INT4)


def _int2_scales(grouped: torch.Tensor) -> torch.Tensor:
    largest = grouped.abs().amax(-1)
    divisors = (3.0, 3.4, 3.8, 4.2, 4.7, 5.3, 6.0)
    fitted = (_fitted((largest / divisor).bfloat16(), grouped) for divisor in divisors)
    best = _closest(grouped, chain((torch.zeros_like(largest).bfloat16(),), fitted), Scheme.INT2)
    return torch.where(largest < _NEGLIGIBLE, 0.0, best.float()).bfloat16()


def _closest(
    grouped: torch.Tensor, candidates: Iterator[torch.Tensor], scheme: Scheme
) -> torch.Tensor:
    """The scale with the least squared error for each group, of equal ones the first."""
    best = next(candidates)
    best_error = _squared_error(grouped, best, scheme)
    for scales in candidates:
        error = _squared_error(grouped, scales, scheme)
        better = error < best_error
        best = torch.where(better, scales, best)
        best_error = torch.where(better, error, best_error)
    return best


def _fitted(scales: torch.Tensor, grouped: torch.Tensor) -> torch.Tensor:
    """The scales with the least squared error for the values that these give, found twice."""
    for _ in range(2):
        values = _rounded(grouped, scales, Scheme.INT2).float()
        scales = (_sums(values * grouped) / _sums(values.square())).bfloat16()
    return scales


_SCALES = {Scheme.INT8: _int8_scales, Scheme.INT4: _int4_scales, Scheme.INT2: _int2_scales}


def _squared_error(grouped: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    restored = _rounded(grouped, scales, scheme).float() * scales.float().unsqueeze(-1)
    return _sums((restored - grouped).square_())


def _sums(groups: torch.Tensor) -> torch.Tensor:
    """The sums [...] of groups [..., n], added half to half; n is a power of two.

    torch's own sum has another order on each processor. Two nodes would keep different scales of
    one weight.
    """
    while groups.shape[-1] > 1:
        first, second = groups.chunk(2, dim=-1)
        groups = first + second
    return groups.squeeze(-1)


def _rounded(grouped: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    lowest, highest = _LIMITS[scheme]
    divisors = scales.float().unsqueeze(-1)
    inverse = torch.where(divisors.abs() < _NEGLIGIBLE, 0.0, 1.0 / divisors)
    scaled = grouped * inverse
    if scheme is Scheme.INT2:  # the odd numbers
        return (
            scaled.sub_(1).mul_(0.5).round_().mul_(2).add_(1).clamp_(lowest, highest).to(torch.int8)
        )
    return scaled.round_().clamp_(lowest, highest).to(torch.int8)


def quantize_activation(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Rows [rows, in] as the integer kernels see them: rounded to 8 bits with one scale per row and
    group, in float32.

    `in` must be whole groups. A row's numbers depend on that row alone.
    """
    grouped = rows.float().view(rows.shape[0], rows.shape[1] // group, group)
    largest = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < _NEGLIGIBLE, 0.0, _ACTIVATION_LIMIT / largest)
    return ((grouped * inverse).round_() * (largest / _ACTIVATION_LIMIT)).view(rows.shape)
