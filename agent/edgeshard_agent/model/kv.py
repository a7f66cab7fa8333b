"""The paged KV memory of one stage.

The pool holds no allocator: the head grants blocks, the pool checks and obeys. A step is validated as a whole against a
draft of the tables it touches and only then committed, so a refused step changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgeshard.dtypes import DType
from edgeshard.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.generation import Sampling
from edgeshard.model import LayerRange
from edgeshard.step import KvGrant, Span, StepPlan
from edgeshard_agent.model.tensors import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class KvTable:
    """A request's blocks in order of position, and how many positions hold keys and values."""

    blocks: tuple[int, ...] = ()
    length: int = 0


@dataclass(slots=True)
class KvDraft:
    """What a validated step will change: None for a freed table, and the owner of each block that changes hands."""

    tables: dict[int, KvTable | None]
    owners: dict[int, int | None]


class KvPool:
    """Keys and values of `blocks` blocks of `block_tokens` tokens for every layer of a stage.

    Each layer's arena is two tensors of shape [blocks * block_tokens, kv_heads, head_dim]: slot s is token
    s % block_tokens of block s // block_tokens. Memory is taken and touched at once, so it cannot run short later.
    """

    def __init__(
        self,
        layers: LayerRange,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: DType,
        device: str,
    ) -> None:
        for name, value in (("kv_blocks", blocks), ("block_tokens", block_tokens)):
            if value < 1:
                raise InvalidArgumentError(f"{name} is {value}; it must be 1 or more", field=name)
        self.layers = layers
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.block_bytes = 2 * len(layers) * block_tokens * kv_heads * head_dim * dtype.itemsize
        size = (blocks * block_tokens, kv_heads, head_dim)
        try:
            self._keys = [_touched(size, dtype, device) for _ in range(len(layers))]
            self._values = [_touched(size, dtype, device) for _ in range(len(layers))]
        except RuntimeError as error:
            raise ResourceExhaustedError(
                f"no memory for {self.bytes_capacity} bytes of KV blocks: {error}", field="kv_blocks"
            ) from error
        self._tables: dict[int, KvTable] = {}
        self._owners: dict[int, int] = {}

    @property
    def bytes_capacity(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the blocks that are in a request's table, filled or not."""
        return len(self._owners) * self.block_bytes

    @property
    def requests(self) -> frozenset[int]:
        return frozenset(self._tables)

    def table(self, request: int) -> KvTable:
        """The request's table, empty for one that holds none."""
        return self._tables.get(request, KvTable())

    def arena(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, by its global index."""
        index = layer - self.layers.first
        if not 0 <= index < len(self._keys):
            raise InvalidArgumentError(f"layer {layer} is not in this stage, which holds {self.layers}", field="layer")
        return self._keys[index], self._values[index]

    # -- one step ------------------------------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> KvDraft:
        """Validate frees, grants and spans in this order; nothing changes until the draft is committed.

        Raises InvalidArgumentError for what can never be right (a block that does not exist, an empty span) and
        FailedPreconditionError for what does not fit the tables as they are.
        """
        draft = KvDraft({}, {})
        for request in plan.frees:
            self._draft_free(draft, request)
        for grant in plan.grants:
            self._draft_grant(draft, grant)
        seen: set[int] = set()
        for span in plan.spans:
            if span.request in seen:
                raise InvalidArgumentError(f"request {span.request} has two spans in one step", field="spans")
            seen.add(span.request)
            self._draft_span(draft, span)
        return draft

    def commit(self, draft: KvDraft) -> None:
        """Make a draft, checked against the pool as it is, the state of the pool."""
        for request, table in draft.tables.items():
            if table is None:
                self._tables.pop(request, None)
            else:
                self._tables[request] = table
        for block, owner in draft.owners.items():
            if owner is None:
                self._owners.pop(block, None)
            else:
                self._owners[block] = owner

    def _peek(self, draft: KvDraft, request: int) -> KvTable:
        if request in draft.tables:
            return draft.tables[request] or KvTable()
        return self._tables.get(request, KvTable())

    def _draft_free(self, draft: KvDraft, request: int) -> None:
        for block in self._peek(draft, request).blocks:
            draft.owners[block] = None
        draft.tables[request] = None

    def _draft_grant(self, draft: KvDraft, grant: KvGrant) -> None:
        table = self._peek(draft, grant.request)
        if grant.first_index != len(table.blocks):
            raise FailedPreconditionError(
                f"a grant to request {grant.request} begins at index {grant.first_index}, "
                f"but its table has {len(table.blocks)} blocks",
                field="grants.first_index",
                reason="KV_GRANT_OUT_OF_ORDER",
            )
        for block in grant.blocks:
            if not 0 <= block < self.blocks:
                raise InvalidArgumentError(
                    f"KV block {block} does not exist: the pool has blocks 0 to {self.blocks - 1}",
                    field="grants.blocks",
                    reason="KV_BLOCK_OUT_OF_RANGE",
                )
            owner = draft.owners[block] if block in draft.owners else self._owners.get(block)
            if owner is not None:
                raise FailedPreconditionError(
                    f"KV block {block}, granted to request {grant.request}, belongs to request {owner}",
                    field="grants.blocks",
                    reason="KV_BLOCK_IN_USE",
                )
            draft.owners[block] = grant.request
        draft.tables[grant.request] = KvTable(table.blocks + tuple(grant.blocks), table.length)

    def _draft_span(self, draft: KvDraft, span: Span) -> None:
        if span.token_count < 1 or span.first_position < 0:
            raise InvalidArgumentError(
                f"request {span.request} has a span of {span.token_count} tokens at {span.first_position}",
                field="spans",
            )
        table = self._peek(draft, span.request)
        if span.first_position > table.length:
            raise FailedPreconditionError(
                f"a span of request {span.request} begins at {span.first_position}, "
                f"beyond its KV length {table.length}",
                field="spans.first_position",
                reason="KV_GAP",
            )
        if span.first_position < table.length and span.sampling is None:
            raise FailedPreconditionError(
                f"a span of request {span.request} begins at {span.first_position}, before its KV length "
                f"{table.length}; only its first span in an epoch may truncate",
                field="spans.first_position",
                reason="KV_TRUNCATION_REFUSED",
            )
        if span.end_position > len(table.blocks) * self.block_tokens:
            raise FailedPreconditionError(
                f"a span of request {span.request} ends at {span.end_position}, but its {len(table.blocks)} blocks "
                f"hold {len(table.blocks) * self.block_tokens} tokens",
                field="spans.token_count",
                reason="KV_TABLE_TOO_SHORT",
            )
        draft.tables[span.request] = KvTable(table.blocks, span.end_position)

    # -- the same, one at a time ---------------------------------------------------------------------------------

    def grant(self, request: int, first_index: int, blocks: Sequence[int]) -> None:
        """Append blocks to a request's table, which must have `first_index` blocks. Raises as `check` does."""
        self.commit(self.check(StepPlan(grants=(KvGrant(request, first_index, tuple(blocks)),))))

    def free(self, request: int) -> None:
        """Give a request's blocks back; nothing happens for one that has none."""
        self.commit(self.check(StepPlan(frees=(request,))))

    def begin_span(self, request: int, first_position: int, token_count: int, truncate_allowed: bool) -> None:
        """Extend (or, where allowed, cut) a request's KV length for a span about to run. Raises as `check` does."""
        draft = KvDraft({}, {})
        sampling = Sampling() if truncate_allowed else None
        self._draft_span(draft, Span(request, first_position, token_count, sampling=sampling))
        self.commit(draft)


def _touched(size: tuple[int, ...], dtype: DType, device: str) -> torch.Tensor:
    # torch.zeros would leave the pages to be found on first use, when it is too late to refuse.
    return torch.empty(size, dtype=TORCH_DTYPES[dtype], device=device).zero_()
