"""Keys and values of 4 bits: pages of 16 tokens as the native kernel reads them, and their
arithmetic in torch.

A group is 32 of a token's numbers in one head, or 16 if 32 do not divide the head. It is stored as
its minimum (float32), the step between two of sixteen values (bfloat16), and an integer from 0 to
15 for each number. A number and its stored value differ by at most 1.02 (max - min) / 30. Numbers
within 1e-34 count as equal. The kernels (kv_int4.h) make the same bits.
"""

from __future__ import annotations

import torch

from edgeshard.domain.models.dtypes import KvFormat
from edgeshard_agent.ops import native

PAGE = 16
"""Tokens in a page (KV_PAGE of kernels.h)."""
LEAST_STEP = 1e-35
"""A smaller step counts as none, and its group as constant: the inverse could overflow."""
_NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32) * 4
"""By how many bits the eight inputs of a word are shifted: even ones stand in the low half."""
_ALL_ONES = torch.tensor(15, dtype=torch.int32)


def rounded(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [..., width] (int32), minima [..., groups] (float32) and steps [..., groups]
    (bfloat16) of [..., width].

    A group with an infinity or a NaN has NaN for its minimum.
    """
    group = KvFormat.group(numbers.shape[-1])
    grouped = numbers.float().unflatten(-1, (-1, group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    is_finite = torch.isfinite(high - low)
    steps = ((high - low) / 15.0).to(torch.bfloat16)
    varies = is_finite & (steps.float() >= LEAST_STEP)
    low = torch.where(is_finite, low + 0.0, torch.nan)  # + 0: a minimum of -0 is one of 0
    steps = torch.where(varies, steps, torch.zeros((), dtype=steps.dtype))
    inverse = torch.where(varies, 1.0 / steps.float(), 0.0)
    integers = ((grouped - low.unsqueeze(-1)) * inverse.unsqueeze(-1)).clamp(max=15.0).round()
    integers = torch.where(varies.unsqueeze(-1), integers, 0.0)
    return integers.flatten(-2).int(), low, steps


def restored(integers: torch.Tensor, minima: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The numbers [..., width] in float32 that `rounded` stands for."""
    group = integers.shape[-1] // minima.shape[-1]
    grouped = integers.unflatten(-1, (-1, group)).float()
    numbers: torch.Tensor = grouped * steps.float().unsqueeze(-1) + minima.unsqueeze(-1)
    return numbers.flatten(-2)


class Int4Arena:
    """Pages of 16 tokens, for each KV head, of keys and of values, as kernels.h lays them out, each
    a row of bytes.

    `keys` and `values` are [pages, kv_heads, page bytes]; they lie in the two rows of `memory`, if
    it is given.
    """

    element = native.INT4

    def __init__(
        self, slots: int, kv_heads: int, head_dim: int, memory: torch.Tensor | None = None
    ) -> None:
        self._head_dim, self._groups = head_dim, head_dim // KvFormat.group(head_dim)
        page_bytes = PAGE * KvFormat.INT4.head_bytes(head_dim)
        if memory is None:
            memory = torch.zeros(2, slots * kv_heads * (page_bytes // PAGE), dtype=torch.uint8)
        self.keys, self.values = (part.view(-1, kv_heads, page_bytes) for part in memory)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values that are read."""
        return torch.float32

    @property
    def slots(self) -> int:
        return len(self.keys) * PAGE

    @property
    def width(self) -> tuple[int, int]:
        return self.keys.shape[1], self._head_dim

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, head_dim] of int64 slots [n], in float32."""
        page = slots // PAGE
        at = slots % PAGE
        groups = self._groups
        parts = []
        for part in (self.keys, self.values):
            minima, steps, words = self._parts(part)
            if part is self.keys:
                words = (
                    words.view(*words.shape[:2], -1, PAGE)[page, :, :, at].unsqueeze(-1) >> _NIBBLES
                )
            else:
                words = words.view(*words.shape[:2], -1, 2, PAGE)[page, :, :, at // 8]
                words = words >> _NIBBLES[at % 8].view(-1, 1, 1, 1)
            integers = (words & 15).flatten(-2)
            by_token = (
                header.view(*header.shape[:2], groups, PAGE)[page, :, :, at]
                for header in (minima, steps)
            )
            parts.append(restored(integers, *by_token))
        return parts[0], parts[1]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values [n, kv_heads, head_dim], rounded, into int64 slots [n], in the order
        given."""
        page = slots // PAGE
        at = slots % PAGE
        groups = self._groups
        for part, numbers in ((self.keys, keys), (self.values, values)):
            integers, low, step = rounded(numbers)
            minima, steps, words = self._parts(part)
            for header, new in ((minima, low), (steps, step)):
                header.view(*header.shape[:2], groups, PAGE)[page, :, :, at] = new
            if part is self.keys:
                eights = integers.unflatten(-1, (-1, 8)) << _NIBBLES
                words.view(*words.shape[:2], -1, PAGE)[page, :, :, at] = eights.sum(
                    -1, dtype=torch.int32
                )
                continue
            # Tokens of one page share words.
            by_vector = words.view(*words.shape[:2], -1, 2, PAGE)
            wide = integers.unflatten(-1, (-1, PAGE))
            for index, (p, a) in enumerate(zip(page.tolist(), at.tolist(), strict=True)):
                shift, place = _NIBBLES[a % 8], by_vector[p, :, :, a // 8]
                place.bitwise_and_(~(_ALL_ONES << shift)).bitwise_or_(wide[index] << shift)

    def _parts(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of pages: minima, steps and words, each [pages, kv_heads, ...], then flat."""
        first = self._groups * PAGE * 4
        second = first + self._groups * PAGE * 2
        return (
            part[..., :first].view(torch.float32),
            part[..., first:second].view(torch.bfloat16),
            part[..., second:].view(torch.int32),
        )
