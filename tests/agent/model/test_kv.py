"""The KV pool obeys the head, refuses what cannot be, and changes nothing when it refuses."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory, KvPool, KvTable
from edgeshard_agent.model.attention.swap import SwapSpace

from edgeshard.architectures import KvHeads
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from edgeshard.domain.models.dtypes import DType, KvFormat
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan


@pytest.fixture
def pool() -> KvPool:
    """Eight blocks of 4 tokens; request 1 has 6 tokens in blocks 5 and 2 (room for 8), request 2
    has none in block 7 (room for 4).
    """
    pool = KvPool(LayerRange(2, 5), KvMemory(DType.FLOAT32, 8, 4), [KvHeads(2, 6)] * 3, "cpu")
    pool.grant(1, 0, (5, 2))
    pool.begin_span(1, 0, 6, truncate_allowed=False)
    pool.grant(2, 0, (7,))
    return pool


def state(pool: KvPool) -> object:
    return {request: pool.table(request) for request in pool.requests}, pool.bytes_in_use


def test_sizes(pool: KvPool) -> None:
    block_bytes = 2 * 3 * 4 * 2 * 6 * 4
    assert pool.bytes_capacity == 8 * block_bytes
    assert pool.bytes_in_use == 3 * block_bytes
    arena = pool.arena(4)
    assert (arena.slots, arena.width, arena.dtype) == (32, (2, 6), torch.float32)


@pytest.mark.parametrize("layer", [0, 1, 5, -1])
def test_an_arena_is_found_by_global_index_only(pool: KvPool, layer: int) -> None:
    with pytest.raises(InvalidArgumentError):
        pool.arena(layer)


def test_grants_append_and_spans_extend(pool: KvPool) -> None:
    pool.grant(1, 2, (0,))
    pool.begin_span(1, 6, 6, truncate_allowed=False)
    assert pool.table(1) == KvTable((5, 2, 0), 12)


def test_a_freed_block_can_be_granted_again(pool: KvPool) -> None:
    before = pool.bytes_in_use
    pool.free(1)
    assert pool.table(1) == KvTable()
    assert pool.bytes_in_use == before - 2 * pool.block_bytes
    pool.grant(3, 0, (2, 5, 0))
    assert pool.table(3).blocks == (2, 5, 0)


def test_freeing_an_unknown_request_changes_nothing(pool: KvPool) -> None:
    before = state(pool)
    pool.free(99)
    assert state(pool) == before


def test_truncation_keeps_the_table(pool: KvPool) -> None:
    pool.begin_span(1, 3, 2, truncate_allowed=True)
    assert pool.table(1) == KvTable((5, 2), 5)


REFUSED: dict[str, tuple[Callable[[KvPool], None], type[EdgeShardError]]] = {
    "grant skips an index": (lambda p: p.grant(1, 3, (0,)), FailedPreconditionError),
    "grant repeats an index": (lambda p: p.grant(1, 1, (0,)), FailedPreconditionError),
    "block of another request": (lambda p: p.grant(2, 1, (0, 5)), FailedPreconditionError),
    "block of its own": (lambda p: p.grant(2, 1, (7,)), FailedPreconditionError),
    "block twice in a grant": (lambda p: p.grant(2, 1, (0, 0)), FailedPreconditionError),
    "block beyond the pool": (lambda p: p.grant(2, 1, (8,)), InvalidArgumentError),
    "negative block": (lambda p: p.grant(2, 1, (-1,)), InvalidArgumentError),
    "span beyond the KV length": (
        lambda p: p.begin_span(1, 7, 1, truncate_allowed=True),
        FailedPreconditionError,
    ),
    "truncation not allowed": (
        lambda p: p.begin_span(1, 5, 1, truncate_allowed=False),
        FailedPreconditionError,
    ),
    "table too short": (
        lambda p: p.begin_span(1, 6, 3, truncate_allowed=False),
        FailedPreconditionError,
    ),
    "no table": (lambda p: p.begin_span(3, 0, 1, truncate_allowed=True), FailedPreconditionError),
    "empty span": (lambda p: p.begin_span(1, 6, 0, truncate_allowed=False), InvalidArgumentError),
    "negative position": (
        lambda p: p.begin_span(1, -1, 1, truncate_allowed=True),
        InvalidArgumentError,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_changes_nothing(pool: KvPool, case: str) -> None:
    action, error = REFUSED[case]
    before = state(pool)
    with pytest.raises(error) as caught:
        action(pool)
    assert caught.value.field
    assert state(pool) == before


@pytest.mark.parametrize(
    "bad",
    [
        StepPlan((1,), (KvGrant(3, 0, (5, 2)),), (Span(3, 0, 9),)),
        StepPlan((1,), (KvGrant(3, 0, (5,)), KvGrant(2, 1, (5,)))),
        StepPlan((1,), (), (Span(2, 0, 1), Span(1, 6, 1))),
        StepPlan((), (KvGrant(1, 2, (0,)),), (Span(1, 6, 1), Span(1, 7, 1))),
    ],
)
def test_a_step_is_refused_as_a_whole(pool: KvPool, bad: StepPlan) -> None:
    before = state(pool)
    with pytest.raises(EdgeShardError):
        pool.check(bad)
    assert state(pool) == before


@pytest.fixture
def sharing(pool: KvPool) -> KvPool:
    """Request 3 shares the full block 5 with request 1 and continues in block 0."""
    pool.commit(pool.check(StepPlan(grants=(KvGrant(3, 0, (5,), filled=4), KvGrant(3, 1, (0,))))))
    pool.begin_span(3, 4, 2, truncate_allowed=True)
    return pool


def test_a_full_block_is_shared_from_where_it_ends(sharing: KvPool) -> None:
    assert sharing.table(3) == KvTable((5, 0), 6, shared=4)
    assert sharing.bytes_in_use == 4 * sharing.block_bytes, "a shared block counts once"


def test_a_shared_block_is_free_when_its_last_holder_is(sharing: KvPool) -> None:
    sharing.free(1)
    with pytest.raises(FailedPreconditionError):
        sharing.grant(4, 0, (5,))
    sharing.free(3)
    sharing.free(2)
    assert sharing.bytes_in_use == 0
    sharing.grant(4, 0, (5,))


def test_a_block_left_full_can_be_shared_until_it_is_granted_anew(sharing: KvPool) -> None:
    sharing.commit(sharing.check(StepPlan(frees=(1, 3))))
    sharing.commit(sharing.check(StepPlan(grants=(KvGrant(4, 0, (5,), filled=4),))))
    assert sharing.table(4) == KvTable((5,), 4, shared=4)
    sharing.free(4)
    sharing.grant(6, 0, (5,))
    sharing.free(6)
    with pytest.raises(FailedPreconditionError, match="not full"):
        sharing.check(StepPlan(grants=(KvGrant(4, 0, (5,), filled=4),)))


def test_blocks_behind_a_truncation_are_not_full_any_more(pool: KvPool) -> None:
    pool.grant(7, 0, (0, 1, 3))
    pool.begin_span(7, 0, 12, True)
    pool.begin_span(7, 3, 3, True)
    for block in (1, 3):
        with pytest.raises(FailedPreconditionError, match="not full"):
            pool.check(StepPlan(grants=(KvGrant(8, 0, (block,), filled=4),)))
    pool.check(StepPlan(grants=(KvGrant(8, 0, (0,), filled=4),)))


@pytest.mark.parametrize(
    "bad",
    [
        StepPlan(grants=(KvGrant(4, 0, (2,), filled=4),)),
        StepPlan(grants=(KvGrant(4, 0, (5,), filled=3),)),
        StepPlan(grants=(KvGrant(4, 0, (), filled=4),)),
        StepPlan(grants=(KvGrant(4, 0, (5, 5), filled=8),)),
        StepPlan(grants=(KvGrant(2, 1, (5,), filled=4),)),
        StepPlan(spans=(Span(3, 3, 1, sampling=Sampling()),)),
        StepPlan(spans=(Span(1, 2, 4, sampling=Sampling()),)),
    ],
    ids=[
        "a block that is not full", "a part of a block", "no "
                                                         "block", "a block "
                                                                  "twice", "behind other blocks",
        "a sharer writes", "the one who filled it writes",
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(sharing: KvPool, bad: StepPlan) -> None:
    before = state(sharing)
    with pytest.raises(EdgeShardError) as caught:
        sharing.check(bad)
    assert caught.value.field and state(sharing) == before


def test_a_step_applies_frees_then_grants_then_spans(pool: KvPool) -> None:
    plan = StepPlan(
        (1,),
        (KvGrant(1, 0, (2, 0)), KvGrant(2, 1, (5,))),
        (Span(1, 0, 8, sampling=Sampling()), Span(2, 0, 5)),
    )
    pool.commit(pool.check(plan))
    assert pool.table(1) == KvTable((2, 0), 8)
    assert pool.table(2) == KvTable((7, 5), 5)
    assert pool.bytes_in_use == 4 * pool.block_bytes


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_of_nothing_is_refused(blocks: int, tokens: int) -> None:
    with pytest.raises(InvalidArgumentError):
        KvPool(LayerRange(0, 1), KvMemory(DType.FLOAT32, blocks, tokens), [KvHeads(1, 2)], "cpu")


# Swapping


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("kept", [KvFormat.FLOAT32, KvFormat.BFLOAT16, KvFormat.INT4])
def test_what_was_swapped_out_comes_back_in_other_blocks(
    kept: KvFormat, on_disk: bool, tmp_path: Path
) -> None:
    pool = KvPool(LayerRange(0, 2), KvMemory(kept, 8, 16), [KvHeads(2, 16)] * 2, "cpu")
    pool.swap = SwapSpace(3, tmp_path if on_disk else None)
    pool.grant(1, 0, (5, 2))
    pool.begin_span(1, 0, 20, truncate_allowed=False)
    before, after = (
        torch.tensor([*range(a, a + 16), *range(b, b + 16)]) for a, b in ((80, 32), (0, 112))
    )
    for layer in (0, 1):
        pool.arena(layer).write(before, torch.randn(32, 2, 16), torch.randn(32, 2, 16))
    expected = [pool.arena(layer).read(before) for layer in (0, 1)]
    pool.commit(pool.check(StepPlan(swap_outs=(1,), grants=(KvGrant(2, 0, (5, 2)),))))
    assert (pool.table(1), pool.requests, pool.swap.used) == (KvTable(), frozenset({1, 2}), 2)
    assert list(tmp_path.iterdir()) == [], "a file without a name"
    pool.commit(pool.check(StepPlan(grants=(KvGrant(1, 0, (0, 7), swapped=True),))))
    assert (pool.table(1), pool.swap.used) == (KvTable((0, 7), 20), 0)
    for layer, both in enumerate(expected):
        for found, right in zip(pool.arena(layer).read(after), both, strict=True):
            assert torch.equal(found, right)
    pool.begin_span(1, 20, 5, truncate_allowed=False)


def test_a_disk_that_is_full_is_said_and_what_was_kept_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes a part of a write first, and nothing of the next one."""

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            if self.tell():
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(memoryview(data)[:100])

    swap = SwapSpace(8, tmp_path)
    blocks = torch.arange(4096.0).view(4, 2, 512)
    swap.put(1, 20, 2, [blocks])
    monkeypatch.setattr(
        "tempfile.TemporaryFile", lambda dir, buffering: Full(Path(dir, "full"), "w+")
    )
    with pytest.raises(ResourceExhaustedError, match="No space left") as raised:
        swap.put(2, 20, 2, [blocks])
    assert (raised.value.field, swap.used, swap.requests) == ("kv_swap_on_disk", 2, frozenset({1}))
    assert torch.equal(swap.take(1)[0], blocks)
    assert (swap.used, swap.swapped_out, swap.swapped_in) == (0, 1, 1)


