"""Attention for accelerators: a step's keys are gathered from the paged arena into one piece and
attended in one call.

The pinned torch has no paged attention that runs on every card
(docs/decisions/kernels.md#choice-a-gpu-decode-gathers-its-keys), so a
step reads its keys, writes them side by side and reads them again. For spans of one token, shapes
depend only on the number of requests and the width of their tables, and nothing is read back to the
host. So a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from edgeshard.domain.requests.step import Span
from edgeshard_agent.model.attention.kv import Tables, padded_tables
from edgeshard_agent.ops.attention import Scoring
from edgeshard_agent.ops.kv_arena import RowArena

MOST_GATHERED_BYTES = 128 << 20
"""Limit of keys, and again of values, gathered at a time: one long request among many short ones
would fill the memory.
"""
MOST_SCORE_BYTES = 32 << 20
"""Limit of the scores at a time if they are computed explicitly (caps, sinks): within the slack of
a stage's workspace.
"""
_BYTES_OF_A_SCORE = 10
"""As the model's dtype, with the mask added, and in float32 for the softmax."""


def causal_lower_right(queries: int, keys: int) -> Tensor:
    """torch's bias for flash attention: of scores [queries, keys], the queries are the last of the
    positions."""
    # Its module imports torch's compiler: a second, and 80 MB that a node on the CPU's kernels
    # never uses.
    from torch.nn.attention import bias

    causal_bias: Tensor = bias.causal_lower_right(queries, keys)
    return causal_bias


def prepare_causal(device: str) -> None:
    """Do the import before the first step, if chunks will need it."""
    if torch.device(device).type != "cpu":
        causal_lower_right(1, 1)


class Gather(NamedTuple):
    """The places of the keys and values of B requests, each with one new token; all layers of one
    window share it.

    `newest` [B] is the slot of each new token. `slots` [B, L] holds the slots of all positions of
    the tables. A position that is not seen is replaced by the newest one, so that only a request's
    own keys are ever read. `mask` [B, L] is 0 for a seen position and -inf elsewhere.
    """

    newest: Tensor
    slots: Tensor
    mask: Tensor

    @classmethod
    def of(
        cls, tables: Tensor, lengths: Tensor, block_tokens: int, window: int, dtype: torch.dtype
    ) -> Gather:
        """A gather of block tables int32 [B, n] and lengths int32 [B], the new tokens counted. No
        `window` is 0."""
        positions = torch.arange(tables.shape[1] * block_tokens, device=tables.device)
        slots = (tables.long().unsqueeze(2) * block_tokens + positions[:block_tokens]).flatten(1)
        ends = lengths.long().unsqueeze(1)
        newest = slots.gather(1, ends - 1)
        hidden = positions >= ends
        if window:
            hidden |= positions < ends - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=tables.device).masked_fill_(
            hidden, -torch.inf
        )
        return cls(newest.squeeze(1), torch.where(hidden, newest, slots), mask)


