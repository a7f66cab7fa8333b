"""Attention over the paged KV pool, for our own blocks and for transformers' layers
(`edgeshard_agent.model.library`).

A step's spans are packed into one row of T tokens. A `StepAttention` is built once for a step and
handed to every layer. It holds the layers' common data: the slots of the spans' keys and values.
Reads and writes use the layer's global index. On a CPU the operator of `ops.attention` does it all,
elsewhere `GatheredSpans`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.step import Span
from edgeshard_agent.model.attention.gathered import GatheredSpans
from edgeshard_agent.model.attention.kv import KvPool, KvTable, Tables, padded_tables, slots_behind
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.fused_blocks import NativePass
from edgeshard_agent.ops.kv_arena import NativeArena, RowArena
from edgeshard_agent.ops.recurrent import SpanStates

MOST_NATIVE_ROWS = 64
"""Rows of a step up to which blocks run in one native call. Beyond them Python's share of a step is
below a hundredth, and the buffers between operators would grow."""


class Rotary(NamedTuple):
    """Cosines and sines of a step's positions, [T, rotary_dim] each; and the factor of queries
    after the rotation, [T, 1, 1], or None."""

    cos: torch.Tensor
    sin: torch.Tensor
    query_factors: torch.Tensor | None = None


class StepAttention:
    """The KV side of one step, for all layers of a stage. Built after the pool has committed the
    step."""

    __slots__ = ("_arenas", "_gathered", "_in_chunks", "_layer_states", "_tables", "span_states")

    def __init__(self, pool: KvPool, spans: Sequence[Span], device: torch.device) -> None:
        self._arenas = pool.arena
        on_cpu = device.type == "cpu"
        self._tables = _tables(pool, spans) if on_cpu else None
        self._gathered = None if on_cpu else GatheredSpans(pool, spans, device)
        factory = _tables if on_cpu else partial(GatheredSpans, device=device)
        self._in_chunks: SpansInChunks | None = SpansInChunks(pool, spans, factory)
        self._layer_states = pool.layer_states
        self.span_states = _span_states(pool, spans, device) if pool.states.slots else None
        """The places of the spans' states; None if the model has no states."""

    @classmethod
    def gathered(cls, pool: KvPool, spans: GatheredSpans) -> StepAttention:
        """A step whose keys are gathered, wherever it runs; the pool must have arenas of rows."""
        step = cls.__new__(cls)
        step._arenas = pool.arena
        step._tables = None
        step._gathered = spans
        step._layer_states, step.span_states = pool.layer_states, None
        step._in_chunks = None
        return step

    def states(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The states that a layer keeps, each [slots, ...]."""
        return self._layer_states(layer)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        chunk: int = 0,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend. A `chunk` limits each token to its own
        chunk of that many positions.

        `query` is [T, heads, head_dim], `key` and `value` [T, kv_heads, head_dim], possibly views
        into one tensor. Returns [T, heads, head_dim], contiguous.
        """
        arena = self._arenas(layer)
        tables, gathered = self._tables, self._gathered
        if chunk:
            assert self._in_chunks is not None
            of = self._in_chunks.of(chunk)
            tables, gathered = (of, None) if isinstance(of, SpanTables) else (None, of)
        if tables is not None:
            return attend(query, key, value, arena, tables, scoring)
        assert gathered is not None and isinstance(arena, RowArena)
        return gathered.attend(query, key, value, arena, scoring)

    @property
    def is_native(self) -> bool:
        """Whether `native_pass` may be called, for layers that have native arenas."""
        return self._tables is not None and self._tables.rows <= MOST_NATIVE_ROWS

    def native_arenas(self, layers: Sequence[int]) -> list[NativeArena]:
        """The layers' arenas, which belong to the pool; empty if any of them is of another kind."""
        arenas = [self._arenas(layer) for layer in layers]
        native = [arena for arena in arenas if isinstance(arena, NativeArena)]
        return native if len(native) == len(arenas) else []

    def native_pass(self, hidden: torch.Tensor, rotary: Rotary, arena: NativeArena) -> NativePass:
        """The step as `run_blocks` takes it, from hidden states [T, width]."""
        assert self._tables is not None
        return NativePass(hidden, rotary.cos, rotary.sin, self._tables, arena)


class SpansInChunks:
    """A step's spans for layers whose tokens attend within chunks of positions; built when a layer
    needs them.

    Each piece of a span that lies in one chunk is as a request of its own, whose table begins with
    the chunk's first block. So a token sees the same, wherever its prompt is cut and however much
    of it is run again.
    """

    def __init__(
        self,
        pool: KvPool,
        spans: Sequence[Span],
        make: Callable[[Tables, Sequence[Span]], SpanTables | GatheredSpans],
    ) -> None:
        self._pool = pool
        self._spans = spans
        self._make = make
        self._made: dict[int, SpanTables | GatheredSpans] = {}

    def of(self, chunk: int) -> SpanTables | GatheredSpans:
        """The pieces in chunks of `chunk` positions. Raises InvalidArgumentError if blocks do not
        fill a chunk."""
        if chunk not in self._made:
            view = _ChunkView(self._pool, self._spans, chunk)
            self._made[chunk] = self._make(view, view.pieces)
        return self._made[chunk]


class _ChunkView:
    """The part of a pool that a step's tables are made of, with a request for each piece."""

    def __init__(self, pool: KvPool, spans: Sequence[Span], chunk: int) -> None:
        self.block_tokens = pool.block_tokens
        if chunk % self.block_tokens:
            raise InvalidArgumentError(
                f"block_tokens is {self.block_tokens}; it must divide {chunk}, within which layers "
                "attend",
                field="block_tokens",
            )
        self.pieces: list[Span] = []
        self._blocks: list[tuple[int, ...]] = []
        for span in spans:
            first = span.first_position
            while first < span.end_position:
                start = first - first % chunk
                end = min(span.end_position, start + chunk)
                self.pieces.append(Span(len(self.pieces), first - start, end - first))
                self._blocks.append(pool.table(span.request).blocks[start // self.block_tokens :])
                first = end

    def table(self, request: int) -> KvTable:
        return KvTable(self._blocks[request])


def _span_states(pool: KvPool, spans: Sequence[Span], device: torch.device) -> SpanStates:
    """The slots in which a step's spans find their states. If their tokens include guesses, now or
    before, also the slots for the states of the guesses.
    """
    tables = [pool.table(span.request) for span in spans]
    parts = [
        [table.source for table in tables],
        np.cumsum([0, *(span.token_count for span in spans)]),
    ]
    if any(table.guess_slots or table.source != table.slot for table in tables):
        parts.append(
            [
                slot
                for table, span in zip(tables, spans, strict=True)
                for slot in slots_behind(table, span)
            ]
        )
    return SpanStates(*(torch.tensor(part, dtype=torch.int32).to(device) for part in parts))


def _tables(pool: Tables, spans: Sequence[Span]) -> SpanTables:
    lengths = np.array([span.end_position for span in spans], dtype=np.int32)
    first_rows = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum([span.token_count for span in spans], out=first_rows[1:])
    blocks = torch.from_numpy(padded_tables(pool, spans))
    return SpanTables(
        blocks, torch.from_numpy(lengths), torch.from_numpy(first_rows), pool.block_tokens
    )