def test_what_is_written_piece_by_piece_is_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any, /) -> int:
            return super().write(memoryview(data)[:1000])

    monkeypatch.setattr(
        "tempfile.TemporaryFile", lambda dir, buffering: Slow(Path(dir, "slow"), "w+")
    )
    swap, blocks = SwapSpace(8, tmp_path), torch.arange(4096.0).view(4, 2, 512)
    swap.put(1, 20, 2, [blocks])
    assert torch.equal(swap.take(1)[0], blocks)


def test_swapping_that_cannot_be_is_refused_and_changes_nothing(pool: KvPool) -> None:
    pool.swap = SwapSpace(2)
    out, back = StepPlan(swap_outs=(1,)), KvGrant(1, 0, (0, 3), swapped=True)
    for plan, reason in (
        (StepPlan(swap_outs=(2,)), "KV_NONE_TO_SWAP"),
        (StepPlan(swap_outs=(9,)), "KV_NONE_TO_SWAP"),
        (StepPlan(grants=(back,)), "KV_GRANT_OUT_OF_ORDER"),
        (StepPlan(grants=(KvGrant(3, 0, (0,), swapped=True),)), "KV_SWAPPED"),
    ):
        before = state(pool)
        with pytest.raises(FailedPreconditionError) as raised:
            pool.check(plan)
        assert (raised.value.reason, state(pool)) == (reason, before)
    pool.commit(pool.check(out))
    for grant in (
        KvGrant(1, 0, (0, 3)),
        KvGrant(1, 0, (0,), swapped=True),
        KvGrant(1, 0, (0, 3, 4), swapped=True),
    ):
        with pytest.raises(FailedPreconditionError) as raised:
            pool.check(StepPlan(grants=(grant,)))
        assert raised.value.reason == "KV_SWAPPED"
    pool.begin_span(2, 0, 1, truncate_allowed=False)
    with pytest.raises(FailedPreconditionError, match="2 of 2") as raised:
        pool.check(StepPlan(swap_outs=(2,)))
    assert raised.value.reason == "KV_SWAP_FULL"
    pool.commit(pool.check(StepPlan(frees=(1,))))
    assert (pool.swap.used, pool.requests) == (0, frozenset({2}))