def gathered_attention(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    arena: RowArena,
    gather: Gather,
    scoring: Scoring,
) -> Tensor:
    """`ops.attend` for spans of one token on an accelerator; `gather` stands for its tables,
    lengths and window.

    A row's bits may depend on the width of the tables and the number of rows.
    """
    keys, values = arena.keys, arena.values
    for rows, newest in ((keys, new_keys), (values, new_values)):
        rows.index_copy_(0, gather.newest, newest.to(arena.dtype))
    batch, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    # The heads of a group share their keys, and one token sees all of them. So the group replaces
    # the query axis, and keys are read once for each group.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    row_bytes = gather.slots.shape[1] * kv_heads * head_dim * query.element_size()
    count = max(1, MOST_GATHERED_BYTES // row_bytes)
    scale, sinks = scoring.scale, scoring.sinks
    pieces = []
    for first in range(0, batch, count):
        piece = slice(first, first + count)
        slots, mask = gather.slots[piece], gather.mask[piece, None, None]
        seen_keys = keys[slots].to(query.dtype).transpose(1, 2)
        seen_values = values[slots].to(query.dtype).transpose(1, 2)
        if scoring.softcap or sinks is not None:
            columns = None if sinks is None else sinks.view(kv_heads, -1, 1)
            attended = explicit_attention(
                grouped[piece], seen_keys, seen_values, mask, scoring, columns
            )
        else:
            attended = scaled_dot_product_attention(
                grouped[piece], seen_keys, seen_values, attn_mask=mask, scale=scale
            )
        pieces.append(attended)
    together = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return together.reshape(batch, heads, head_dim)


def explicit_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with what `scaled_dot_product_attention` lacks.

    Scores are capped by tanh before the mask is added; `sinks`, `scoring`'s sinks broadcast to
    [..., queries, 1], are scores of an additional position whose value is 0.
    """
    scores = query @ keys.transpose(-1, -2) * scoring.scale
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
    weights: Tensor = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ values


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One span of several tokens and its place in the packed row.

    `base` is the slot of position 0 if the table's blocks follow one another in the arena, so that
    keys are read as a view. Otherwise `slots` lists the slot of every position.
    """

    row: int
    count: int
    first: int
    base: int
    slots: Tensor | None

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The spans of one token: their rows (a slice if they are neighbours), block tables and
    lengths, int32."""

    rows: slice | Tensor
    tables: Tensor
    lengths: Tensor


class GatheredSpans:
    """The spans of a step on an accelerator.

    Spans of one token (decodes) are attended together, longer ones (chunks) one by one.
    """

    __slots__ = ("_block_tokens", "_chunks", "_decodes", "_gathers", "_masks")

    def __init__(self, pool: Tables, spans: Sequence[Span], device: torch.device) -> None:
        self._block_tokens = pool.block_tokens
        self._masks: dict[tuple[int, int, int], Tensor] = {}
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
    def of_decodes(cls, pool: Tables, tables: Tensor, lengths: Tensor) -> GatheredSpans:
        """One new token of each of B requests, with nothing read from the host.

        `tables` is int32 [B, n], every entry a block of the arena, and `lengths` int32 [B], the new
        token counted.
        """
        step = cls(pool, (), tables.device)
        step._decodes = _Decodes(slice(0, len(tables)), tables, lengths)
        return step

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, arena: RowArena, scoring: Scoring
    ) -> Tensor:
        """Attend as `ops.attention.attend` does."""
        decodes = self._decodes
        if decodes is not None and not self._chunks:
            return self._decode(decodes, query, key, value, arena, scoring)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if decodes is not None:
            rows = decodes.rows
            output[rows] = self._decode(
                decodes, query[rows], key[rows], value[rows], arena, scoring
            )
        for chunk in self._chunks:
            piece = chunk.rows
            output[piece] = self._attend_chunk(
                chunk, query[piece], key[piece], value[piece], arena, scoring
            )
        return output

    def _decode(
        self,
        decodes: _Decodes,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arena: RowArena,
        scoring: Scoring,
    ) -> Tensor:
        gather = self._gathers.get(scoring.window)
        if gather is None:
            gather = Gather.of(
                decodes.tables, decodes.lengths, self._block_tokens, scoring.window, query.dtype
            )
            self._gathers[scoring.window] = gather
        return gathered_attention(query, key, value, arena, gather, scoring)

    def _attend_chunk(
        self,
        chunk: _Chunk,
        query: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
        arena: RowArena,
        scoring: Scoring,
    ) -> Tensor:
        """[count, heads, head_dim] of one chunk."""
        keys, values = arena.keys, arena.values
        _write(chunk, keys, new_keys)
        _write(chunk, values, new_values)
        scale, window = scoring.scale, scoring.window or None
        start = 0 if window is None else max(0, chunk.first - window + 1)
        if chunk.slots is None:
            rows = slice(chunk.base + start, chunk.base + chunk.end)
            seen_keys, seen_values = keys[rows], values[rows]
        else:
            slots = chunk.slots[start:]
            seen_keys, seen_values = keys.index_select(0, slots), values.index_select(0, slots)
        if seen_keys.dtype != query.dtype:
            seen_keys, seen_values = seen_keys.to(query.dtype), seen_values.to(query.dtype)
        count, heads, head_dim = query.shape
        length, kv_heads, _ = seen_keys.shape
        grouped = query.view(count, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
        if scoring.softcap or scoring.sinks is not None:
            attended = self._explicit(chunk, window, grouped, seen_keys, seen_values, scoring)
            return attended.permute(2, 0, 1, 3).reshape(count, heads, head_dim)
        # KV heads in the place of the batch axis: a group's keys are repeated by a stride of 0.
        size = (kv_heads, heads // kv_heads, length, head_dim)
        seen_keys = seen_keys.transpose(0, 1).unsqueeze(1).expand(size)
        seen_values = seen_values.transpose(0, 1).unsqueeze(1).expand(size)
        plain_causal = window is None or chunk.end <= window
        mask = None
        if not plain_causal:
            mask = self._mask(chunk, start, window, query)
        elif chunk.first:
            mask = self._lower_right(chunk)
        attended = scaled_dot_product_attention(
            grouped, seen_keys, seen_values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        return attended.permute(2, 0, 1, 3).reshape(count, heads, head_dim)

    def _explicit(
        self,
        chunk: _Chunk,
        window: int | None,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Attention shaped as `query` [KV heads, group, count, head dim], from keys and values
        [seen, KV heads, head dim].

        A KV head and some queries at a time, so that their scores stay within MOST_SCORE_BYTES.
        """
        kv_heads, group, count, _ = query.shape
        rows = max(1, MOST_SCORE_BYTES // (_BYTES_OF_A_SCORE * group * len(keys)))
        sinks = None if scoring.sinks is None else scoring.sinks.view(kv_heads, group, 1, 1)
        result = torch.empty_like(query)
        for first in range(0, count, rows):
            piece = slice(first, min(first + rows, count))
            mask = _mask(chunk, chunk.end - len(keys), window, query, piece)
            for head in range(kv_heads):
                some, of_head = query[head, :, piece], None if sinks is None else sinks[head]
                attended = explicit_attention(
                    some, keys[:, head], values[:, head], mask, scoring, of_head
                )
                result[head, :, piece] = attended
        return result

    def _lower_right(self, chunk: _Chunk) -> Tensor:
        """Says that the chunk's queries are the last of its positions, for which flash attention
        needs no mask."""
        key = (chunk.row, -1, 0)  # no mask begins there
        if key not in self._masks:
            self._masks[key] = causal_lower_right(chunk.count, chunk.end)
        return self._masks[key]

    def _mask(self, chunk: _Chunk, start: int, window: int | None, query: Tensor) -> Tensor:
        """[count, seen]: 0 for a position from `start` on that a query sees, -inf elsewhere. Shared
        by the layers."""
        key = (chunk.row, start, window or 0)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = _mask(chunk, start, window, query, slice(0, chunk.count))
        return mask


def _mask(chunk: _Chunk, start: int, window: int | None, query: Tensor, rows: slice) -> Tensor:
    """[rows, seen]: 0 for a position from `start` on that a query of the chunk's `rows` sees, -inf
    elsewhere."""
    first, end = chunk.first + rows.start, chunk.first + rows.stop
    queries = torch.arange(first, end, device=query.device).unsqueeze(1)
    positions = torch.arange(start, chunk.end, device=query.device).unsqueeze(0)
    hidden = positions > queries
    if window is not None:
        hidden |= positions <= queries - window
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(
        hidden, -torch.inf
    )


def _decodes(pool: Tables, spans: Sequence[tuple[int, Span]], device: torch.device) -> _Decodes:
    rows = [row for row, _ in spans]
    tables = torch.from_numpy(padded_tables(pool, [span for _, span in spans])).to(device)
    lengths = torch.tensor(
        [span.end_position for _, span in spans], dtype=torch.int32, device=device
    )
    together = rows[-1] - rows[0] == len(rows) - 1
    return _Decodes(
        slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, device=device),
        tables,
        lengths,
    )


def _chunk(pool: Tables, span: Span, row: int, device: torch.device) -> _Chunk:
    size = pool.block_tokens
    blocks = pool.table(span.request).blocks[: -(-span.end_position // size)]
    base = blocks[0] * size
    if all(later - earlier == 1 for earlier, later in pairwise(blocks)):
        return _Chunk(row, span.token_count, span.first_position, base, None)
    starts = torch.tensor(blocks, device=device).unsqueeze(1) * size
    slots = (starts + torch.arange(size, device=device)).view(-1)[: span.end_position]
    return _Chunk(row, span.token_count, span.first_position, base, slots)


def _write(chunk: _Chunk, arena: Tensor, new: Tensor) -> None:
    if chunk.slots is None:
        arena[chunk.base + chunk.first : chunk.base + chunk.end].copy_(new)
    else:
        arena.index_copy_(0, chunk.slots[chunk.first :], new.to(arena.dtype))
