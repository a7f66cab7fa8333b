"""Requests whose states are kept: they share beginnings at saved states, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from edgeshard_agent.model.attention.kv import KvDraft, KvPool
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator, next_save
from edgeshard_agent.scheduler.scheduler import Limits
from edgeshard_agent.scheduler.swapping import Swapping
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.requests.step import KvGrant, StateCopy, StepPlan
from tests.support.rig import Alone, Rig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
BLOCK = 4
FAR = 12 * BLOCK


def hybrid(make_rig: type[Rig], states: int = 4, save_every: int = FAR, **options: Any) -> Rig:
    """A rig whose model's tokens depend on its states, with `states` slots."""
    limits = Limits(
        48,
        100,
        prefix_cache=True,
        save_every=save_every,
        overcommit=options.pop("overcommit", False),
    )
    given = {"blocks": 40, "chunking": Chunking(32), **options}
    return make_rig(limits=limits, states=states, **given)


def spans_of(rig: Rig, request: int) -> list[tuple[int, int]]:
    """The begin and end of each of its spans."""
    return [
        (s.first_position, s.end_position)
        for step in rig.steps
        for s in step.plan.spans
        if s.request == request
    ]


def run(rig: Rig, name: str, prompt: list[int], new: int) -> int:
    """Run a request; how many positions it did not have to run."""
    before = rig.scheduler.stats.prefix_hit_tokens
    rig.submit(name, prompt, new)
    rig.run_all()
    return rig.scheduler.stats.prefix_hit_tokens - before


def check_slots(rig: Rig, alone: Alone) -> None:
    """Check that no request has left anything, and that each slot starts empty, for as many
    requests as there are slots.
    """
    rig.check_empty()
    for number in range(rig.allocator.slots):
        run(rig, f"new{number}", [60 + number], 2)
        assert rig.tokens(f"new{number}") == alone([60 + number], 2)


@given(st.integers(0, 60), st.integers(1, 60), st.sampled_from([1, 4, 16]), st.integers(1, 3))
def test_spans_end_where_states_are_saved(first: int, more: int, block: int, blocks: int) -> None:
    end, distance = first + more, blocks * block
    places = [
        at
        for at in range(first + 1, end + distance + 1)
        if at % distance == 0 or at == (end - 1) // block * block
    ]
    assert next_save(first, end, block, distance) == places[0]


def test_the_end_of_a_prompt_is_saved_and_taken_up(make_rig: type[Rig], alone: Alone) -> None:
    rig = hybrid(make_rig)
    assert run(rig, "first", PROMPT, 3) == 0
    assert spans_of(rig, 0)[:2] == [(0, 8), (8, 10)]
    assert [step.plan.saves for step in rig.steps if step.plan.saves] == [(StateCopy(0, 8, 1),)]
    other = [*PROMPT[:8], 7, 7, 7]
    assert run(rig, "second", other, 3) == 8
    assert spans_of(rig, 1)[0] == (8, 11)
    assert [step.plan.restores for step in rig.steps if step.plan.restores] == [
        (StateCopy(1, 8, 1),)
    ]
    assert (rig.tokens("first"), rig.tokens("second")) == (alone(PROMPT, 3), alone(other, 3))
    rig.check_empty()


def test_blocks_in_common_are_run_again_where_no_states_were_saved(
    make_rig: type[Rig], alone: Alone
) -> None:
    rig = hybrid(make_rig)
    run(rig, "first", PROMPT, 3)
    other = [*PROMPT[:7], 50, 51]
    assert run(rig, "second", other, 3) == 0
    assert rig.tokens("second") == alone(other, 3)


def test_states_are_saved_on_the_way_too(make_rig: type[Rig], alone: Alone) -> None:
    """States of prompts and of answers: the next turn of a conversation begins with both."""
    rig = hybrid(make_rig, states=8, save_every=2 * BLOCK)
    run(rig, "first", list(range(20)), 14)
    assert [(s.position) for step in rig.steps for s in step.plan.saves] == [8, 16, 24, 32]
    turn = [*range(20), *rig.tokens("first"), 60, 61]
    assert run(rig, "second", turn, 4) == 32
    assert run(rig, "third", [*range(11), 61, 62], 4) == 8
    assert rig.tokens("second") == alone(turn, 4)
    assert rig.tokens("third") == alone([*range(11), 61, 62], 4)


def test_saved_states_give_way_the_longest_unused_first(make_rig: type[Rig], alone: Alone) -> None:
    """Three slots: one for the request that runs, two for saves."""
    rig = hybrid(make_rig, states=3)
    prompts = [[number] * 10 for number in range(3)]
    for number, prompt in enumerate(prompts[:2]):
        run(rig, f"r{number}", prompt, 2)
    assert run(rig, "used again", prompts[0], 2) == 8
    run(rig, "r2", prompts[2], 2)
    assert [run(rig, f"again{number}", prompts[number], 2) for number in (0, 2)] == [8, 8]
    assert run(rig, "again1", prompts[1], 2) == 0
    assert rig.tokens("again1") == rig.tokens("r1") == alone(prompts[1], 2)


def test_saved_states_go_with_the_blocks_of_their_prefix(make_rig: type[Rig], alone: Alone) -> None:
    rig = hybrid(make_rig, states=40, blocks=12)
    run(rig, "first", PROMPT, 2)
    for number in range(3):
        run(rig, f"r{number}", [number + 20] * 40, 2)
    assert run(rig, "again", PROMPT, 2) == 0
    assert rig.tokens("again") == alone(PROMPT, 2)
    assert len(rig.allocator._saved) < 5
    rig.check_empty()


