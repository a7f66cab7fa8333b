"""The head's block allocator: promises are kept, shared blocks are full, and every block is
returned."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator

from edgeshard.architectures import KvHeads
from edgeshard.domain.errors import InternalError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

KEYS = [bytes([number]) for number in range(6)]


def test_admission_promises_the_worst_case() -> None:
    allocator = BlockAllocator(4, 16)
    assert allocator.admit(1, 33) == KvGrant(1, 0, ())
    assert allocator.unpromised == 1
    assert allocator.admit(2, 17) is None, "two blocks are wanted, one is left"
    assert allocator.admit(3, 16)
    grant = allocator.extend(1, 17)
    assert grant is not None and grant.first_index == 0 and len(grant.blocks) == 2
    assert allocator.extend(1, 32) is None
    second = allocator.extend(1, 33)
    assert second is not None and second.first_index == 2 and len(second.blocks) == 1
    assert not allocator.can_extend(1, 49)
    with pytest.raises(InternalError):
        allocator.extend(1, 49)


def test_blocks_come_back_in_the_order_of_their_positions() -> None:
    allocator = BlockAllocator(4, 16)
    for request in (1, 2):
        allocator.admit(request, 64)
        granted = allocator.extend(request, 64)
        assert granted is not None and granted.blocks == (0, 1, 2, 3)
        allocator.release(request)


def test_a_request_may_go_beyond_its_promise_while_nobody_else_was_promised_the_block() -> None:
    allocator = BlockAllocator(4, 16)
    allocator.admit(1, 16)
    allocator.admit(2, 32)
    assert allocator.can_extend(1, 32) and not allocator.can_extend(1, 48)
    assert allocator.extend(1, 32)
    assert allocator.unpromised == 0 and allocator.extend(2, 32)


def filled(allocator: BlockAllocator, request: int, keys: list[bytes]) -> KvGrant:
    """A request with a published block for each key."""
    tokens = len(keys) * allocator.block_tokens
    allocator.admit(request, tokens)
    grant = allocator.extend(request, tokens)
    for index, key in enumerate(keys):
        allocator.publish(request, index, key)
    assert grant is not None
    return grant


def test_published_blocks_are_shared_as_far_as_they_agree() -> None:
    allocator = BlockAllocator(8, 4)
    held = filled(allocator, 1, KEYS[:3])
    shared = allocator.admit(2, 20, [*KEYS[:2], KEYS[5]])
    assert shared == KvGrant(2, 0, held.blocks[:2], filled=8)
    assert allocator.used == 3 and allocator.unpromised == 2, "3 held, 3 promised to the second"
    allocator.release(1)
    assert allocator.used == 2 and allocator.cached == 1
    allocator.release(2)
    assert allocator.used == 0 and allocator.cached == 3 and allocator.unpromised == 8


def test_a_published_block_that_is_promised_away_is_not_promised_twice() -> None:
    allocator = BlockAllocator(4, 4)
    filled(allocator, 1, KEYS[:2])
    allocator.release(1)
    assert allocator.unpromised == 4
    assert allocator.admit(2, 12) is not None
    assert allocator.admit(3, 12, KEYS[:2]) is None, (
        "two are known, but only one block can still be promised"
    )
    assert allocator.unpromised == 1 and allocator.cached == 2, "the refusal changed nothing"


def test_the_longest_unused_end_of_a_beginning_goes_first() -> None:
    allocator = BlockAllocator(4, 4)
    filled(allocator, 1, KEYS[:3])
    allocator.release(1)
    allocator.admit(2, 8)
    allocator.extend(2, 8)  # the block that was never used, and one of the three
    shared = allocator.admit(3, 8, KEYS[:3])
    assert shared is not None and shared.filled == 8, (
        "the third is gone, the first two are still known"
    )


def test_what_two_filled_alike_is_known_once() -> None:
    allocator = BlockAllocator(4, 4)
    first, second = filled(allocator, 1, KEYS[:1]), filled(allocator, 2, KEYS[:1])
    assert first.blocks != second.blocks
    allocator.release(1)
    allocator.release(2)
    assert allocator.cached == 1 and allocator.unpromised == 4


@dataclass
class Request:
    """The expected holdings of a request."""

    promised: int
    keys: list[bytes]
    length: int = 0
    introduced: bool = False
    grants: list[KvGrant] = field(default_factory=list)


class Both:
    """An allocator and a stage's tables that obey it, one step for each operation."""

    def __init__(self, seed: int, blocks: int = 48, block_tokens: int = 4) -> None:
        self.dice = random.Random(seed)
        self.allocator = BlockAllocator(blocks, block_tokens)
        self.pool = KvPool(
            LayerRange(0, 1), KvMemory(DType.FLOAT32, blocks, block_tokens), [KvHeads(1, 1)], "cpu"
        )
        self.held: dict[int, Request] = {}
        self.count = 0
        self.shared_blocks = 0

    def operate(self) -> None:
        kind = self.dice.random()
        if kind < 0.25 or not self.held:
            self.admit()
        elif kind < 0.8:
            self.extend(self.dice.choice(list(self.held)))
        else:
            self.release(self.dice.choice(list(self.held)))

    def admit(self) -> None:
        self.count += 1
        trunk = self.dice.choice([b"a", b"b"])
        # The key of a block identifies the whole path to it, as a chained hash does; there are few
        # paths, so that they meet.
        forks = [self.dice.choice([b"0", b"0", b"1"]) for _ in range(8)]
        keys = [trunk + b"".join(forks[: index + 1]) for index in range(8)]
        tokens = self.dice.randint(1, 40)
        hits = keys[: (tokens - 1) // self.pool.block_tokens]
        grant = self.allocator.admit(self.count, tokens, hits)
        if grant is not None:
            request = self.held[self.count] = Request(tokens, keys, grant.filled)
            if grant.blocks:
                request.grants.append(grant)
                self.shared_blocks += len(grant.blocks)

    def extend(self, number: int) -> None:
        """Run some positions, at times more than was promised, and publish the blocks they fill."""
        request, size = self.held[number], self.pool.block_tokens
        end = request.length + self.dice.randint(1, 9)
        if not self.allocator.can_extend(number, end):
            assert end > request.promised, "a promise was broken"
            return
        grant = self.allocator.extend(number, end)
        grants = [*request.grants, *([grant] if grant else [])]
        span = Span(
            number,
            request.length,
            end - request.length,
            sampling=None if request.introduced else Sampling(),
        )
        self.step(StepPlan(grants=tuple(grants), spans=(span,)))
        for index in range(request.length // size, min(end // size, len(request.keys))):
            self.allocator.publish(number, index, request.keys[index])
        request.introduced = True
        request.length = end
        request.grants = []

    def release(self, number: int) -> None:
        self.allocator.release(number)
        if self.held.pop(number).introduced:
            self.step(StepPlan(frees=(number,)))

    def step(self, plan: StepPlan) -> None:
        # refuses a block in use, and one to share that is not full
        self.pool.commit(self.pool.check(plan))

    def check(self) -> None:
        allocator = self.allocator
        assert 0 <= allocator.unpromised <= allocator.count - allocator.used
        introduced = [number for number, request in self.held.items() if request.introduced]
        assert self.pool.requests == set(introduced)
        on_stage = {block for number in introduced for block in self.pool.table(number).blocks}
        assert self.pool.bytes_in_use == len(on_stage) * self.pool.block_bytes
        assert len(on_stage) <= allocator.used


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_leak_nothing_here_or_on_a_stage(seed: int) -> None:
    """A hundred thousand in all."""
    both = Both(seed)
    for number in range(25_000):
        both.operate()
        if number % 100 == 0:
            both.check()
    assert both.shared_blocks > 1000
    for request in list(both.held):
        both.release(request)
    both.check()
    allocator = both.allocator
    assert allocator.used == 0 and allocator.unpromised == allocator.count
    assert both.pool.bytes_in_use == 0 and not both.pool.requests
    assert allocator.admit(-1, allocator.count * 4) is not None
    grant = allocator.extend(-1, allocator.count * 4)
    assert grant is not None and sorted(grant.blocks) == list(range(allocator.count)), (
        "every block, each once"
    )
    assert allocator.cached == 0
