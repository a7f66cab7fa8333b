"""The states of requests in a pool: slots are granted by the head, zeroed, swapped with the rest,
saved, and cut back only to the certain positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.model.attention.states import States
from edgeshard_agent.model.attention.swap import SwapSpace

from edgeshard.architectures import KvHeads, StateSize
from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StateCopy, StepPlan

SIZES = ((StateSize((3, 2)), StateSize((2, 4, 4), float32=True)), (), (StateSize((5,)),))
"""The sizes of three layers; the second one has attention, and no state."""


@pytest.fixture
def pool() -> KvPool:
    return made()


def made(slots: int = 2, guess_slots: int = 0) -> KvPool:
    states = States(slots, SIZES, "cpu", DType.BFLOAT16, guess_slots)
    heads = (KvHeads(0, 0), KvHeads(2, 6), KvHeads(0, 0))
    return KvPool(LayerRange(4, 7), KvMemory(DType.BFLOAT16, 8, 4), heads, "cpu", states=states)


def run(pool: KvPool, **what: object) -> None:
    pool.commit(pool.check(StepPlan(**what)))  # type: ignore[arg-type]


def begin(pool: KvPool, request: int, slot: int, block: int, tokens: int = 3) -> None:
    grant = KvGrant(request, 0, (block,), slot=slot)
    run(pool, grants=(grant,), spans=(Span(request, 0, tokens, sampling=Sampling()),))


def fill(pool: KvPool, slot: int) -> list[torch.Tensor]:
    for state in pool.states.of(slot):
        state.normal_()
    return [state.clone() for state in pool.states.of(slot)]


def test_layers_have_the_memory_that_they_ask_for(pool: KvPool) -> None:
    assert [
        [(tuple(s.shape), s.dtype) for s in pool.layer_states(layer)] for layer in (4, 5, 6)
    ] == [
        [((2, 3, 2), torch.bfloat16), ((2, 2, 4, 4), torch.float32)],
        [],
        [((2, 5), torch.bfloat16)],
    ]
    assert pool.states.slot_bytes == 6 * 2 + 32 * 4 + 5 * 2
    assert pool.block_bytes == 4 * 2 * 2 * 6 * 2, "keys and values of the one layer that has heads"
    assert pool.bytes_capacity == 8 * pool.block_bytes + 2 * pool.states.slot_bytes
    assert pool.arena(5) is not None
    with pytest.raises(EdgeShardError):
        pool.arena(4)


def test_a_slot_is_zero_when_it_is_granted_whoever_had_it(pool: KvPool) -> None:
    begin(pool, 1, 0, 0)
    begin(pool, 2, 1, 1)
    fill(pool, 0)
    others = fill(pool, 1)
    assert pool.bytes_in_use == 2 * pool.block_bytes + 2 * pool.states.slot_bytes
    run(
        pool,
        frees=(1,),
        grants=(KvGrant(3, 0, (0,), slot=0),),
        spans=(Span(3, 0, 2, sampling=Sampling()),),
    )
    assert not any(state.any() for state in pool.states.of(0))
    assert all(map(torch.equal, pool.states.of(1), others))
    run(pool, frees=(2, 3))
    assert pool.bytes_in_use == 0


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_are_swapped_with_keys_and_values(
    pool: KvPool, on_disk: bool, tmp_path: Path
) -> None:
    pool.swap = SwapSpace(4, tmp_path if on_disk else None)
    begin(pool, 1, 0, 0)
    before = fill(pool, 0)
    run(
        pool,
        swap_outs=(1,),
        grants=(KvGrant(2, 0, (0,), slot=0),),
        spans=(Span(2, 0, 2, sampling=Sampling()),),
    )
    assert not any(state.any() for state in pool.states.of(0))
    run(pool, grants=(KvGrant(1, 0, (5,), swapped=True, slot=1),))
    assert all(map(torch.equal, pool.states.of(1), before))
    run(pool, spans=(Span(1, 3, 1),))


def same(pool: KvPool, slot: int, states: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, pool.states.of(slot), states))


def shared(request: int, slot: int) -> KvGrant:
    """Begins with block 0, which is full."""
    return KvGrant(request, 0, (0,), filled=4, slot=slot)


def test_saved_states_begin_another_request(pool: KvPool) -> None:
    begin(pool, 1, 0, 0, 4)
    before = fill(pool, 0)
    run(pool, saves=(StateCopy(1, 4, 1),), grants=(KvGrant(1, 1, (1,)),), spans=(Span(1, 4, 1),))
    assert same(pool, 1, before) and same(pool, 0, before)
    fill(pool, 0)
    run(pool, frees=(1,))
    assert pool.bytes_in_use == 0, "what is saved is nobody's, like a block that is cached"
    run(pool, grants=(shared(2, 0),), restores=(StateCopy(2, 4, 1),))
    assert same(pool, 0, before) and same(pool, 1, before)
    run(pool, grants=(KvGrant(2, 1, (2,)),), spans=(Span(2, 4, 2, sampling=Sampling()),))


def test_states_are_saved_before_anything_else_of_the_step(pool: KvPool) -> None:
    """The step may free the request and grant its slot to another one, which begins from the saved
    states."""
    begin(pool, 1, 0, 0, 4)
    before = fill(pool, 0)
    plan = StepPlan(
        frees=(1,),
        grants=(shared(2, 0), KvGrant(2, 1, (2,))),
        spans=(Span(2, 4, 2, sampling=Sampling()),),
        saves=(StateCopy(1, 4, 1),),
        restores=(StateCopy(2, 4, 1),),
    )
    pool.commit(pool.check(plan))
    assert same(pool, 0, before) and same(pool, 1, before)


def test_a_slot_that_is_granted_keeps_nothing_that_was_saved(pool: KvPool) -> None:
    begin(pool, 1, 0, 0, 4)
    fill(pool, 0)
    run(pool, saves=(StateCopy(1, 4, 1),), grants=(KvGrant(2, 0, (3,), slot=1),))
    assert not any(state.any() for state in pool.states.of(1))
    run(pool, frees=(1, 2))
    with pytest.raises(EdgeShardError) as refused:
        run(pool, grants=(shared(3, 0),), restores=(StateCopy(3, 4, 1),))
    assert refused.value.reason == "STATE_NOT_SAVED"


def test_a_save_and_a_restore_done_twice_are_as_done_once(pool: KvPool) -> None:
    begin(pool, 1, 0, 0, 4)
    before = fill(pool, 0)
    run(pool, saves=(StateCopy(1, 4, 1),) * 2)
    run(pool, saves=(StateCopy(1, 4, 1),), frees=(1,))
    run(pool, grants=(shared(2, 0),), restores=(StateCopy(2, 4, 1),) * 2)
    assert same(pool, 0, before) and same(pool, 1, before)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (StepPlan(grants=(KvGrant(2, 0, (1,)),)), "STATE_SLOT_MISSING"),
        (StepPlan(grants=(KvGrant(2, 0, (1,), slot=2),)), "STATE_SLOT_MISSING"),
        (StepPlan(grants=(KvGrant(2, 0, (1,), slot=0),)), "STATE_SLOT_IN_USE"),
        (
            StepPlan(grants=(KvGrant(2, 0, (1,), slot=1), KvGrant(3, 0, (2,), slot=1))),
            "STATE_SLOT_IN_USE",
        ),
        (StepPlan(grants=(KvGrant(1, 1, (1,), slot=1),)), "STATE_SLOT_NOT_DUE"),
        (StepPlan(spans=(Span(1, 2, 1, sampling=Sampling()),)), "STATE_TRUNCATION_REFUSED"),
        (StepPlan(saves=(StateCopy(1, 3, 2),)), "STATE_SLOT_MISSING"),
        (StepPlan(saves=(StateCopy(1, 3, 0),)), "STATE_SLOT_IN_USE"),
        (StepPlan(saves=(StateCopy(1, 2, 1),)), "STATE_POSITION"),
        (StepPlan(saves=(StateCopy(9, 0, 1),)), "STATE_POSITION"),
        (StepPlan(restores=(StateCopy(1, 3, 1),)), "STATE_NOT_RESTORED"),
        (StepPlan(frees=(1,), grants=(shared(2, 0),)), "KV_BLOCK_NOT_FULL"),
    ],
)
def test_what_the_head_may_not_ask_of_slots_is_refused_and_changes_nothing(
    pool: KvPool, plan: StepPlan, reason: str
) -> None:
    begin(pool, 1, 0, 0)
    before = fill(pool, 0)
    with pytest.raises(EdgeShardError) as refused:
        pool.check(plan)
    assert refused.value.reason == reason
    assert pool.requests == {1} and all(map(torch.equal, pool.states.of(0), before))


# Behind guesses


@pytest.fixture
def guessing() -> KvPool:
    """Three slots, followed by four for guesses; requests 1 and 2 have 5 and 2 certain
    positions."""
    pool = made(3, 4)
    pool.swap = SwapSpace(4)
    for request, blocks, tokens in ((1, (0, 1, 2, 5), 5), (2, (3, 4), 2)):
        grant = KvGrant(request, 0, blocks, slot=request)
        run(pool, grants=(grant,), spans=(Span(request, 0, tokens, sampling=Sampling()),))
    return pool


def guess(request: int, first: int, guesses: int) -> Span:
    """One certain position, followed by guesses."""
    return Span(request, first, 1 + guesses, sample=True, guesses=guesses)


def where(pool: KvPool, span: Span) -> tuple[list[int], list[int]]:
    """The slots in which a span finds its states, and the slots for the states after its rows."""
    run(pool, spans=(span,))
    found = StepAttention(pool, [span], torch.device("cpu")).span_states
    assert found is not None and found.first_rows.tolist() == [0, span.token_count]
    return found.slots.tolist(), [] if found.row_slots is None else found.row_slots.tolist()


def test_each_guess_has_a_slot_until_one_is_kept(guessing: KvPool) -> None:
    assert guessing.bytes_capacity == 8 * guessing.block_bytes + 7 * guessing.states.slot_bytes
    assert [len(state) for state in guessing.layer_states(4)] == [7, 7]
    before = guessing.bytes_in_use
    assert where(guessing, guess(1, 5, 3)) == ([1], [1, 3, 4, 5])
    assert guessing.bytes_in_use == before + 3 * guessing.states.slot_bytes
    assert where(guessing, guess(1, 8, 2)) == ([4], [1, 3, 4]), "two were right"
    assert where(guessing, Span(1, 9, 1)) == ([1], []), "none was: its own is from before the first"
    assert guessing.bytes_in_use == before
    assert where(guessing, guess(1, 10, 1)) == ([1], [1, 3])
    assert where(guessing, Span(1, 12, 1)) == ([3], [1]), "its only one was"


def test_no_slot_behind_a_guess_is_of_two_requests(guessing: KvPool) -> None:
    run(guessing, spans=(guess(1, 5, 3), guess(2, 2, 1)))
    assert (guessing.table(1).guess_slots, guessing.table(2).guess_slots) == ((3, 4, 5), (6,))
    for spans in (
        (guess(1, 6, 4),),
        (guess(2, 3, 2),),
        (guess(1, 6, 1), guess(2, 3, 2)),
        (guess(2, 3, 2), Span(1, 8, 1)),
    ):
        with pytest.raises(FailedPreconditionError) as refused:
            guessing.check(StepPlan(spans=spans))
        assert (
            refused.value.reason == "STATE_GUESS_SLOTS_IN_USE"
            and refused.value.field == "spans.guesses"
        )
    run(guessing, spans=(Span(1, 8, 1),))
    run(guessing, spans=(guess(2, 3, 3),))
    assert guessing.table(2).guess_slots == (6, 3, 4)


@pytest.mark.parametrize("way", ["frees", "swap_outs"])
def test_slots_behind_guesses_go_with_their_request(guessing: KvPool, way: str) -> None:
    """At once: no request starts from them in that step."""
    run(guessing, spans=(guess(1, 5, 4),))
    kept = fill(guessing, 1)
    run(guessing, **{way: (1,)}, spans=(guess(2, 2, 4),))
    assert guessing.table(2).guess_slots == (3, 4, 5, 6)
    if way == "swap_outs":
        grant = KvGrant(1, 0, (0, 1), swapped=True, slot=0)
        run(guessing, grants=(grant,), spans=(Span(1, 6, 1),))
        assert same(guessing, 0, kept) and guessing.table(1).guess_slots == (), (
            "as they were behind what is certain"
        )


def test_what_is_saved_beside_guesses_is_certain(guessing: KvPool) -> None:
    run(guessing, spans=(Span(1, 5, 3, sample=True),))
    run(guessing, frees=(2,), spans=(guess(1, 8, 3),))
    before = fill(guessing, 1)
    for position in (10, 12):
        with pytest.raises(FailedPreconditionError) as refused:
            guessing.check(StepPlan(saves=(StateCopy(1, position, 0),)))
        assert refused.value.reason == "STATE_POSITION"
    run(guessing, saves=(StateCopy(1, 9, 0),), spans=(Span(1, 11, 1),))
    assert same(guessing, 0, before)


def test_states_are_cut_back_to_what_is_certain_and_no_further(guessing: KvPool) -> None:
    run(guessing, spans=(guess(1, 5, 3),))
    for first in range(6):
        with pytest.raises(FailedPreconditionError) as refused:
            guessing.check(StepPlan(spans=(Span(1, first, 1, sampling=Sampling()),)))
        assert refused.value.reason == "STATE_TRUNCATION_REFUSED"
    assert [guessing.table(1).slot_behind(position) for position in range(6, 10)] == [1, 3, 4, 5]
    run(guessing, grants=(KvGrant(1, 4, (7,)),))
    assert guessing.table(1).guess_slots == (3, 4, 5), "blocks that come meanwhile change nothing"


def test_a_stage_without_slots_for_guesses_refuses_them() -> None:
    pool = made()
    begin(pool, 1, 0, 0)
    with pytest.raises(FailedPreconditionError) as refused:
        pool.check(StepPlan(spans=(Span(1, 3, 1, sample=True, guesses=1),)))
    assert refused.value.reason == "STATE_GUESS_SLOTS_IN_USE"


def test_a_stage_without_states_ignores_slots_that_others_need() -> None:
    pool = KvPool(LayerRange(0, 1), KvMemory(DType.FLOAT32, 4, 4), [KvHeads(1, 2)], "cpu")
    run(pool, grants=(KvGrant(1, 0, (0,), slot=0),))
    assert pool.table(1).slot is None
