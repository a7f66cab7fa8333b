"""The paged KV memory of one stage.

The pool holds no allocator: the head grants blocks, the pool checks and obeys. A step is validated
as a whole against a draft of the tables it touches and only then committed, so a refused step
changes nothing.

Several tables may hold one block if it is full: they share its content, and no request writes to it
any more.

A newly granted block is zeroed first, whatever request had it before. So one client's data is gone
from every stage before another's tokens are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgeshard.architectures import KvHeads
from edgeshard.domain.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from edgeshard.domain.models.dtypes import DType, KvFormat
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StageSwap
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StateCopy, StepPlan
from edgeshard_agent.model.attention.states import States
from edgeshard_agent.model.attention.swap import SwapSpace
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.ops.kv_arena import NativeArena, RowArena, check_int4, make_arena, zeroed


@dataclass(frozen=True, slots=True)
class KvTable:
    """A request's blocks in order of position, and how many positions hold keys and values.

    The first `shared` positions were filled by others; the request reads them only. The tokens of
    the last `assumed` positions were guessed. `slot` holds its states after the positions that are
    certain, `guess_slots` the states after each guess. Its newest span started from the states in
    `source`.
    """

    blocks: tuple[int, ...] = ()
    length: int = 0
    shared: int = 0
    slot: int | None = None
    assumed: int = 0
    guess_slots: tuple[int, ...] = ()
    source: int | None = None

    @property
    def certain(self) -> int:
        """Positions whose tokens are certain: the request's next span begins there or later."""
        return self.length - self.assumed

    def slot_behind(self, position: int) -> int | None:
        """The slot of its states after this many positions; None if `position` is before the
        certain ones."""
        return (
            self.slot if position == self.certain else self.guess_slots[position - self.certain - 1]
        )


class Tables(Protocol):
    """The tables of requests, which a step's spans are read and written through."""

    @property
    def block_tokens(self) -> int: ...

    def table(self, request: int) -> KvTable: ...


def slots_behind(table: KvTable, span: Span) -> list[int | None]:
    """The slot for the states after each position of a span, once the step with the span is
    committed."""
    return [table.slot] * (span.token_count - span.guesses) + list(table.guess_slots)


