"""The head's KV block allocator, the keys of its blocks, and the memory that a request reserves.
Pure.

The allocator is the only one in a pipeline. (docs/papers/agent.md#kv-memory-in-pages)
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from edgeshard.domain.deployments.deployment import DEFAULT_TOKENS
from edgeshard.domain.errors import InternalError
from edgeshard.domain.requests.step import KvGrant, StateCopy
from edgeshard_agent.scheduler import sequence as sequences


@dataclass(slots=True)
class _Table:
    promised: int
    """Blocks that it may still take without a check."""
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    """The slot of its states."""
    source: int | None = None
    """The slot of the saved states that it is to begin from."""


class BlockAllocator:
    """Blocks 0..count-1 of `block_tokens` tokens each, and for models with states slots 0..slots-1.
    Pure.

    Admission promises a request blocks, which it gets as it reaches their positions. Beyond its
    promise it can have blocks that no other request holds or was promised. A block counts how many
    requests hold it. A full block may be published under a key of its content. It then outlives its
    request until its memory is needed, and a request that begins with the same content shares it.

    States cannot be cut back to the end of what two requests share. So if there are slots, a
    request shares blocks up to a key whose states were saved. Those are in slots that no request
    needs, and go with their key's block.
    """

    def __init__(self, count: int, block_tokens: int, slots: int = 0) -> None:
        self.count = count
        self.block_tokens = block_tokens
        self._free: deque[int] = deque(range(count))
        self._tables: dict[int, _Table] = {}
        self._holders: Counter[int] = Counter()
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published blocks that no request holds, the longest unused first."""
        self._promised = 0
        self.slots = slots
        self._free_slots = deque(range(slots))
        self._saved: OrderedDict[bytes, int] = OrderedDict()
        """The slots of saved states by the key of the prefix they belong to, the longest unused
        first."""

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    @property
    def unpromised(self) -> int:
        """Blocks that no admitted request holds or was promised."""
        return len(self._free) + len(self._idle) - self._promised

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return len(self._holders)

    @property
    def cached(self) -> int:
        """Published blocks that no request holds."""
        return len(self._idle)

    def admit(self, request: int, tokens: int, keys: Sequence[bytes] = ()) -> KvGrant | None:
        """Promise a request the blocks of `tokens` positions, and a slot.

        None, and nothing changed, when the pool cannot.

        `keys` are the keys of its first full blocks. It shares the blocks whose keys are published,
        with states if there are any. The grant holds the shared blocks, if any.
        """
        if request in self._tables:
            raise InternalError(f"request {request} already has a KV reservation")
        shared = []
        for key in keys:
            if key not in self._by_key:
                break
            shared.append(self._by_key[key])
        source = None
        if self.slots:
            while shared and (source := self._saved.get(keys[len(shared) - 1])) is None:
                shared.pop()
        need = self.blocks_for(tokens) - len(shared)
        if need + sum(block in self._idle for block in shared) > self.unpromised:
            return None
        slot = self._take_slot(source) if self.slots else None
        # without a second slot it can only start over, in the slot of the saved states
        if self.slots and slot is None:
            return None if source is None else self.admit(request, tokens)
        for block in shared:
            self._idle.pop(block, None)
            self._holders[block] += 1
        if source is not None:
            self._saved.move_to_end(keys[len(shared) - 1])
        self._tables[request] = _Table(need, shared, slot, source)
        self._promised += need
        return KvGrant(
            request,
            0,
            tuple(shared),
            filled=len(shared) * self.block_tokens,
            slot=slot if shared else None,
        )

    def restore(self, request: int) -> StateCopy | None:
        """The saved states that a request begins from, once: from now on their slot may be taken
        for others."""
        table = self._tables[request]
        source, table.source = table.source, None
        return (
            None
            if source is None
            else StateCopy(request, len(table.blocks) * self.block_tokens, source)
        )

    def save(self, request: int, position: int, key: bytes) -> StateCopy | None:
        """Save a request's states after this many positions, the end of a published block of this
        key.

        None if they are saved already, or if there is no slot for them.
        """
        if key in self._saved:
            self._saved.move_to_end(key)
            return None
        slot = self._take_slot()
        if slot is None:
            return None
        self._saved[key] = slot
        return StateCopy(request, position, slot)

    def _take_slot(self, other_than: int | None = None) -> int | None:
        """A free slot, or the least recently used slot of saved states, unless a request is to
        begin from them."""
        if self._free_slots:
            return self._free_slots.popleft()
        needed_slots = {other_than, *(table.source for table in self._tables.values())}
        key = next((key for key, slot in self._saved.items() if slot not in needed_slots), None)
        return None if key is None else self._saved.pop(key)

    def reach(self, request: int) -> int:
        """The most positions that the request can hold without a block that another one holds or
        was promised."""
        table = self._tables[request]
        return (len(table.blocks) + table.promised + self.unpromised) * self.block_tokens

    def can_extend(self, request: int, tokens: int) -> bool:
        """Whether the request can get the blocks it lacks to hold `tokens` positions."""
        return tokens <= self.reach(request)

    def extend(self, request: int, tokens: int) -> KvGrant | None:
        """Blocks the request lacks to hold `tokens` positions, None when it has enough."""
        table = self._tables[request]
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing <= 0:
            return None
        if not self.can_extend(request, tokens):
            raise InternalError(f"request {request} needs more KV than was reserved for it")
        promised_blocks = min(missing, table.promised)
        table.promised -= promised_blocks
        self._promised -= promised_blocks
        first = len(table.blocks)
        blocks = [self._take() for _ in range(missing)]
        table.blocks += blocks
        return KvGrant(request, first, tuple(blocks), slot=None if first else table.slot)

    def publish(self, request: int, index: int, key: bytes) -> None:
        """Make the block at `index` of a request's table, full and never written again, known by
        `key`."""
        block = self._tables[request].blocks[index]
        if key not in self._by_key and block not in self._keys:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, request: int) -> None:
        """Return a request's blocks. They may be granted again from the step after the one that
        frees them."""
        table = self._tables.pop(request)
        self._promised -= table.promised
        if table.slot is not None:
            self._free_slots.append(table.slot)
        freed: deque[int] = deque()
        # The last first, so that the end of a cached prefix is given up before its beginning.
        for block in reversed(table.blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._keys:
                self._idle[block] = None
            else:
                freed.appendleft(block)
        # In their order again: attention reads blocks faster that lie one after the other.
        self._free += freed

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self._keys.pop(block)
            del self._by_key[key]
            if key in self._saved:
                self._free_slots.append(self._saved.pop(key))
        self._holders[block] = 1
        return block


def extend_keys(sequence: sequences.Sequence, block_tokens: int, tokens: int) -> None:
    """Bring `sequence.keys` up to the full blocks within its first `tokens` tokens.

    A block's keys and values depend on its own tokens and on every earlier token. So its key is a
    hash of the previous key and its tokens. The chain begins with the client, so equal prompts of
    two clients share nothing, and the speed of an answer does not tell a client what others asked.
    The hash is cryptographic, because two prompts with one key would be answered from each other's
    KV.
    """
    keys = sequence.keys
    key = keys[-1] if keys else hashlib.sha256(sequence.client.encode()).digest()
    for first in range(len(keys) * block_tokens, tokens - block_tokens + 1, block_tokens):
        block = sequence.tokens[first : first + block_tokens]
        key = hashlib.sha256(key + struct.pack(f"<{block_tokens}I", *block)).digest()
        keys.append(key)


def next_save(first: int, end: int, block_tokens: int, distance: int) -> int:
    """The position after `first` at which the states of a request with `end` tokens are saved next.

    That is each multiple of `distance`, itself one of `block_tokens`, and the end of the last block
    that a request with the same tokens can share.
    """
    last, regular = (end - 1) // block_tokens * block_tokens, (first // distance + 1) * distance
    return min(last, regular) if last > first else regular


MAX_REMEMBERED_ANSWERS = 64
"""The weight of all earlier answers in the mean is that of 63 answers at most, so that it follows
the newest ones."""


class Reservation:
    """Positions to reserve. `answer_tokens` is the likely length of an answer before any has ended.

    An answer may be as long as its context, and few are. A request whose answer is longer than its
    reservation grows by blocks, and takes them from the newest request if memory is short.

    With `overcommit` nothing is reserved for answers.
    """

    def __init__(self, answer_tokens: float = DEFAULT_TOKENS, *, overcommit: bool = False) -> None:
        self._answer_tokens = float(answer_tokens)
        self._answers = 1
        self._overcommit = overcommit

    def positions(self, sequence: sequences.Sequence) -> int:
        """The positions to reserve for a request that is admitted: at most its longest text.

        A preempted answer has the same reserve again: its length so far does not predict how much
        follows.
        """
        answer_tokens = 1 if self._overcommit else max(1, ceil(self._answer_tokens))
        return min(sequence.longest, len(sequence.tokens) + answer_tokens)

    def ended(self, sequence: sequences.Sequence) -> None:
        """Learn the length of an answer that came to its end."""
        self._answers = min(self._answers + 1, MAX_REMEMBERED_ANSWERS)
        new_tokens = len(sequence.tokens) - sequence.prompt_count
        self._answer_tokens += (new_tokens - self._answer_tokens) / self._answers
