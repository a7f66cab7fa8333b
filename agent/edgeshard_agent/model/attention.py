"""Attention over the paged KV pool, for our own blocks and for transformers' layers (`edgeshard_agent.model.library`).

A step's spans are packed into one row of T tokens. A `StepAttention` is built once for a step and handed to every
layer; it holds what the layers share: which rows are one new token of a request (decodes, attended together) and which
are a longer piece of one (chunks, attended one by one), where their keys and values go, and the masks. Reads and writes
use the layer's global index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from edgeshard.domain.step import Span
from edgeshard_agent.model.causal import causal_lower_right
from edgeshard_agent.model.gathered import Gather, explicit_attention, gathered_attention
from edgeshard_agent.model.kv import KvPool
from edgeshard_agent.ops import NativeBlock, can_keep, chunk_attention, paged_attention, run_blocks

MOST_SCORE_BYTES = 32 << 20
"""Of scores at a time, where they are computed in the open (caps, sinks): within the slack of a stage's workspace."""
_BYTES_OF_A_SCORE = 10
"""As the model's dtype, with the mask added, and in float32 for the softmax."""

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's positions, [T, rotary_dim] each."""


class _Scores(NamedTuple):
    """How queries and keys become weights; no window, no cap and no sinks are None."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One span of several tokens: its place in the packed row, and its request's block table, int32 on the CPU.

    For accelerators, `base` is the slot of position 0 when the table's blocks follow one another in the arena, so that
    keys are read as a view; otherwise `slots` lists the slot of every position.
    """

    row: int
    count: int
    first: int
    table: torch.Tensor
    base: int
    slots: torch.Tensor | None

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The spans of one token: their rows (a slice where they are neighbours), block tables and lengths, int32."""

    rows: slice | torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor


class StepAttention:
    """The KV side of one step, for all layers of a stage. Built after the pool has committed the step."""

    __slots__ = ("_arenas", "_block_tokens", "_chunks", "_decodes", "_gathers", "_kv_dtype", "_masks", "_native")

    def __init__(self, pool: KvPool, spans: Sequence[Span], device: torch.device) -> None:
        self._arenas = pool.arena
        self._block_tokens = pool.block_tokens
        self._kv_dtype = pool.dtype
        self._native = device.type == "cpu"
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._gathers: dict[int, Gather] = {}
        self._chunks: list[_Chunk] = []
        decodes: list[tuple[int, Span]] = []
        row = 0
        for span in spans:
            if span.token_count == 1:
                decodes.append((row, span))
            else:
                self._chunks.append(_chunk(pool, span, row, device))
            row += span.token_count
        self._decodes = _decodes(pool, decodes, device) if decodes else None

    @classmethod
    def of_decodes(cls, pool: KvPool, tables: torch.Tensor, lengths: torch.Tensor) -> StepAttention:
        """One new token of each of B requests, as an accelerator attends them, with nothing read from the host.

        `tables` is int32 [B, n], every entry a block of the arena, and `lengths` int32 [B], the new token counted.
        """
        step = cls(pool, (), tables.device)
        step._native = False
        step._decodes = _Decodes(slice(0, len(tables)), tables, lengths)
        return step

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend.

        `query` is [T, heads, head_dim], `key` and `value` [T, kv_heads, head_dim], possibly views into one tensor. A
        query at position p sees the positions in (p - window, p]. `sinks` [heads] are scores of a further position with
        a value of 0, which every query sees. Returns [T, heads, head_dim], contiguous.
        """
        keys, values = self._arenas(layer)
        scores = _Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, sinks)
        decodes = self._decodes
        if decodes is not None and not self._chunks:
            return self._decode(decodes, keys, values, query, key, value, scores)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if decodes is not None:
            rows = decodes.rows
            output[rows] = self._decode(decodes, keys, values, query[rows], key[rows], value[rows], scores)
        for chunk in self._chunks:
            rows = chunk.rows
            output[rows] = self._attend_chunk(chunk, keys, values, query[rows], key[rows], value[rows], scores)
        return output

    @property
    def is_native(self) -> bool:
        """Whether `run_native` may be called: every span is one new token, and the kernels know the pool's dtype."""
        return self._native and self._decodes is not None and not self._chunks and can_keep(self._kv_dtype)

    def run_native(
        self, blocks: Sequence[NativeBlock], layers: Sequence[int], hidden: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """A step of decodes through consecutive blocks in one call: [T, width] from [T, width]."""
        decodes = self._decodes
        assert decodes is not None and self.is_native
        arenas = [self._arenas(layer) for layer in layers]
        return run_blocks(blocks, arenas, hidden, *rotary, decodes.tables, decodes.lengths, self._block_tokens)

    def _decode(
        self,
        decodes: _Decodes,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: _Scores,
    ) -> torch.Tensor:
        softcap = scores.softcap or 0.0
        window = scores.window or 0
        if not self._native or scores.sinks is not None:
            gather = self._gathers.get(window)
            if gather is None:
                gather = Gather.of(decodes.tables, decodes.lengths, self._block_tokens, window, query.dtype)
                self._gathers[window] = gather
            return gathered_attention(query, keys, values, gather, scores.scale, softcap, key, value, scores.sinks)
        return paged_attention(
            query,
            keys,
            values,
            decodes.tables,
            decodes.lengths,
            self._block_tokens,
            scores.scale,
            window,
            softcap,
            key,
            value,
        )

    def _attend_chunk(
        self,
        chunk: _Chunk,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: _Scores,
    ) -> torch.Tensor:
        """[count, heads, head_dim] of one chunk."""
        if not self._native or scores.sinks is not None:
            _write(chunk, keys, key)
            _write(chunk, values, value)
            return self._attend_gathered(chunk, keys, values, query, scores)
        return chunk_attention(
            query,
            keys,
            values,
            chunk.table,
            chunk.end,
            self._block_tokens,
            scores.scale,
            scores.window or 0,
            scores.softcap or 0.0,
            key,
            value,
        )

    def _attend_gathered(
        self,
        chunk: _Chunk,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        scores: _Scores,
    ) -> torch.Tensor:
        """[count, heads, head_dim] of one chunk whose keys and values have been written, as accelerators do it."""
        scale, window, softcap, sinks = scores
        start = 0 if window is None else max(0, chunk.first - window + 1)
        if chunk.slots is None:
            seen = slice(chunk.base + start, chunk.base + chunk.end)
            seen_keys, seen_values = keys[seen], values[seen]
        else:
            slots = chunk.slots[start:]
            seen_keys, seen_values = keys.index_select(0, slots), values.index_select(0, slots)
        if seen_keys.dtype != query.dtype:
            seen_keys, seen_values = seen_keys.to(query.dtype), seen_values.to(query.dtype)
        count, heads, head_dim = query.shape
        length, kv_heads, _ = seen_keys.shape
        grouped = query.view(count, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
        if softcap is not None or sinks is not None:
            attended = self._explicit(chunk, window, grouped, seen_keys, seen_values, scores)
            return attended.permute(2, 0, 1, 3).reshape(count, heads, head_dim)
        # KV heads in the place of the batch axis: a group's keys are repeated by a stride of 0.
        size = (kv_heads, heads // kv_heads, length, head_dim)
        seen_keys = seen_keys.transpose(0, 1).unsqueeze(1).expand(size)
        seen_values = seen_values.transpose(0, 1).unsqueeze(1).expand(size)
        plain_causal = window is None or chunk.end <= window
        if plain_causal and chunk.first == 0:
            attended = scaled_dot_product_attention(grouped, seen_keys, seen_values, is_causal=True, scale=scale)
        elif plain_causal:
            bias = self._lower_right(chunk)
            attended = scaled_dot_product_attention(grouped, seen_keys, seen_values, attn_mask=bias, scale=scale)
        else:
            mask = self._mask(chunk, start, window, query)
            attended = scaled_dot_product_attention(grouped, seen_keys, seen_values, attn_mask=mask, scale=scale)
        return attended.permute(2, 0, 1, 3).reshape(count, heads, head_dim)

    def _explicit(
        self,
        chunk: _Chunk,
        window: int | None,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        given: _Scores,
    ) -> torch.Tensor:
        """As `query` [KV heads, group, count, head dim], from keys and values [seen, KV heads, head dim].

        A KV head and some queries at a time, so that their scores stay within MOST_SCORE_BYTES.
        """
        kv_heads, group, count, _ = query.shape
        rows = max(1, MOST_SCORE_BYTES // (_BYTES_OF_A_SCORE * group * len(keys)))
        sinks = None if given.sinks is None else given.sinks.view(kv_heads, group, 1, 1)
        result = torch.empty_like(query)
        for first in range(0, count, rows):
            piece = slice(first, min(first + rows, count))
            mask = _mask(chunk, chunk.end - len(keys), window, query, piece)
            for head in range(kv_heads):
                result[head, :, piece] = explicit_attention(
                    query[head, :, piece],
                    keys[:, head],
                    values[:, head],
                    mask,
                    given.scale,
                    given.softcap,
                    None if sinks is None else sinks[head],
                )
        return result

    def _lower_right(self, chunk: _Chunk) -> torch.Tensor:
        """Says that the chunk's queries are the last of its positions, for which flash attention needs no mask."""
        key = (chunk.row, -1, 0)  # no mask begins there
        if key not in self._masks:
            self._masks[key] = causal_lower_right(chunk.count, chunk.end)
        return self._masks[key]

    def _mask(self, chunk: _Chunk, start: int, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """[count, seen]: 0 where a query sees a position from `start` on, -inf elsewhere. Shared by the layers."""
        key = (chunk.row, start, window or 0)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = _mask(chunk, start, window, query, slice(0, chunk.count))
        return mask


def _mask(chunk: _Chunk, start: int, window: int | None, query: torch.Tensor, rows: slice) -> torch.Tensor:
    """[rows, seen]: 0 where a query of the chunk's `rows` sees a position from `start` on, -inf elsewhere."""
    first, end = chunk.first + rows.start, chunk.first + rows.stop
    queries = torch.arange(first, end, device=query.device).unsqueeze(1)
    positions = torch.arange(start, chunk.end, device=query.device).unsqueeze(0)
    hidden = positions > queries
    if window is not None:
        hidden |= positions <= queries - window
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)


def _decodes(pool: KvPool, spans: Sequence[tuple[int, Span]], device: torch.device) -> _Decodes:
    tables = [pool.table(span.request).blocks for _, span in spans]
    used = [-(-span.end_position // pool.block_tokens) for _, span in spans]
    padded = np.zeros((len(spans), max(used)), dtype=np.int32)
    for index, (table, count) in enumerate(zip(tables, used, strict=True)):
        padded[index, :count] = table[:count]
    rows = [row for row, _ in spans]
    lengths = torch.tensor([span.end_position for _, span in spans], dtype=torch.int32, device=device)
    together = rows[-1] - rows[0] == len(rows) - 1
    return _Decodes(
        slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, device=device),
        torch.from_numpy(padded).to(device),
        lengths,
    )


def _chunk(pool: KvPool, span: Span, row: int, device: torch.device) -> _Chunk:
    size = pool.block_tokens
    blocks = pool.table(span.request).blocks[: -(-span.end_position // size)]
    table = torch.tensor(blocks, dtype=torch.int32)
    base = blocks[0] * size
    if all(later - earlier == 1 for earlier, later in pairwise(blocks)):
        return _Chunk(row, span.token_count, span.first_position, table, base, None)
    starts = table.to(device).long().unsqueeze(1) * size
    slots = (starts + torch.arange(size, device=device)).view(-1)[: span.end_position]
    return _Chunk(row, span.token_count, span.first_position, table, base, slots)


def _write(chunk: _Chunk, arena: torch.Tensor, new: torch.Tensor) -> None:
    if chunk.slots is None:
        arena[chunk.base + chunk.first : chunk.base + chunk.end].copy_(new)
    else:
        arena.index_copy_(0, chunk.slots[chunk.first :], new.to(arena.dtype))
