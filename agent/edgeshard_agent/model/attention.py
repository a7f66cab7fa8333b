"""Attention over the paged KV pool, plugged into transformers' decoder layers as the implementation "edgeshard".

A step's spans are packed into one row of T tokens. A `StepAttention` is built once for a step and handed to every layer
as the keyword `step`; it holds what the layers share: where each span's keys and values go, where they are read, and
the masks. Reads and writes use the layer's global index, `module.layer_idx`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgeshard.step import Span
from edgeshard_agent.model.kv import KvPool

IMPLEMENTATION = "edgeshard"


@dataclass(slots=True)
class _SpanAccess:
    """Where one span's tokens are in the packed row, and its request's slots in the arena.

    `base` is the slot of position 0 when the table's blocks follow one another in the arena, so that keys are read
    as a view; otherwise `slots` lists the slot of every position.
    """

    row: int
    count: int
    first: int
    base: int
    slots: torch.Tensor | None

    @property
    def end(self) -> int:
        return self.first + self.count


class StepAttention:
    """The KV side of one step, for all layers of a stage. Built after the pool has committed the step."""

    __slots__ = ("_accesses", "_arenas", "_masks", "_write_slice", "_write_slots")

    def __init__(self, pool: KvPool, spans: Sequence[Span], device: torch.device) -> None:
        self._arenas = pool.arena
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._accesses: list[_SpanAccess] = []
        row = 0
        for span in spans:
            self._accesses.append(_access(pool, span, row, device))
            row += span.token_count
        self._write_slice: tuple[int, int] | None = None
        self._write_slots: torch.Tensor | None = None
        if len(self._accesses) == 1 and self._accesses[0].slots is None:
            only = self._accesses[0]
            self._write_slice = (only.base + only.first, only.base + only.end)
        else:
            self._write_slots = torch.cat([_write_slots(access, device) for access in self._accesses])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend span by span.

        `query` is [1, heads, T, head_dim], `key` and `value` [1, kv_heads, T, head_dim]. A query at position p sees
        the positions in (p - window, p]. Returns [1, T, heads, head_dim].
        """
        keys, values = self._arenas(layer)
        new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if self._write_slice is not None:
            first, end = self._write_slice
            keys[first:end].copy_(new_keys)
            values[first:end].copy_(new_values)
        else:
            assert self._write_slots is not None
            keys.index_copy_(0, self._write_slots, new_keys.to(keys.dtype))
            values.index_copy_(0, self._write_slots, new_values.to(values.dtype))
        if len(self._accesses) == 1:
            return self._span(self._accesses[0], keys, values, query, scaling, window, softcap).transpose(1, 2)
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for access in self._accesses:
            rows = slice(access.row, access.row + access.count)
            attended = self._span(access, keys, values, query[:, :, rows], scaling, window, softcap)
            output[:, rows] = attended.transpose(1, 2)
        return output

    def _span(
        self,
        access: _SpanAccess,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """[1, heads, T, head_dim] of one span."""
        start = 0 if window is None else max(0, access.first - window + 1)
        if access.slots is None:
            seen = slice(access.base + start, access.base + access.end)
            seen_keys, seen_values = keys[seen], values[seen]
        else:
            slots = access.slots[start:]
            seen_keys, seen_values = keys.index_select(0, slots), values.index_select(0, slots)
        if seen_keys.dtype != query.dtype:
            seen_keys, seen_values = seen_keys.to(query.dtype), seen_values.to(query.dtype)
        # [kv_heads, seen, head_dim], without a copy.
        seen_keys, seen_values = seen_keys.transpose(0, 1), seen_values.transpose(0, 1)
        _, heads, count, head_dim = query.shape
        kv_heads = seen_keys.shape[0]
        if count == 1 and softcap is None:
            # The heads of a group share their keys, and one token sees all of them: the group stands in the place of
            # the query axis, so that keys are read once for each group.
            grouped = query.view(1, kv_heads, heads // kv_heads, head_dim)
            attended = scaled_dot_product_attention(
                grouped, seen_keys.unsqueeze(0), seen_values.unsqueeze(0), scale=scaling
            )
            return attended.reshape(1, heads, 1, head_dim)
        # KV heads in the place of the batch axis: a group's keys are repeated by a stride of 0.
        grouped = query.view(kv_heads, heads // kv_heads, count, head_dim)
        size = (kv_heads, heads // kv_heads, seen_keys.shape[1], head_dim)
        seen_keys, seen_values = seen_keys.unsqueeze(1).expand(size), seen_values.unsqueeze(1).expand(size)
        plain_causal = access.first == 0 and (window is None or access.end <= window)
        if softcap is not None:
            mask = self._mask(access, start, window, query.device)
            attended = _softcapped(grouped, seen_keys, seen_values, mask, scaling, softcap)
        elif plain_causal:
            attended = scaled_dot_product_attention(grouped, seen_keys, seen_values, is_causal=True, scale=scaling)
        else:
            mask = self._mask(access, start, window, query.device)
            attended = scaled_dot_product_attention(grouped, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        return attended.reshape(1, heads, count, head_dim)

    def _mask(self, access: _SpanAccess, start: int, window: int | None, device: torch.device) -> torch.Tensor:
        """[T, seen] of booleans: which of the positions from `start` on each query sees. Shared by the layers."""
        key = (access.row, start, window or 0)
        mask = self._masks.get(key)
        if mask is None:
            queries = torch.arange(access.first, access.end, device=device).unsqueeze(1)
            positions = torch.arange(start, access.end, device=device).unsqueeze(0)
            mask = positions <= queries
            if window is not None:
                mask &= positions > queries - window
            self._masks[key] = mask
        return mask


def _access(pool: KvPool, span: Span, row: int, device: torch.device) -> _SpanAccess:
    size = pool.block_tokens
    blocks = pool.table(span.request).blocks[: -(-span.end_position // size)]
    base = blocks[0] * size
    if all(later - earlier == 1 for earlier, later in pairwise(blocks)):
        return _SpanAccess(row, span.token_count, span.first_position, base, None)
    starts = torch.tensor(blocks, device=device).unsqueeze(1) * size
    slots = (starts + torch.arange(size, device=device)).view(-1)[: span.end_position]
    return _SpanAccess(row, span.token_count, span.first_position, base, slots)


def _write_slots(access: _SpanAccess, device: torch.device) -> torch.Tensor:
    if access.slots is not None:
        return access.slots[access.first :]
    return torch.arange(access.base + access.first, access.base + access.end, device=device)


def _softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ keys.transpose(-1, -2) * scale / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    weights: torch.Tensor = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ values


def attention(  # noqa: PLR0913 (the arguments are those transformers gives)
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: StepAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers' layers call; `step` reaches it through their keyword arguments."""
    return step.attend(module.layer_idx, query, key, value, scaling, sliding_window, softcap), None


def register() -> None:
    """Make "edgeshard" known to transformers; doing it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
