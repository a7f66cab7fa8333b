"""Attention over the paged KV arena: one new token of each of B requests, or several of one request."""

from __future__ import annotations

import ctypes

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard_agent.ops import native

# What the native kernel takes: head_dim a multiple of the vector, at most MOST_HEAD_DIM of layers.h.
_VECTOR = 16
_MOST_HEAD_DIM = 256
_QUERIES_AT_ONCE = 64


def can_attend(head_dim: int) -> bool:
    """Whether the native kernel takes heads of this width."""
    return head_dim % _VECTOR == 0 and head_dim <= _MOST_HEAD_DIM


def can_keep(dtype: torch.dtype) -> bool:
    """Whether the native kernels take keys and values of this dtype."""
    return dtype in native.ELEMENTS


def paged_attention(  # noqa: PLR0913 (the memory, where each request is in it, and how scores are made)
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    block_tokens: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    new_keys: torch.Tensor | None = None,
    new_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, heads, head_dim] from query [B, heads, head_dim] over arenas `keys`, `values` [slots, kv_heads, head_dim].

    `block_tables` is int32 [B, n] and `lengths` int32 [B]: of request b the positions 0 to lengths[b] - 1 are seen,
    the new token's own included; with a `window` only the last `window` of them. Slot = block * block_tokens + offset.
    `new_keys` and `new_values` [B, kv_heads, head_dim], where given, are first written at the last position. A
    `softcap` above 0 caps the scores by tanh. Scores, weights and sums are float32.

    Raises InvalidArgumentError where shapes do not fit, or a length or block lies outside the table or the arena;
    nothing has been written then.
    """
    new = None if new_keys is None or new_values is None else (new_keys, new_values)
    _check(query, keys, values, block_tables, lengths, len(query), new)
    library = native.active()
    if library is None or not _is_native_shape(query, keys, values, block_tables, lengths, new):
        return _reference(query, keys, values, block_tables, lengths, block_tokens, scale, window, softcap, new)
    out = torch.empty(query.shape, dtype=query.dtype)
    call = _struct(query, keys, values, block_tables, lengths, out, block_tokens, scale, window, softcap)
    refused = library.edgeshard_attention(
        ctypes.addressof(call),
        None if new is None else new[0].data_ptr(),
        None if new is None else new[1].data_ptr(),
        0 if new is None else new[0].stride(0),
        torch.get_num_threads(),
    )
    if refused >= 0:
        raise _outside(refused)
    return out


def chunk_attention(  # noqa: PLR0913 (as paged_attention)
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    block_tokens: int,
    scale: float,
    window: int,
    softcap: float,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> torch.Tensor:
    """`paged_attention` for the last T of the `length` tokens of one request: [T, heads, head_dim] from the same.

    `block_table` is int32 [n]; `new_keys` and `new_values` [T, kv_heads, head_dim] are first written at the last T
    positions, and each token sees the positions up to its own. The native kernel rounds softmax's weights to bfloat16
    where query, keys and values all are and the CPU multiplies such numbers; all else is float32. A token's result is
    there the same bit for bit whichever tokens are in the chunk with it.

    Raises InvalidArgumentError as `paged_attention`, and where there are more than `length` tokens.
    """
    tables, lengths, new = block_table.unsqueeze(0), torch.tensor([length], dtype=torch.int32), (new_keys, new_values)
    _check(query, keys, values, tables, lengths, 1, new)
    library = native.active()
    if library is None or not _is_native_shape(query, keys, values, tables, lengths, new):
        return _chunk_reference(query, keys, values, block_table, length, block_tokens, scale, window, softcap, new)
    out = torch.empty(query.shape, dtype=query.dtype)
    call = _struct(query, keys, values, tables, lengths, out, block_tokens, scale, window, softcap)
    refused = library.edgeshard_chunk_attention(
        ctypes.addressof(call),
        new_keys.data_ptr(),
        new_values.data_ptr(),
        new_keys.stride(0),
        torch.get_num_threads(),
    )
    if refused >= 0:
        raise _outside(0)
    return out


def _struct(  # noqa: PLR0913 (as paged_attention)
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    block_tokens: int,
    scale: float,
    window: int,
    softcap: float,
) -> native.AttentionStruct:
    rows, heads, head_dim = query.shape
    return native.AttentionStruct(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        block_tables.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        query.stride(0),
        out.stride(0),
        block_tables.stride(0),
        rows,
        heads,
        keys.shape[1],
        head_dim,
        block_tokens,
        block_tables.shape[1],
        keys.shape[0] // block_tokens,
        window,
        native.ELEMENTS[query.dtype],
        native.ELEMENTS[keys.dtype],
        scale,
        softcap,
    )


def _is_native_shape(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor] | None,
) -> bool:
    dtype, head_dim = query.dtype, query.shape[2]
    if not query.is_cpu or dtype not in native.ELEMENTS or keys.dtype not in native.ELEMENTS:
        return False
    if not can_attend(head_dim) or keys.dtype is not values.dtype:
        return False
    if not (keys.is_contiguous() and values.is_contiguous() and lengths.is_contiguous()) or block_tables.stride(1) != 1:
        return False
    if new is not None and new[0].stride(0) != new[1].stride(0):
        return False
    rows = (query,) if new is None else (query, *new)
    return all(x.dtype is dtype and x.stride(2) == 1 and x.stride(1) == head_dim for x in rows)


def _outside(row: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the length or a block of row {row} lies outside its table or the arena", field="block_tables"
    )


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    requests: int,
    new: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    if keys.shape != values.shape or keys.shape[2] != head_dim or heads % kv_heads:
        raise InvalidArgumentError(
            f"keys are {tuple(keys.shape)} and values {tuple(values.shape)}; for queries {tuple(query.shape)} both "
            "must be [slots, kv_heads, head_dim], kv_heads dividing heads",
            field="keys",
        )
    if (
        len(block_tables) != requests
        or lengths.shape != (requests,)
        or {block_tables.dtype, lengths.dtype} != {torch.int32}
    ):
        raise InvalidArgumentError(
            f"block_tables are {block_tables.dtype} {tuple(block_tables.shape)} and lengths {lengths.dtype} "
            f"{tuple(lengths.shape)}; they must be int32, one row for each of the {requests} requests",
            field="block_tables",
        )
    if new is not None and any(tensor.shape != (rows, kv_heads, head_dim) for tensor in new):
        raise InvalidArgumentError(f"new keys and values must be {(rows, kv_heads, head_dim)}", field="new")


def _reference(  # noqa: PLR0913 (as paged_attention)
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    block_tokens: int,
    scale: float,
    window: int,
    softcap: float,
    new: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """The same in plain torch, request by request."""
    seen = []
    for row, (table, length) in enumerate(zip(block_tables, lengths.tolist(), strict=True)):
        slots = _slots(table, length, block_tokens, len(keys))
        if slots is None:
            raise _outside(row)
        seen.append(slots)
    result = torch.empty_like(query)
    for row, slots in enumerate(seen):
        if new is not None:
            keys[slots[-1]], values[slots[-1]] = new[0][row].to(keys.dtype), new[1][row].to(values.dtype)
        result[row] = _attended(query[row : row + 1], keys, values, slots, scale, window, softcap)
    return result


def _chunk_reference(  # noqa: PLR0913 (as paged_attention)
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    block_tokens: int,
    scale: float,
    window: int,
    softcap: float,
    new: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The same in plain torch, a few queries at a time: scores of all would take memory by the square."""
    slots, count = _slots(block_table, length, block_tokens, len(keys)), len(query)
    if slots is None or count > length:
        raise _outside(0)
    keys[slots[-count:]], values[slots[-count:]] = new[0].to(keys.dtype), new[1].to(values.dtype)
    result = torch.empty_like(query)
    for first in range(0, count, _QUERIES_AT_ONCE):
        some = query[first : first + _QUERIES_AT_ONCE]
        end = length - count + first + len(some)
        result[first : first + len(some)] = _attended(some, keys, values, slots[:end], scale, window, softcap)
    return result


