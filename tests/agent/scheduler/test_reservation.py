"""Memory is reserved for likely answers: many short ones run at once, and the oldest request always
finishes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.kv_blocks import MAX_REMEMBERED_ANSWERS, Reservation
from edgeshard_agent.scheduler.scheduler import Limits
from edgeshard_agent.scheduler.sequence import Sequence
from edgeshard_agent.scheduler.swapping import Swapping
from edgeshard_agent.scheduler.text import TextStream

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import Generation
from edgeshard.domain.requests.head import RequestEnd
from tests.support.forms import in_form
from tests.support.rig import Alone, Rig, Ring

EOS = 96
SEEDS = in_form(60, 600)


def sequence_of(prompt: int, new: int, emitted: int = 0, **options: Any) -> Sequence:
    generation = Generation((1,) * prompt, new, **options)
    text = TextStream(lambda ids: "", [], ())
    return Sequence(0, 0, RequestId("r"), "", generation, [1] * (prompt + emitted), prompt, text)


def test_a_likely_answer_is_reserved() -> None:
    reservation = Reservation(100)
    assert reservation.positions(sequence_of(10, 8000)) == 110
    assert reservation.positions(sequence_of(10, 8000, emitted=500)) == 610, (
        "as much again after a preemption"
    )
    assert reservation.positions(sequence_of(10, 20)) == 30, "never more than its longest text"
    assert reservation.positions(sequence_of(10, 0, prompt_logprobs=True)) == 10


def test_with_overcommit_only_the_prompt_and_one_token_are_reserved() -> None:
    reservation = Reservation(100, overcommit=True)
    assert reservation.positions(sequence_of(10, 8000)) == 11
    assert reservation.positions(sequence_of(10, 0, prompt_logprobs=True)) == 10


def test_answers_that_ended_show_how_long_answers_are() -> None:
    reservation = Reservation(128)
    ended = sequence_of(10, 8000, emitted=1000)
    reservation.ended(ended)
    assert reservation.positions(sequence_of(10, 8000)) == 10 + 564, (
        "the default counts as one answer"
    )
    for _ in range(10 * MAX_REMEMBERED_ANSWERS):
        reservation.ended(ended)
    assert reservation.positions(sequence_of(10, 8000)) in (1009, 1010)
    for _ in range(10 * MAX_REMEMBERED_ANSWERS):
        reservation.ended(sequence_of(10, 8000, emitted=1))
    assert reservation.positions(sequence_of(10, 8000)) in (11, 12), "the newest answers count"


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def test_eight_open_chats_run_at_once_on_a_pool_of_two_contexts(
    make_rig: type[Rig], alone: Alone
) -> None:
    context = 1024
    rig = make_rig(
        blocks=2 * context // 16,
        block_tokens=16,
        batching=Batching(Mode.NO_BUBBLES, 1, 8, 1),
        chunking=Chunking(512),
        limits=Limits(context, 100),
        eos=frozenset({EOS}),
    )
    prompts = {f"r{number}": [number + 1, 7] for number in range(8)}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, context - len(prompt))
    assert rig.scheduler.stats.running == 8
    rig.run_all()
    for name, prompt in prompts.items():
        assert rig.tokens(name) == until_end(alone(prompt, context - len(prompt)))
    assert max(len(rig.tokens(name)) for name in prompts) > 128, (
        "some grew beyond their reservation"
    )
    assert rig.scheduler.stats.preemptions == 0
    rig.check_empty()


def test_the_newest_gives_its_memory_to_the_oldest(make_rig: type[Rig], alone: Alone) -> None:
    rig = make_rig(
        blocks=12,
        batching=Batching(Mode.NO_BUBBLES, 1, 8, 1),
        chunking=Chunking(16),
        limits=Limits(48, 100, answer_tokens=4),
    )
    for number in range(4):
        rig.submit(f"r{number}", [number + 1] * 3, 40)
    assert rig.scheduler.stats.running == 4
    rig.run_all()
    ends = [event.request_id for event in rig.events if isinstance(event.event, RequestEnd)]
    assert ends[0] == "r0"
    for number in range(4):
        assert rig.tokens(f"r{number}") == alone([number + 1] * 3, 40)
    assert rig.scheduler.stats.preemptions > 0
    rig.check_empty()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_oldest_always_finishes_and_no_block_is_lost(
    make_rig: type[Rig], make_ring: type[Ring], alone: Alone, seed: int
) -> None:
    """In a pool of one to two contexts, with any reservation: the oldest running request is
    preempted only for an older one. Every request gets the tokens of an undisturbed run, and all
    blocks return to the pool."""
    dice = random.Random(seed)
    context = 32
    block_tokens = dice.choice([1, 2, 4])
    window = dice.randint(1, 4)
    rig = make_rig(
        blocks=dice.randint(context, 2 * context) // block_tokens,
        block_tokens=block_tokens,
        stages=dice.randint(1, 3),
        batching=Batching(
            dice.choice(list(Mode)), window, dice.randint(1, 8), dice.randint(1, window)
        ),
        chunking=Chunking(dice.randint(1, 24), max_step_tokens=32, least_tokens=dice.randint(1, 4)),
        limits=Limits(
            context,
            20,
            answer_tokens=dice.choice([1, 4, 16, 64]),
            overcommit=dice.random() < 0.2,
            prefix_cache=dice.random() < 0.5,
        ),
        eos=frozenset({EOS}),
        swapping=Swapping(dice.choice([0, 0, 16])),
    )
    ring = make_ring(rig, dice)
    scheduler = rig.scheduler
    prompts = {
        f"r{number}": [dice.randrange(4) for _ in range(dice.randint(1, 12))]
        for number in range(12)
    }
    ignores = {name: dice.random() < 0.3 for name in prompts}
    coming = list(prompts)
    while coming or ring.enabled():
        oldest = min(
            scheduler._running.values(), key=lambda sequence: sequence.standing, default=None
        )
        if coming and (dice.random() < 0.2 or not ring.enabled()):
            name = coming.pop(0)
            new = context - len(prompts[name])
            rig.submit(name, prompts[name], new, client=dice.choice("ab"), ignore_eos=ignores[name])
            ring.pump()
        else:
            ring.happen()
        if oldest is not None and oldest.request_id in scheduler._requests:
            # A preempted request that is older may come back within the same event.
            older = [
                other for other in scheduler._running.values() if other.standing < oldest.standing
            ]
            assert oldest.number in scheduler._running or older, (
                "the oldest that runs was preempted"
            )
        assert scheduler.allocator.unpromised >= 0
    for name, prompt in prompts.items():
        right = alone(prompt, context - len(prompt))
        assert rig.tokens(name) == (right if ignores[name] else until_end(right))
    rig.check_empty()
