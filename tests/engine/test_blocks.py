"""The head's block allocator: a promise is kept, and every block comes back."""

from __future__ import annotations

import random

import pytest
from edgeshard_agent.engine.blocks import BlockAllocator

from edgeshard.errors import InternalError


def test_admission_promises_the_worst_case() -> None:
    allocator = BlockAllocator(4, 16)
    assert allocator.reserve(1, 33)
    assert allocator.unreserved == 1
    assert not allocator.reserve(2, 17), "two blocks are wanted, one is left"
    assert allocator.reserve(3, 16)
    grant = allocator.extend(1, 17)
    assert grant is not None and grant.first_index == 0 and len(grant.blocks) == 2
    assert allocator.extend(1, 32) is None
    second = allocator.extend(1, 33)
    assert second is not None and second.first_index == 2 and len(second.blocks) == 1
    with pytest.raises(InternalError):
        allocator.extend(1, 49)


def test_ten_thousand_random_operations_leak_nothing() -> None:
    rng, allocator = random.Random(7), BlockAllocator(64, 16)
    held: dict[int, tuple[int, int, set[int]]] = {}
    for request in range(10_000):
        if rng.random() < 0.5:
            tokens = rng.randint(1, 300)
            if allocator.reserve(request, tokens):
                held[request] = (tokens, 0, set())
        elif held:
            victim = rng.choice(sorted(held))
            tokens, length, blocks = held[victim]
            if rng.random() < 0.6:
                length = rng.randint(length, tokens)
                grant = allocator.extend(victim, length)
                new = set(grant.blocks) if grant else set()
                assert all(not new & other for _, _, other in held.values()), "a block has two owners"
                held[victim] = (tokens, length, blocks | new)
            else:
                allocator.release(victim)
                del held[victim]
    for request in held:
        allocator.release(request)
    assert allocator.unreserved == 64
    assert allocator.reserve(-1, 64 * 16) and len(allocator.extend(-1, 64 * 16).blocks) == 64  # type: ignore[union-attr]