def _slots(table: torch.Tensor, length: int, block_tokens: int, arena: int) -> torch.Tensor | None:
    """Of every position up to `length`; None where that, or a block, lies outside the table or the arena."""
    if not 1 <= length <= len(table) * block_tokens:
        return None
    used = table[: -(-length // block_tokens)].long()
    if int(used.min()) < 0 or int(used.max()) >= arena // block_tokens:
        return None
    return (used.unsqueeze(1) * block_tokens + torch.arange(block_tokens)).view(-1)[:length]


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Queries [T, heads, head_dim] of the last T of the positions that have these slots, in float32."""
    count, length = len(query), len(slots)
    start = max(0, length - count - window + 1) if window else 0
    seen = slots[start:]
    grouped = query.reshape(count, keys.shape[1], -1, query.shape[2]).float().permute(1, 2, 0, 3)
    scores = grouped @ keys[seen].float().permute(1, 2, 0).unsqueeze(1) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    positions = torch.arange(length)
    queries = positions[length - count :].unsqueeze(1)
    hidden = positions[start:] > queries
    if window:
        hidden |= positions[start:] <= queries - window
    weights = torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1)
    attended = weights @ values[seen].float().transpose(0, 1).unsqueeze(1)
    return attended.permute(2, 0, 1, 3).reshape(query.shape)
