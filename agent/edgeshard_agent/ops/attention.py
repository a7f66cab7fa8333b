"""Decode attention over the paged KV arena: one new token of each of B requests."""

from __future__ import annotations

import ctypes

import torch

from edgeshard.errors import InvalidArgumentError
from edgeshard_agent.ops import native

# What the native kernel takes: head_dim a multiple of the vector, at most MOST_HEAD_DIM of layers.h.
_VECTOR = 16
_MOST_HEAD_DIM = 256


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
    _check(query, keys, values, block_tables, lengths, new)
    library = native.active()
    if library is None or not _is_native_shape(query, keys, values, block_tables, lengths, new):
        return _reference(query, keys, values, block_tables, lengths, block_tokens, scale, window, softcap, new)
    out = torch.empty(query.shape, dtype=query.dtype)
    rows, heads, head_dim = query.shape
    call = native.AttentionStruct(
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
    if len(block_tables) != rows or lengths.shape != (rows,) or {block_tables.dtype, lengths.dtype} != {torch.int32}:
        raise InvalidArgumentError(
            f"block_tables are {block_tables.dtype} {tuple(block_tables.shape)} and lengths {lengths.dtype} "
            f"{tuple(lengths.shape)}; they must be int32, one row for each of the {rows} queries",
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
    slots = []
    for row, (table, length) in enumerate(zip(block_tables.tolist(), lengths.tolist(), strict=True)):
        if not 1 <= length <= len(table) * block_tokens:
            raise _outside(row)
        used = torch.tensor(table[: -(-length // block_tokens)], device=keys.device)
        if int(used.min()) < 0 or int(used.max()) >= len(keys) // block_tokens:
            raise _outside(row)
        slots.append(
            (used.unsqueeze(1) * block_tokens + torch.arange(block_tokens, device=keys.device)).view(-1)[:length]
        )
    result = torch.empty_like(query)
    grouped = query.view(query.shape[0], keys.shape[1], -1, query.shape[2]).float()
    for row, seen in enumerate(slots):
        if new is not None:
            keys[seen[-1]], values[seen[-1]] = new[0][row].to(keys.dtype), new[1][row].to(values.dtype)
        seen = seen[-window:] if window else seen
        scores = grouped[row] @ keys[seen].float().permute(1, 2, 0) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        result[row] = (torch.softmax(scores, -1) @ values[seen].float().transpose(0, 1)).view(query.shape[1:])
    return result