def test_requests_that_run_come_before_saved_states(make_rig: type[Rig], alone: Alone) -> None:
    """Without a slot for a copy and one for the request, everything is run."""
    for states in (1, 2):
        rig = hybrid(make_rig, states=states)
        for number in range(4):
            rig.submit(f"r{number}", PROMPT, 4)
        rig.run_all()
        assert all(rig.tokens(f"r{number}") == alone(PROMPT, 4) for number in range(4))
        rig.check_empty()
    assert run(hybrid(make_rig, states=1), "alone", PROMPT, 4) == 0


def test_saved_states_stay_while_a_request_is_to_begin_from_them(
    make_rig: type[Rig], alone: Alone
) -> None:
    allocator = BlockAllocator(20, 4, 3)
    allocator.admit(1, 12)
    allocator.extend(1, 8)
    allocator.publish(1, 0, b"a")
    allocator.publish(1, 1, b"b")
    assert allocator.save(1, 4, b"a") == StateCopy(1, 4, 1)
    assert allocator.admit(2, 12, [b"a", b"c"]) == KvGrant(2, 0, (0,), filled=4, slot=2)
    assert allocator.save(1, 8, b"b") is None, (
        "one slot is of each request, and the third one is wanted"
    )
    assert allocator.restore(2) == StateCopy(2, 4, 1) and allocator.restore(2) is None
    assert allocator.save(1, 8, b"b") == StateCopy(1, 8, 1)
    allocator.release(1)
    allocator.release(2)
    assert allocator.admit(3, 12, [b"a"]) == KvGrant(3, 0, ()), "whose states are no more"
    assert allocator.save(3, 4, b"b") is None, "saved already"


@pytest.mark.parametrize("swap_blocks", [0, 100], ids=["", "swap"])
def test_whoever_gives_way_goes_on(make_rig: type[Rig], alone: Alone, swap_blocks: int) -> None:
    """Without swap from the last save before its position, with swap from the position; others
    begin from its saves, too.
    """
    rig = hybrid(
        make_rig,
        states=6,
        save_every=BLOCK,
        blocks=9,
        overcommit=True,
        batching=Batching(Mode.NO_BUBBLES, 2, 8, 2),
        swapping=Swapping(blocks=swap_blocks),
    )
    for number in range(2):
        rig.submit(f"r{number}", [number] * 6, 16)
    for _ in range(3):
        rig.take(rig.next_step())
    for number in range(2, 4):
        rig.submit(f"r{number}", [number % 2] * 6, 16)
    rig.run_all()
    for number in range(4):
        assert rig.tokens(f"r{number}") == alone([number % 2] * 6, 16)
    stats = rig.scheduler.stats
    ran = [place for number in range(4) for place in spans_of(rig, number)]
    assert stats.preemptions > 0 and stats.swaps == (stats.preemptions if swap_blocks else 0)
    if swap_blocks:
        assert (
            stats.prefix_hit_tokens == 2 * 4
            and sum(end - first for first, end in ran) == 4 * (6 + 15) - 2 * 4
        )
    else:
        assert stats.prefix_hit_tokens > 2 * 4
    check_slots(rig, alone)


@pytest.mark.parametrize("steps", range(6))
def test_a_cancel_at_any_time_leaves_no_slot_behind(
    make_rig: type[Rig], alone: Alone, steps: int
) -> None:
    """Before the first step of a request that is to begin from saved states, while a save is in
    flight, and later."""
    rig = hybrid(make_rig, states=3)
    run(rig, "first", PROMPT, 2)
    for name in ("second", "third"):
        rig.submit(name, [*PROMPT, 8, 8, 8, 8], 6)
    for _ in range(steps):
        rig.take(rig.next_step())
    assert rig.cancel("second")
    rig.run_all()
    assert rig.tokens("third") == alone([*PROMPT, 8, 8, 8, 8], 6)
    check_slots(rig, alone)
    assert run(rig, "again", [*PROMPT, 8, 8, 8, 8], 2) == 12
    assert rig.tokens("again") == alone([*PROMPT, 8, 8, 8, 8], 2)


def _left_out(part: str) -> Callable[[KvPool, StepPlan], KvDraft]:
    check = KvPool.check

    def checked(pool: KvPool, plan: StepPlan) -> KvDraft:
        draft = check(pool, plan)
        getattr(draft, part).clear()
        return draft

    return checked


@pytest.mark.parametrize("part", ["saves", "restores", "anew_slots"])
def test_what_a_stage_leaves_out_shows_in_the_tokens(
    make_rig: type[Rig], alone: Alone, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """So the tests of this file, and the schedules by dice, would fail without a save, a restore or
    a zeroing."""
    monkeypatch.setattr(KvPool, "check", _left_out(part))
    rig = hybrid(make_rig)
    names = [f"r{number}" for number in range(4)]
    for name in names:
        run(rig, name, PROMPT, 3)
    other = [9, *PROMPT]
    run(rig, "other", other, 3)
    assert any(rig.tokens(name) != alone(PROMPT, 3) for name in names) or rig.tokens(
        "other"
    ) != alone(other, 3)
