"""The head's KV block allocator: the only one in a pipeline."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from edgeshard.errors import InternalError
from edgeshard.step import KvGrant


@dataclass(slots=True)
class _Table:
    reserved: int
    blocks: list[int] = field(default_factory=list)


class BlockAllocator:
    """Blocks 0..count-1 of `block_tokens` tokens each; pure state.

    Admission reserves a request's worst case, so that nothing accepted can run out later; blocks themselves are handed
    out as positions are reached.
    """

    def __init__(self, count: int, block_tokens: int) -> None:
        self.count = count
        self.block_tokens = block_tokens
        self._free: deque[int] = deque(range(count))
        self._tables: dict[int, _Table] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    @property
    def unreserved(self) -> int:
        """Blocks that no admitted request can claim."""
        return self.count - sum(table.reserved for table in self._tables.values())

    def reserve(self, request: int, tokens: int) -> bool:
        """Set aside what `tokens` positions need; False, and nothing changed, when the pool cannot promise it."""
        need = self.blocks_for(tokens)
        if request in self._tables:
            raise InternalError(f"request {request} already has KV blocks reserved")
        if need > self.unreserved:
            return False
        self._tables[request] = _Table(need)
        return True

    def extend(self, request: int, tokens: int) -> KvGrant | None:
        """Blocks the request lacks to hold `tokens` positions, None when it has enough."""
        table = self._tables[request]
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing <= 0:
            return None
        if len(table.blocks) + missing > table.reserved:
            raise InternalError(f"request {request} wants more KV than it reserved")
        first = len(table.blocks)
        blocks = [self._free.popleft() for _ in range(missing)]
        table.blocks += blocks
        return KvGrant(request, first, tuple(blocks))

    def release(self, request: int) -> None:
        """Return a request's blocks. They may be granted again from the step after the one that frees them."""
        self._free.extend(self._tables.pop(request).blocks)
