"""Decode attention for accelerators: keys are gathered from the paged arena into one piece and attended in one call.

The pinned torch has no paged attention that runs on every card (docs/decisions.md), so a step reads its keys, writes
them side by side and reads them again. Shapes depend on the number of requests and the width of their tables alone and
nothing is read back to the host, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

MOST_GATHERED_BYTES = 128 << 20
"""Of keys, and again of values, gathered at a time: one long request among many short ones would fill the memory."""
MOST_GATHERED_ON_CPU_BYTES = 16 << 20
"""The same on a CPU, where only attention with sinks gathers: within the slack that a stage's workspace has."""


class Gather(NamedTuple):
    """Where the keys and values of B requests are, each with one new token; all layers of one window share it.

    `newest` [B] is the slot of each new token. `slots` [B, L] are those of all positions of the tables; one that is not
    seen is replaced by the newest, so that nothing but a request's own keys is ever read. `mask` [B, L] is 0 where a
    position is seen and -inf elsewhere.
    """

    newest: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(
        cls, tables: torch.Tensor, lengths: torch.Tensor, block_tokens: int, window: int, dtype: torch.dtype
    ) -> Gather:
        """From block tables int32 [B, n] and lengths int32 [B], the new tokens counted. No `window` is 0."""
        positions = torch.arange(tables.shape[1] * block_tokens, device=tables.device)
        slots = (tables.long().unsqueeze(2) * block_tokens + positions[:block_tokens]).flatten(1)
        ends = lengths.long().unsqueeze(1)
        newest = slots.gather(1, ends - 1)
        hidden = positions >= ends
        if window:
            hidden |= positions < ends - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=tables.device).masked_fill_(hidden, -torch.inf)
        return cls(newest.squeeze(1), torch.where(hidden, newest, slots), mask)


def gathered_attention(  # noqa: PLR0913 (as the operator it stands for)
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    gather: Gather,
    scale: float,
    softcap: float,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.paged_attention` for an accelerator; `gather` stands for its tables, lengths and window.

    A row's bits may depend on the width of the tables and the number of rows.
    """
    for arena, newest in ((keys, new_keys), (values, new_values)):
        arena.index_copy_(0, gather.newest, newest.to(arena.dtype))
    batch, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    # The heads of a group share their keys, and one token sees all of them: the group stands in the place of the query
    # axis, so that keys are read once for each group.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    row_bytes = gather.slots.shape[1] * kv_heads * head_dim * query.element_size()
    on_cpu = sinks is not None and query.device.type == "cpu"
    rows = max(1, (MOST_GATHERED_ON_CPU_BYTES if on_cpu else MOST_GATHERED_BYTES) // row_bytes)
    pieces = []
    for first in range(0, batch, rows):
        piece = slice(first, first + rows)
        slots, mask = gather.slots[piece], gather.mask[piece, None, None]
        seen_keys = keys[slots].to(query.dtype).transpose(1, 2)
        seen_values = values[slots].to(query.dtype).transpose(1, 2)
        if softcap or sinks is not None:
            columns = None if sinks is None else sinks.view(kv_heads, -1, 1)
            attended = explicit_attention(grouped[piece], seen_keys, seen_values, mask, scale, softcap or None, columns)
        else:
            attended = scaled_dot_product_attention(grouped[piece], seen_keys, seen_values, attn_mask=mask, scale=scale)
        pieces.append(attended)
    together = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return together.reshape(batch, heads, head_dim)


def explicit_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what `scaled_dot_product_attention` lacks.

    Scores are capped by tanh before the mask is added; `sinks`, broadcast to [..., queries, 1], are scores of a further
    position whose value is 0.
    """
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
    weights: torch.Tensor = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ values
