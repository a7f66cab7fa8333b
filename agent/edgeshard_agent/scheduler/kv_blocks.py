"""The head's KV block allocator: the only one in a pipeline. (docs/papers.md#kv-memory-in-pages)"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgeshard.domain.errors import InternalError
from edgeshard.domain.requests.step import KvGrant


@dataclass(slots=True)
class _Table:
    promised: int
    """Blocks that it may still take without a check."""
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    """Of its states."""


class BlockAllocator:
    """Blocks 0..count-1 of `block_tokens` tokens each, and for models with states slots 0..slots-1; pure state.

    Admission promises a request blocks (its worst case, unless the pool is overcommitted), so that an admitted request
    cannot run out of them; it gets the blocks as it reaches their positions. A block counts how many requests hold it.
    A full block may be published under a key of its content. It then outlives its request until its memory is needed,
    and a request that begins with the same content shares it.
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

        `keys` are those of its first full blocks, which it shares as far as they are known. The grant holds the shared
        blocks, if any.
        """
        if request in self._tables:
            raise InternalError(f"request {request} already has KV blocks promised")
        shared = []
        for key in keys:
            if key not in self._by_key:
                break
            shared.append(self._by_key[key])
        need = self.blocks_for(tokens) - len(shared)
        if need + sum(block in self._idle for block in shared) > self.unpromised:
            return None
        if self.slots and not self._free_slots:
            return None
        for block in shared:
            self._idle.pop(block, None)
            self._holders[block] += 1
        self._tables[request] = _Table(need, shared, self._free_slots.popleft() if self.slots else None)
        self._promised += need
        return KvGrant(request, 0, tuple(shared), filled=len(shared) * self.block_tokens)

    def can_extend(self, request: int, tokens: int) -> bool:
        """Whether the request can be given what it lacks to hold `tokens` positions."""
        table = self._tables[request]
        return self.blocks_for(tokens) - len(table.blocks) - table.promised <= self.unpromised

    def extend(self, request: int, tokens: int) -> KvGrant | None:
        """Blocks the request lacks to hold `tokens` positions, None when it has enough."""
        table = self._tables[request]
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing <= 0:
            return None
        if not self.can_extend(request, tokens):
            raise InternalError(f"request {request} wants more KV than it was promised")
        kept = min(missing, table.promised)
        table.promised -= kept
        self._promised -= kept
        first = len(table.blocks)
        blocks = [self._take() for _ in range(missing)]
        table.blocks += blocks
        return KvGrant(request, first, tuple(blocks), slot=None if first else table.slot)

    def publish(self, request: int, index: int, key: bytes) -> None:
        """Make the block at `index` of a request's table, full and never written again, known by `key`."""
        block = self._tables[request].blocks[index]
        if key not in self._by_key and block not in self._keys:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, request: int) -> None:
        """Return a request's blocks. They may be granted again from the step after the one that frees them."""
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
            del self._by_key[self._keys.pop(block)]
        self._holders[block] = 1
        return block
