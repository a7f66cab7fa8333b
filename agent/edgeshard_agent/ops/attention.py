"""Attention of a step's spans, each some new tokens of one request, over the paged KV memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard_agent.ops import layouts, native
from edgeshard_agent.ops.kv_arena import KvArena, NativeArena

_QUERIES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class SpanTables:
    """The places of S spans and of their requests' keys and values; int32 on the CPU, each
    contiguous.

    Rows first_rows[s] to first_rows[s + 1] - 1 of a step are span s, the last of the lengths[s]
    tokens of a request, whose position p is in block blocks[s, p // block_tokens].
    """

    blocks: Tensor
    lengths: Tensor
    first_rows: Tensor
    block_tokens: int

    def __post_init__(self) -> None:
        count = self.span_count
        fits = (
            self.blocks.dim() == 2
            and len(self.blocks) == count
            and self.first_rows.shape == (count + 1,)
        )
        integers = (self.blocks, self.lengths, self.first_rows)
        if not fits or any(x.dtype is not torch.int32 or not x.is_contiguous() for x in integers):
            raise InvalidArgumentError(
                "tables must be contiguous int32 with a row for each span", field="blocks"
            )
        edges = self.first_rows.tolist()
        if edges[0] != 0 or any(end <= first for first, end in pairwise(edges)):
            raise InvalidArgumentError(
                f"spans begin at rows {edges}; each must have one or more", field="first_rows"
            )

    @property
    def span_count(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        return int(self.first_rows[-1])


@dataclass(frozen=True, slots=True)
class Scoring:
    """The way from queries and keys to weights.

    Products are multiplied by `scale`; a `softcap` above 0 caps them by tanh; with a `window` above
    0 a query sees the last `window` positions up to its own. `sinks` [heads] are scores of a
    further position whose value is 0.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


def attend(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    arena: KvArena,
    spans: SpanTables,
    scoring: Scoring,
) -> Tensor:
    """[T, heads, head_dim] from query [T, heads, head_dim]; `new_keys` and `new_values` are [T,
    kv_heads, head_dim].

    New keys and values are first written at the last positions of each span. Each token then sees
    the positions up to its own. Scores, weights and sums are float32; the native kernel rounds
    softmax's weights to bfloat16 where query, keys and values all are and the CPU multiplies such
    numbers. There, over a `NativeArena`, a token's result is the same bit for bit whichever tokens
    are in the call with it, by however many threads.

    Raises InvalidArgumentError where shapes do not fit, or a length or block lies outside the table
    or the arena; nothing has been written then.
    """
    _check(query, new_keys, new_values, arena, spans)
    library = native.active()
    if library is None or not isinstance(arena, NativeArena):
        return _reference(query, new_keys, new_values, arena, spans, scoring)
    dtype = query.dtype
    if dtype not in native.ELEMENTS:
        wide = attend(query.float(), new_keys.float(), new_values.float(), arena, spans, scoring)
        return wide.to(dtype)
    return _native(
        library, _by_rows(query), _by_rows(new_keys), _by_rows(new_values), arena, spans, scoring
    )


def _native(
    library: ctypes.CDLL,
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    arena: NativeArena,
    spans: SpanTables,
    scoring: Scoring,
) -> Tensor:
    if new_keys.stride(0) != new_values.stride(0):
        new_keys, new_values = new_keys.contiguous(), new_values.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    heads, head_dim = query.shape[1:]
    call = layouts.AttentionStruct(
        query=query.data_ptr(),
        keys=arena.keys.data_ptr(),
        values=arena.values.data_ptr(),
        new_keys=new_keys.data_ptr(),
        new_values=new_values.data_ptr(),
        block_tables=spans.blocks.data_ptr(),
        lengths=spans.lengths.data_ptr(),
        first_rows=spans.first_rows.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        query_stride=query.stride(0),
        out_stride=out.stride(0),
        new_stride=new_keys.stride(0),
        table_stride=spans.blocks.stride(0),
        spans=spans.span_count,
        heads=heads,
        kv_heads=new_keys.shape[1],
        head_dim=head_dim,
        block_tokens=spans.block_tokens,
        table_blocks=spans.blocks.shape[1],
        arena_blocks=arena.slots // spans.block_tokens,
        window=scoring.window,
        element=native.ELEMENTS[query.dtype],
        kv_element=arena.element,
        scale=scoring.scale,
        softcap=scoring.softcap,
    )
    refused = library.edgeshard_attention(ctypes.addressof(call), torch.get_num_threads())
    if refused >= 0:
        raise _outside(refused)
    return out


def _by_rows(x: Tensor) -> Tensor:
    """[T, heads, head_dim] whose rows are each one piece of memory, as the kernel wants them."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _outside(span: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the length or a block of span {span} lies outside its table or the arena", field="blocks"
    )


def _check(
    query: Tensor, new_keys: Tensor, new_values: Tensor, arena: KvArena, spans: SpanTables
) -> None:
    rows, heads, head_dim = query.shape
    kv_heads, kept_dim = arena.width
    if kept_dim != head_dim or heads % kv_heads:
        raise InvalidArgumentError(
            f"the arena has {kv_heads} KV heads of {kept_dim}; queries are {tuple(query.shape)}: "
            "KV heads must divide "
            "heads, and both must have one width",
            field="arena",
        )
    if new_keys.shape != (rows, kv_heads, head_dim) or new_values.shape != new_keys.shape:
        raise InvalidArgumentError(
            f"new keys are {tuple(new_keys.shape)} and values {tuple(new_values.shape)}; both must "
            "be "
            f"{(rows, kv_heads, head_dim)}",
            field="new_keys",
        )
    if spans.rows != rows:
        raise InvalidArgumentError(
            f"spans have {spans.rows} rows; there are {rows} queries", field="first_rows"
        )


def _reference(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    arena: KvArena,
    spans: SpanTables,
    scoring: Scoring,
) -> Tensor:
    """The same in plain torch, a few queries of a span at a time: scores of all would take memory
    by the square."""
    edges, lengths = spans.first_rows.tolist(), spans.lengths.tolist()
    all_slots = []
    for span, (table, length) in enumerate(zip(spans.blocks, lengths, strict=True)):
        slots = _slots(table, length, spans.block_tokens, arena.slots)
        if slots is None or edges[span + 1] - edges[span] > length:
            raise _outside(span)
        all_slots.append(slots)
    result = torch.empty(query.shape, dtype=query.dtype)
    for (first, end), slots in zip(pairwise(edges), all_slots, strict=True):
        before = len(slots) - (end - first)
        arena.write(slots[before:], new_keys[first:end], new_values[first:end])
        for row in range(first, end, _QUERIES_AT_ONCE):
            some = slice(row, min(row + _QUERIES_AT_ONCE, end))
            result[some] = _attended(
                query[some], arena, slots[: before + some.stop - first], scoring
            )
    return result


def _slots(table: Tensor, length: int, block_tokens: int, arena: int) -> Tensor | None:
    """Slots of every position up to `length`; None where that, or a block, lies outside the table
    or the arena."""
    if not 1 <= length <= len(table) * block_tokens:
        return None
    used = table[: -(-length // block_tokens)].long()
    if int(used.min()) < 0 or int(used.max()) >= arena // block_tokens:
        return None
    return (used.unsqueeze(1) * block_tokens + torch.arange(block_tokens)).view(-1)[:length]


def _attended(query: Tensor, arena: KvArena, slots: Tensor, scoring: Scoring) -> Tensor:
    """Queries [T, heads, head_dim] of the last T of the positions that have these slots, in
    float32."""
    count = len(query)
    length = len(slots)
    window = scoring.window
    start = max(0, length - count - window + 1) if window else 0
    keys, values = (part.float() for part in arena.read(slots[start:]))
    grouped = query.reshape(count, keys.shape[1], -1, query.shape[2]).float().permute(1, 2, 0, 3)
    scores = grouped @ keys.permute(1, 2, 0).unsqueeze(1) * scoring.scale
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    positions = torch.arange(length)
    queries = positions[length - count :].unsqueeze(1)
    hidden = positions[start:] > queries
    if window:
        hidden |= positions[start:] <= queries - window
    scores.masked_fill_(hidden, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(*grouped.shape[:2], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, -1)[..., : length - start]
    attended = weights @ values.transpose(0, 1).unsqueeze(1)
    return attended.permute(2, 0, 1, 3).reshape(query.shape)