def padded_tables(tables: Tables, spans: Sequence[Span]) -> npt.NDArray[np.int32]:
    """[spans, n] the blocks of each span's request up to the span's end, filled up with zeros."""
    counts = [-(-span.end_position // tables.block_tokens) for span in spans]
    padded = np.zeros((len(spans), max(counts, default=1)), dtype=np.int32)
    for row, (span, count) in enumerate(zip(spans, counts, strict=True)):
        padded[row, :count] = tables.table(span.request).blocks[:count]
    return padded


@dataclass(slots=True)
class KvDraft:
    """Changes that a validated step will make: None if a table is freed, and the holders and state
    of each block it touches.

    `anew` are the blocks granted to be written, `slots` whether slots are taken, those in
    `anew_slots` to be written. `saves` and `restores` are copies of states, from slot to slot;
    `saved` the position of a slot's saved states, 0 if it has none.
    """

    tables: dict[int, KvTable | None] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)
    full: dict[int, bool] = field(default_factory=dict)
    anew: list[int] = field(default_factory=list)
    slots: dict[int, bool] = field(default_factory=dict)
    anew_slots: list[int] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    swap_outs: dict[int, KvTable] = field(default_factory=dict)
    swap_ins: dict[int, tuple[int, ...]] = field(default_factory=dict)
    swapped_lengths: dict[int, int] = field(default_factory=dict)
    """Positions of a request that are swapped out, 0 if there are none any more."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The memory for keys and values that a stage is given."""

    kv_format: KvFormat | DType
    """How numbers are kept."""
    blocks: int
    block_tokens: int
    swap_bytes: int = 0
    """Most that requests which were swapped out may take."""
    swap_directory: Path | None = None
    """The directory of their files; they stay in memory without one."""
    slots: int = 0
    """Slots for the states of running requests, and for copies of them, if the model has states."""
    guess_slots: int = 0
    """For the states after each guess of a step."""


class KvPool:
    """Keys and values of the blocks of `memory` for every layer of a stage, whose `heads` are given
    in its order. Also the `states` of its requests, each in a numbered slot.

    Each layer has an arena: slot s is token s % block_tokens of block s // block_tokens. Memory is
    taken and touched at once, so it cannot run short later. With `scratch`, for recordings on an
    accelerator, arenas consist of rows and have one more block, which is in no table and not
    counted. Data written there belongs to no request.
    """

    def __init__(
        self,
        layers: LayerRange,
        memory: KvMemory,
        heads: Sequence[KvHeads],
        device: str,
        scratch: bool = False,
        states: States | None = None,
    ) -> None:
        blocks, block_tokens = memory.blocks, memory.block_tokens
        for name, value in (("kv_blocks", blocks), ("block_tokens", block_tokens)):
            if value < 1:
                raise InvalidArgumentError(f"{name} is {value}; it must be 1 or more", field=name)
        self.layers = layers
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.scratch_block = blocks if scratch else None
        self.kv_format = KvFormat(memory.kv_format)
        if self.kv_format is KvFormat.INT4:
            for own in {own for own in heads if own.heads}:
                check_int4(own.head_dim, block_tokens, device)
        self.block_bytes = block_tokens * sum(own.bytes_per_token(self.kv_format) for own in heads)
        self._by_block: list[torch.Tensor] = []
        """All memory of the pool: keys and values by block, [2 n, blocks, elements] for n layers
        with heads alike."""
        self.states = states or States(0, (), device)
        """The data kept for requests besides keys and values."""
        self._arenas = self._taken(heads, device, scratch)
        self._taken_slots: set[int] = set()
        self._saved: dict[int, int] = {}
        """By slot, after how many positions of a request its states were as they are there."""
        self.swap = SwapSpace(memory.swap_bytes // max(1, self.block_bytes), memory.swap_directory)
        """Keeps the requests that were swapped out."""
        self._tables: dict[int, KvTable] = {}
        self._holders: dict[int, int] = {}
        """How many tables hold a block, for blocks that any does."""
        self._full: set[int] = set()
        """Blocks all of whose positions are filled, whether held or left by the last request that
        did."""

    def _taken(
        self, heads: Sequence[KvHeads], device: str, scratch: bool
    ) -> dict[int, RowArena | NativeArena]:
        """The arenas of the layers that have heads, by place; heads alike are in one piece of
        memory.

        Raises ResourceExhaustedError.
        """
        numbers: torch.dtype | Literal[KvFormat.INT4]
        numbers = (
            self.kv_format
            if self.kv_format is KvFormat.INT4
            else TORCH_DTYPES[DType(self.kv_format)]
        )
        element = torch.uint8 if isinstance(numbers, KvFormat) else numbers
        block_count = self.blocks + 1 if scratch else self.blocks
        slots = block_count * self.block_tokens
        arenas: dict[int, RowArena | NativeArena] = {}
        try:
            for own in dict.fromkeys(own for own in heads if own.heads):
                alike = [index for index, other in enumerate(heads) if other == own]
                elements = (
                    self.block_tokens
                    * own.heads
                    * self.kv_format.head_bytes(own.head_dim)
                    // element.itemsize
                )
                storage = zeroed((len(alike), 2, block_count * elements), element, device)
                self._by_block.append(storage.view(2 * len(alike), block_count, elements))
                for index, memory in zip(alike, storage, strict=True):
                    if scratch and not isinstance(numbers, KvFormat):  # what records steps gathers
                        arenas[index] = RowArena(
                            slots, own.heads, own.head_dim, numbers, device, memory
                        )
                    else:
                        sizes = slots, own.heads, own.head_dim, numbers, self.block_tokens
                        arenas[index] = make_arena(*sizes, device, memory)
        except (RuntimeError, MemoryError) as error:
            raise ResourceExhaustedError(
                f"no memory for {self.bytes_capacity} bytes of KV blocks: {error}",
                field="kv_blocks",
            ) from error
        return arenas

    @property
    def bytes_capacity(self) -> int:
        return self.blocks * self.block_bytes + self.states.bytes_capacity

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the blocks that are in a request's table, filled or not, and of its states; a
        shared block counts once."""
        guessed = sum(len(table.guess_slots) for table in self._tables.values())
        return (
            len(self._holders) * self.block_bytes
            + (len(self._taken_slots) + guessed) * self.states.slot_bytes
        )

    @property
    def swapped(self) -> StageSwap | None:
        """The KV that is kept aside; None if swapping is not allowed."""
        swap, size = self.swap, self.block_bytes
        if not swap.blocks:
            return None
        return StageSwap(swap.blocks * size, swap.used * size, swap.swapped_out, swap.swapped_in)

    @property
    def requests(self) -> frozenset[int]:
        """Requests that have a table, or were swapped out."""
        return frozenset(self._tables) | self.swap.requests

    def table(self, request: int) -> KvTable:
        """The request's table, empty for one that holds none."""
        return self._tables.get(request, KvTable())

    def arena(self, layer: int) -> RowArena | NativeArena:
        """Keys and values of a layer, by its global index."""
        arena = self._arenas.get(layer - self.layers.first)
        if arena is None:
            raise InvalidArgumentError(
                f"layer {layer} is not in this stage, which holds {self.layers}", field="layer"
            )
        return arena

    def layer_states(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The states that a layer keeps, by its global index, each [slots, ...]."""
        return self.states.layer(layer - self.layers.first)

    def release(self) -> None:
        """Give all memory back. No arena can be had any more."""
        self._arenas.clear()
        self.states.release()
        self.swap.clear()
        for memory in self._by_block:
            if memory.device.type != "cpu":
                # what torch gives back of an accelerator's memory, it keeps for this process
                memory.zero_()
        self._by_block.clear()

    # -- one step ----------------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> KvDraft:
        """Validate a step, part by part in its order; nothing changes until the draft is committed.

        Raises InvalidArgumentError for what can never be right (a block that does not exist, an
        empty span) and FailedPreconditionError for what does not fit the tables as they are.
        """
        draft = KvDraft()
        if self.states.slots:
            for copy in plan.saves:
                self._draft_save(draft, copy)
        for request in plan.frees:
            self._draft_free(draft, request)
        for request in plan.swap_outs:
            self._draft_swap_out(draft, request)
        for grant in plan.grants:
            self._draft_grant(draft, grant)
        if self.states.slots:
            self._draft_restores(draft, plan)
        requests: set[int] = set()
        for span in plan.spans:
            if span.request in requests:
                raise InvalidArgumentError(
                    f"request {span.request} has two spans in one step", field="spans"
                )
            requests.add(span.request)
            self._draft_span(draft, span)
        return draft

    def commit(self, draft: KvDraft) -> None:
        """Make a draft, checked against the pool as it is, the state of the pool. Newly granted
        blocks become zeros."""
        self._move(draft)
        for request, length in draft.swapped_lengths.items():
            if not length:
                self.swap.drop(request)
        for request, table in draft.tables.items():
            if table is None:
                self._tables.pop(request, None)
            else:
                self._tables[request] = table
        for block, holders in draft.holders.items():
            if holders:
                self._holders[block] = holders
            else:
                self._holders.pop(block, None)
        for block, full in draft.full.items():
            if full:
                self._full.add(block)
            else:
                self._full.discard(block)
        self._taken_slots.difference_update(draft.slots)
        self._taken_slots.update(slot for slot, is_taken in draft.slots.items() if is_taken)
        self._saved.update(draft.saved)

    def _move(self, draft: KvDraft) -> None:
        """Change what blocks and slots hold, in the order of a step's parts."""
        for source, target in draft.saves:
            self.states.copy(source, target)
        for request, table in draft.swap_outs.items():
            blocks = list(table.blocks[: self._blocks_for(table.certain)])
            parts = [memory[:, blocks] for memory in self._by_block]
            self.swap.put(request, table.certain, len(blocks), parts + self.states.of(table.slot))
        self._clear(draft.anew)
        for slot in draft.anew_slots:
            self.states.clear(slot)
        for request, places in draft.swap_ins.items():
            self._swap_in(request, places, self._peek(draft, request).slot)
        for source, target in draft.restores:
            self.states.copy(source, target)

    def _swap_in(self, request: int, places: Sequence[int], slot: int | None) -> None:
        """Copy the kept KV of a request into these blocks and this slot."""
        parts = self.swap.take(request)
        for memory, part in zip(self._by_block, parts, strict=False):
            memory[:, list(places)] = part.to(memory.device)
        for state, part in zip(self.states.of(slot), parts[len(self._by_block) :], strict=True):
            state.copy_(part)

    def _clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks; neighbours at once."""
        for _, group in groupby(enumerate(sorted(blocks)), lambda item: item[1] - item[0]):
            run = [block for _, block in group]
            for memory in self._by_block:
                memory[:, run[0] : run[-1] + 1].zero_()

    def _peek(self, draft: KvDraft, request: int) -> KvTable:
        if request in draft.tables:
            return draft.tables[request] or KvTable()
        return self._tables.get(request, KvTable())

    def _holders_of(self, draft: KvDraft, block: int) -> int:
        return draft.holders[block] if block in draft.holders else self._holders.get(block, 0)

    def _draft_free(self, draft: KvDraft, request: int) -> None:
        table = self._peek(draft, request)
        for block in table.blocks:
            draft.holders[block] = self._holders_of(draft, block) - 1
        if table.slot is not None:
            draft.slots[table.slot] = False
        draft.tables[request] = None
        if self._kept_of(draft, request):
            draft.swapped_lengths[request] = 0

    def _draft_save(self, draft: KvDraft, copy: StateCopy) -> None:
        own = self._check_copy("saves", copy, self.table(copy.request))
        if copy.slot in self._taken_slots:
            raise FailedPreconditionError(
                f"slot {copy.slot}, to keep states of request {copy.request}, belongs to another",
                field="saves.slot",
                reason="STATE_SLOT_IN_USE",
            )
        draft.saves.append((own, copy.slot))
        draft.saved[copy.slot] = copy.position

    def _draft_restores(self, draft: KvDraft, plan: StepPlan) -> None:
        """Exactly the requests that begin with blocks others filled take states that were saved."""
        begun = {grant.request for grant in plan.grants if grant.filled}
        if begun != {copy.request for copy in plan.restores}:
            raise FailedPreconditionError(
                "a request must take the states that belong to the blocks it shares, and no other "
                "states",
                field="restores",
                reason="STATE_NOT_RESTORED",
            )
        for copy in plan.restores:
            own = self._check_copy("restores", copy, self._peek(draft, copy.request))
            if draft.saved.get(copy.slot, self._saved.get(copy.slot)) != copy.position:
                raise FailedPreconditionError(
                    f"slot {copy.slot} keeps no states after {copy.position} positions",
                    field="restores.slot",
                    reason="STATE_NOT_SAVED",
                )
            draft.restores.append((copy.slot, own))

    def _check_copy(self, field: str, copy: StateCopy, table: KvTable) -> int:
        """The slot of the request's own states, which are those after `copy.position`."""
        if not 0 <= copy.slot < self.states.slots:
            raise InvalidArgumentError(
                f"slot {copy.slot} does not exist: there are slots 0 to {self.states.slots - 1}",
                field=f"{field}.slot",
                reason="STATE_SLOT_MISSING",
            )
        if table.slot is None or copy.position != table.certain:
            raise FailedPreconditionError(
                f"request {copy.request} has states after {table.certain} positions, not "
                f"{copy.position}",
                field=f"{field}.position",
                reason="STATE_POSITION",
            )
        return table.slot

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_tokens)

    def _kept_of(self, draft: KvDraft, request: int) -> int:
        """Positions kept aside of a request."""
        return (
            draft.swapped_lengths[request]
            if request in draft.swapped_lengths
            else self.swap.length(request)
        )

    def _draft_swap_out(self, draft: KvDraft, request: int) -> None:
        table = self._peek(draft, request)
        if not table.length:
            raise FailedPreconditionError(
                f"request {request} is to be swapped out, but holds no KV",
                field="swap_outs",
                reason="KV_NONE_TO_SWAP",
            )
        used = self.swap.used + sum(
            self._blocks_for(length) - self.swap.count(other)
            for other, length in draft.swapped_lengths.items()
        )
        if used + self._blocks_for(table.certain) > self.swap.blocks:
            raise FailedPreconditionError(
                f"request {request} is to be swapped out, but {used} of {self.swap.blocks} blocks "
                "are kept aside",
                field="swap_outs",
                reason="KV_SWAP_FULL",
            )
        self._draft_free(draft, request)
        draft.swap_outs[request] = table
        draft.swapped_lengths[request] = table.certain

    def _draft_grant(self, draft: KvDraft, grant: KvGrant) -> None:
        table = self._peek(draft, grant.request)
        if grant.first_index != len(table.blocks):
            raise FailedPreconditionError(
                f"a grant to request {grant.request} begins at index {grant.first_index}, "
                f"but its table has {len(table.blocks)} blocks",
                field="grants.first_index",
                reason="KV_GRANT_OUT_OF_ORDER",
            )
        swapped_length = self._kept_of(draft, grant.request)
        if grant.swapped or swapped_length:
            self._check_swapped(grant, swapped_length)
        slot = self._draft_slot(draft, grant)
        if grant.filled:
            self._check_shared(draft, grant)
        for block in grant.blocks:
            if not 0 <= block < self.blocks:
                raise InvalidArgumentError(
                    f"KV block {block} does not exist: the pool has blocks 0 to {self.blocks - 1}",
                    field="grants.blocks",
                    reason="KV_BLOCK_OUT_OF_RANGE",
                )
            if not grant.filled and self._holders_of(draft, block):
                raise FailedPreconditionError(
                    f"KV block {block}, granted to request {grant.request}, belongs to another",
                    field="grants.blocks",
                    reason="KV_BLOCK_IN_USE",
                )
            draft.holders[block] = self._holders_of(draft, block) + 1
            if grant.swapped:
                draft.full[block] = (
                    grant.blocks.index(block) + 1
                ) * self.block_tokens <= swapped_length
            elif not grant.filled:
                draft.full[block] = False
                draft.anew.append(block)
        length, shared = (
            (grant.filled, grant.filled) if grant.filled else (table.length, table.shared)
        )
        if grant.swapped:
            length, draft.swapped_lengths[grant.request] = swapped_length, 0
            draft.swap_ins[grant.request] = tuple(grant.blocks)
        blocks = table.blocks + tuple(grant.blocks)
        source = table.source if grant.first_index else slot
        draft.tables[grant.request] = replace(
            table, blocks=blocks, length=length, shared=shared, slot=slot, source=source
        )

    def _draft_slot(self, draft: KvDraft, grant: KvGrant) -> int | None:
        """The slot of the request's states after this grant: the first one gives it, also to stages
        without states."""
        if not self.states.slots:
            return None
        if grant.first_index:
            if grant.slot is not None:
                raise InvalidArgumentError(
                    f"a grant to request {grant.request} gives a slot that the request does not "
                    "need",
                    field="grants.slot",
                    reason="STATE_SLOT_NOT_DUE",
                )
            return self._peek(draft, grant.request).slot
        if grant.slot is None or not 0 <= grant.slot < self.states.slots:
            raise InvalidArgumentError(
                f"a first grant to request {grant.request} must give a slot below "
                f"{self.states.slots}",
                field="grants.slot",
                reason="STATE_SLOT_MISSING",
            )
        if draft.slots.get(grant.slot, grant.slot in self._taken_slots):
            raise FailedPreconditionError(
                f"slot {grant.slot}, granted to request {grant.request}, belongs to another",
                field="grants.slot",
                reason="STATE_SLOT_IN_USE",
            )
        draft.slots[grant.slot] = True
        draft.saved[grant.slot] = 0
        if not grant.swapped:
            draft.anew_slots.append(grant.slot)
        return grant.slot

    def _check_swapped(self, grant: KvGrant, swapped_length: int) -> None:
        """The table of a swapped-out request must begin with exactly the blocks for its kept
        positions."""
        if not (
            grant.swapped
            and swapped_length
            and len(grant.blocks) == self._blocks_for(swapped_length)
            and not grant.filled
        ):
            raise FailedPreconditionError(
                f"a grant to request {grant.request} has {len(grant.blocks)} blocks for "
                f"{swapped_length} positions kept aside",
                field="grants.swapped",
                reason="KV_SWAPPED",
            )

    def _check_shared(self, draft: KvDraft, grant: KvGrant) -> None:
        """Blocks that others filled begin a table and are full."""
        blocks = set(grant.blocks)
        if (
            grant.first_index
            or grant.filled != len(blocks) * self.block_tokens
            or len(blocks) != len(grant.blocks)
        ):
            raise InvalidArgumentError(
                f"a grant to request {grant.request} shares {grant.filled} positions in "
                f"{len(grant.blocks)} blocks "
                f"from index {grant.first_index}; only whole blocks at the beginning of a table "
                "can be shared",
                field="grants.filled",
            )
        for block in grant.blocks:
            if not draft.full.get(block, block in self._full):
                raise FailedPreconditionError(
                    f"KV block {block}, to be shared by request {grant.request}, is not full",
                    field="grants.filled",
                    reason="KV_BLOCK_NOT_FULL",
                )

    def _draft_span(self, draft: KvDraft, span: Span) -> None:
        if span.token_count < 1 or span.first_position < 0:
            raise InvalidArgumentError(
                f"request {span.request} has a span of {span.token_count} tokens at "
                f"{span.first_position}",
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
        with_states = self._draft_states(draft, span, table)
        if span.first_position < table.certain and span.sampling is None:
            raise FailedPreconditionError(
                f"a span of request {span.request} begins at {span.first_position}, before its "
                f"{table.certain} certain "
                "positions; only its first span in an epoch may truncate these",
                field="spans.first_position",
                reason="KV_TRUNCATION_REFUSED",
            )
        if span.end_position > len(table.blocks) * self.block_tokens:
            raise FailedPreconditionError(
                f"a span of request {span.request} ends at {span.end_position}, but its "
                f"{len(table.blocks)} blocks "
                f"hold {len(table.blocks) * self.block_tokens} tokens",
                field="spans.token_count",
                reason="KV_TABLE_TOO_SHORT",
            )
        size = self.block_tokens
        written = table.blocks[span.first_position // size : -(-span.end_position // size)]
        if span.first_position < table.shared or any(
            self._holders_of(draft, block) > 1 for block in written
        ):
            raise FailedPreconditionError(
                f"a span of request {span.request} begins at {span.first_position}, within KV that "
                "it shares",
                field="spans.first_position",
                reason="KV_SHARED",
            )
        # Everything before its start is certain now: guesses before it were right. Its own are not.
        first = min(span.first_position, table.certain) // size
        for index, block in enumerate(table.blocks[first:], first):
            draft.full[block] = (index + 1) * size <= span.certain_position
        draft.tables[span.request] = replace(
            with_states, length=span.end_position, assumed=span.guesses
        )

    def _draft_states(self, draft: KvDraft, span: Span, table: KvTable) -> KvTable:
        """The span's request with the slots that its states come from and go to."""
        if table.slot is None:
            return table
        if span.first_position < table.certain:
            raise FailedPreconditionError(
                f"a span of request {span.request} begins at {span.first_position}, before its "
                f"{table.certain} certain "
                "positions; states cannot be cut to fewer positions",
                field="spans.first_position",
                reason="STATE_TRUNCATION_REFUSED",
            )
        source = table.slot_behind(span.first_position)
        if not (span.guesses or table.guess_slots):
            return replace(table, source=source)
        # A span may start from one of its request's slots while it writes to them, since it works
        # token by token.
        used_slots = {*table.guess_slots, *self._guess_slots_of_others(draft, span.request)}
        free = (slot for slot in self.states.guess_slots if slot not in used_slots)
        slots = (*table.guess_slots, *free)[: span.guesses]
        if len(slots) < span.guesses:
            raise FailedPreconditionError(
                f"a span of request {span.request} has {span.guesses} draft tokens, but only "
                f"{len(slots)} of "
                f"{len(self.states.guess_slots)} state slots are free",
                field="spans.guesses",
                reason="STATE_GUESS_SLOTS_IN_USE",
            )
        return replace(table, source=source, guess_slots=slots)

    def _guess_slots_of_others(self, draft: KvDraft, request: int) -> Iterator[int]:
        """Includes the slots that they have before the step, unless the step takes their memory:
        they may start from them in it.
        """
        for other in (self._tables.keys() | draft.tables.keys()) - {request}:
            yield from self._peek(draft, other).guess_slots
            if draft.tables.get(other, True) is not None and other not in draft.swap_outs:
                yield from self.table(other).guess_slots

    # -- the same, one at a time -------------------------------------------------------------------

    def grant(self, request: int, first_index: int, blocks: Sequence[int]) -> None:
        """Append blocks to a request's table, which must have `first_index` blocks. Raises as
        `check` does."""
        self.commit(self.check(StepPlan(grants=(KvGrant(request, first_index, tuple(blocks)),))))

    def free(self, request: int) -> None:
        """Give a request's blocks back; nothing happens for one that has none."""
        self.commit(self.check(StepPlan(frees=(request,))))

    def begin_span(
        self, request: int, first_position: int, token_count: int, truncate_allowed: bool
    ) -> None:
        """Extend (or, if allowed, cut) a request's KV length for a span about to run. Raises as
        `check` does."""
        draft = KvDraft()
        sampling = Sampling() if truncate_allowed else None
        self._draft_span(draft, Span(request, first_position, token_count, sampling=sampling))
        self.commit(draft)
