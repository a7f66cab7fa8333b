"""The memory of one layer's keys and values, by slot: token s % block_tokens of block s //
block_tokens has slot s."""

from __future__ import annotations

from typing import Literal

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import KV_VECTOR, UNSUPPORTED_KV_DTYPE, KvFormat
from edgeshard_agent.ops import native
from edgeshard_agent.ops.huge_pages import mapped
from edgeshard_agent.ops.kv_int4 import PAGE, Int4Arena


class RowArena:
    """`keys` and `values` [slots, kv_heads, head_dim]: what torch's operators read well.

    They lie in the two rows of `memory` [2, slots * kv_heads * head_dim] where it is given.
    """

    def __init__(
        self,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
        memory: torch.Tensor | None = None,
    ) -> None:
        size = (slots, kv_heads, head_dim)
        rows = [zeroed(size, dtype, device) for _ in range(2)] if memory is None else memory
        self.keys, self.values = (row.view(size) for row in rows)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values that `read` gives."""
        return self.keys.dtype

    @property
    def slots(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> tuple[int, int]:
        """(KV heads, head dim)."""
        return self.keys.shape[1], self.keys.shape[2]

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, head_dim] of int64 slots [n]."""
        return self.keys[slots], self.values[slots]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values [n, kv_heads, head_dim], rounded to the arena's dtype, into int64
        slots [n]."""
        self.keys[slots], self.values[slots] = keys.to(self.dtype), values.to(self.dtype)


class PanelArena:
    """Pages of 16 tokens, for each KV head, in the order in which the native kernel's products read
    them.

    Outputs of the first product are tokens, so that keys are transposed; its inputs, and the tokens
    that the second product takes in, go by twos in bfloat16. With `step` 2 for bfloat16 and 1 for
    float32, `keys` are [pages, kv_heads, head_dim / step, 16, step] and `values` [pages, kv_heads,
    head_dim / 16, 16 / step, 16, step]. They lie in the two rows of `memory` [2, slots * kv_heads *
    head_dim], if it is given.
    """

    def __init__(
        self,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        memory: torch.Tensor | None = None,
    ) -> None:
        step = 4 // dtype.itemsize
        pages, vectors = slots // PAGE, head_dim // KV_VECTOR
        keys, values = (
            [zeroed((slots * kv_heads * head_dim,), dtype, "cpu") for _ in range(2)]
            if memory is None
            else memory
        )
        self.keys = keys.view(pages, kv_heads, head_dim // step, PAGE, step)
        self.values = values.view(pages, kv_heads, vectors, PAGE // step, KV_VECTOR, step)

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def element(self) -> int:
        """`Element` of kernels.h."""
        return native.ELEMENTS[self.keys.dtype]

    @property
    def slots(self) -> int:
        return len(self.keys) * PAGE

    @property
    def width(self) -> tuple[int, int]:
        _, kv_heads, inputs, _, step = self.keys.shape
        return kv_heads, inputs * step

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._rows()
        page = slots // PAGE
        at = slots % PAGE
        step = self.keys.shape[-1]
        shape = (len(slots), *self.width)
        return keys[page, at].reshape(shape), values[page, at // step, at % step].reshape(shape)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        all_keys, all_values = self._rows()
        page = slots // PAGE
        at = slots % PAGE
        step = self.keys.shape[-1]
        kv_heads, head_dim = self.width
        all_keys[page, at] = keys.to(self.dtype).reshape(-1, kv_heads, head_dim // step, step)
        split = values.to(self.dtype).reshape(-1, kv_heads, head_dim // KV_VECTOR, KV_VECTOR)
        all_values[page, at // step, at % step] = split

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views: keys [pages, 16, ...] and values [pages, 16 / step, step, ...], a token's numbers
        last."""
        return self.keys.permute(0, 3, 1, 2, 4), self.values.permute(0, 3, 5, 1, 2, 4)


NativeArena = PanelArena | Int4Arena
"""What the native kernel reads."""
KvArena = RowArena | NativeArena
"""Keys and values of one layer, whatever their order in memory."""


def check_int4(head_dim: int, block_tokens: int, device: str) -> None:
    """Raise InvalidArgumentError unless keys and values of these heads, blocks and device can be of
    4 bits."""
    KvFormat.INT4.check_heads(head_dim)
    if torch.device(device).type != "cpu":
        what = f"runs on the CPU, not on {device}"
    elif block_tokens % PAGE:
        what = f"takes blocks of whole pages of {PAGE} tokens, not of {block_tokens}"
    else:
        return
    raise InvalidArgumentError(
        f"kv_dtype: int4 {what}; use bfloat16", field="kv_dtype", reason=UNSUPPORTED_KV_DTYPE
    )


def make_arena(
    slots: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype | Literal[KvFormat.INT4],
    block_tokens: int,
    device: str,
    memory: torch.Tensor | None = None,
) -> RowArena | NativeArena:
    """An arena as the device's attention reads it best, in the two rows of `memory`, or in memory
    of its own.

    A block's keys are contiguous in a row, and so are its values. Raises RuntimeError or
    MemoryError if memory is short, and InvalidArgumentError if keys and values cannot have 4 bits.
    """
    if isinstance(dtype, KvFormat):
        check_int4(head_dim, block_tokens, device)
        return Int4Arena(slots, kv_heads, head_dim, memory)
    whole_pages = block_tokens % PAGE == 0 and head_dim % KV_VECTOR == 0
    if device == "cpu" and whole_pages and dtype in native.ELEMENTS and native.native_available():
        return PanelArena(slots, kv_heads, head_dim, dtype, memory)
    return RowArena(slots, kv_heads, head_dim, dtype, device, memory)


def zeroed(size: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros in memory that was touched. Raises RuntimeError or MemoryError where it is short."""
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # Pages that nobody has touched would be found on first use, when it is too late to refuse.
    return mapped(size, dtype).zero_()
