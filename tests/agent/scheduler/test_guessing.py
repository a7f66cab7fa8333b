"""Guesses: what they are, how many a request gets, and that none of them ever changes a token,
wherever they go.

These mutants fail here. The head takes a token after a guess without comparing the two, or
continues one position too far after right guesses. It lets a preempted request keep guesses, or
counts the slots of other requests' guesses as free. A stage starts from the states after another
position.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from edgeshard_agent.model.attention.kv import KvTable
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.guessing import (
    MOST_INDEXED,
    MOST_REST,
    MOST_ROWS,
    DraftPacing,
    Guessed,
    Guessing,
    NgramDrafter,
)
from edgeshard_agent.scheduler.scheduler import Limits
from edgeshard_agent.scheduler.swapping import Swapping

from edgeshard.domain.deployments.guesses import MOST_GUESSES, NO_GUESSES, GuessCounts
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.deployments.step_cost import Piece
from edgeshard.domain.errors import InternalError
from edgeshard.domain.requests.step import StepResult
from tests.support.rig import Alone, Rig, Ring, expected


@dataclass
class Oracle:
    """Guesses the drawn tokens, except for a `wrong` fraction of them."""

    dice: random.Random
    wrong: float = 0.0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        right = expected(list(tokens), limit)
        return [
            self.dice.randrange(97) if self.dice.random() < self.wrong else token for token in right
        ]


def oracle(wrong: float = 0.0, **options: Any) -> Guessing:
    return Guessing(proposer=partial(Oracle, random.Random(1), wrong), **options)


# The content of guesses


@pytest.mark.parametrize(
    ("tokens", "guesses"),
    [
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest
        ([7, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2], [3, 5, 1, 2]),  # the longest before the latest
        # four are enough: the latest of these
        (
            [6, 7, 1, 2, 3, 6, 7, 1, 2, 4, 6, 7, 1, 2],
            [4, 6, 7, 1],
        ),
        ([5, 5], []),
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3]),  # a text that repeats continues like this
    ],
)
def test_what_followed_the_longest_match_is_guessed(tokens: list[int], guesses: list[int]) -> None:
    assert NgramDrafter().propose(tokens, 4) == guesses
    grown = NgramDrafter()
    for end in range(len(tokens)):
        grown.propose(tokens[:end], end % 3)
    assert grown.propose(tokens, 4) == guesses and grown.propose(tokens, 0) == []


def test_a_long_prompt_goes_into_the_index_piece_by_piece() -> None:
    tokens, repeats = [1, 2, 3] * MOST_INDEXED, NgramDrafter()
    assert [repeats.propose(tokens, 2) for _ in range(4)] == [[], [], [1, 2], [1, 2]]


def test_a_proposal_is_what_a_search_through_the_whole_text_finds() -> None:
    dice = random.Random(2)
    for _ in range(200):
        tokens, grown = [dice.randrange(4) for _ in range(2)], NgramDrafter()
        for _ in range(14):
            tokens.append(dice.randrange(4))
            found = [(length, end) for length in (4, 3, 2) for end in range(length, len(tokens))
                     if tokens[end - length : end] == tokens[-length:]]  # fmt: skip
            wanted = tokens[max(found, default=(0, len(tokens)))[1] :][:1]
            assert grown.propose(tokens, 1) == wanted


def test_the_pace_follows_what_was_right() -> None:
    pace = DraftPacing()
    assert (
        pace.most == 2
        and pace.after(2, 2).most == 4
        and pace.after(2, 2).after(4, 4).after(7, 7).most == MOST_ROWS
    )
    assert pace.after(2, 1).most == 2 and DraftPacing(8).after(7, 2).most == 3
    rests = []
    for _ in range(12):
        pace = pace.after(pace.most, 0)
        rests.append(pace.rest)
        assert pace.most == 0
        while pace.rest:
            pace = pace.after(0, 0)
        assert pace.most == 1
    assert rests[:4] == [1, 2, 4, 8] and rests[-1] == MOST_REST
    assert pace.after(1, 1).after(2, 0).rest == 1


# How many rows they take


def spans(rig: Rig) -> list[tuple[int, ...]]:
    return [step.guessed.get(span.request, ()) for step in rig.steps for span in step.plan.spans]


def test_right_guesses_save_steps_and_change_nothing(make_rig: type[Rig], alone: Alone) -> None:
    """At the limit of tokens nothing is guessed that could not be drawn: no position is run that is
    not needed."""
    rig = make_rig(blocks=12, chunking=Chunking(16), guessing=oracle())
    rig.submit("a", [1, 2, 3], 40)
    rig.run_all()
    assert rig.tokens("a") == alone([1, 2, 3], 40)
    assert [len(guesses) for guesses in spans(rig)] == [0, 2, 4, 7, 7, 7, 6]
    assert [span.end_position for step in rig.steps for span in step.plan.spans][-1] == 42
    stats = rig.scheduler.stats
    assert (stats.steps, stats.guesses, stats.right_guesses, stats.new_tokens) == (8, 33, 33, 40)
    rig.check_empty()


def test_the_end_of_a_request_tells_of_the_steps_in_which_it_decoded_alone(
    make_rig: type[Rig],
) -> None:
    """With other requests fewer tokens are guessed, which does not depend on its text. A step
    without guesses counts, too.
    """
    rig = make_rig(blocks=12, chunking=Chunking(16), guessing=oracle())
    rig.submit("a", [1, 2, 3], 40)
    rig.run_all()
    assert [end.guesses for end in rig.ends("a")] == [
        GuessCounts.of({(2, 2): 1, (4, 4): 1, (7, 7): 3, (6, 6): 1})
    ]
    rig = make_rig(blocks=60, chunking=Chunking(16), guessing=oracle(wrong=1.0))
    rig.submit("a", [1, 2, 3], 12)
    rig.submit("b", [1, 2, 3], 40)
    rig.run_all()
    (beside,), (alone,) = rig.ends("a"), rig.ends("b")
    assert beside.guesses == NO_GUESSES
    steps = {(guessed, right): count for guessed, right, count in alone.guesses}
    assert (
        20 < alone.guesses.tokens < 30 and steps[0, 0] > 10 and any(guessed for guessed, _ in steps)
    )
    rig = make_rig(chunking=Chunking(16))
    rig.submit("a", [1, 2, 3], 9)
    rig.run_all()
    assert [end.guesses for end in rig.ends("a")] == [NO_GUESSES], "nothing is guessed"


def test_a_request_that_is_cancelled_tells_of_its_guesses_too(make_rig: type[Rig]) -> None:
    rig = make_rig(blocks=12, chunking=Chunking(16), guessing=oracle())
    rig.submit("a", [1, 2, 3], 40)
    for _ in range(3):
        rig.take(rig.next_step())
    assert rig.cancel("a") and [end.guesses for end in rig.ends("a")] == [
        GuessCounts.of({(2, 2): 1, (4, 4): 1})
    ]


def test_wrong_guesses_are_taken_back_and_become_rare(make_rig: type[Rig], alone: Alone) -> None:
    rig = make_rig(blocks=12, chunking=Chunking(16), guessing=oracle(wrong=1.0), stages=2)
    rig.submit("a", [1, 2, 3], 40)
    rig.run_all()
    assert rig.tokens("a") == alone([1, 2, 3], 40)
    assert rig.scheduler.stats.right_guesses < 3 and sum(map(bool, spans(rig))) < 9
    rig.check_empty()


@pytest.mark.parametrize(("streams", "most"), [(1, 7), (2, 3), (3, 1), (4, 1), (5, 0), (8, 0)])
def test_a_step_has_eight_rows_and_none_where_others_need_them(
    make_rig: type[Rig], streams: int, most: int
) -> None:
    rig = make_rig(
        blocks=100,
        chunking=Chunking(64),
        batching=Batching(Mode.NO_BUBBLES, 1, 8, 1),
        guessing=oracle(),
    )
    for number in range(streams):
        rig.submit(f"r{number}", [number, 1], 30)
    rig.run_all()
    decodes = [step for step in rig.steps[2:] if step.plan.spans]
    assert max(len(guesses) for guesses in spans(rig)) == most
    assert max(step.plan.token_count for step in decodes) <= max(MOST_ROWS, streams)


def test_nobody_guesses_beside_a_prompt(make_rig: type[Rig]) -> None:
    rig = make_rig(blocks=40, chunking=Chunking(6), guessing=oracle())
    rig.submit("a", [1, 2], 30)
    rig.take(rig.next_step())
    rig.submit("b", list(range(20)), 2)
    while rig.scheduler._prefilling:
        rig.take(rig.next_step())
    assert not any(spans(rig)) and len(rig.steps) > 3
    rig.run_all()
    assert any(spans(rig))


def test_guesses_keep_within_the_budget_and_what_they_cost(make_rig: type[Rig]) -> None:
    def inter_token_s(row_s: float, pieces: Sequence[Piece], in_flight: int) -> float:
        return 1.0 + row_s * (len(pieces) - 1)

    for budget, row_s, most in ((4, 0.0, 3), (64, 0.4, 7), (64, 0.6, 0)):
        costs = partial(inter_token_s, row_s)
        rig = make_rig(blocks=40, chunking=Chunking(budget), guessing=oracle(inter_token_s=costs))
        rig.submit("a", [1, 2], 40)
        rig.run_all()
        assert max(map(len, spans(rig))) == most


def test_nothing_is_guessed_behind_an_end(make_rig: type[Rig], alone: Alone) -> None:
    right = alone([1, 2, 3], 20)
    end, stop = right[4], right[7]
    cases: list[tuple[set[int], dict[str, Any], int]] = [
        ({end}, {}, 5),
        (set(), {"stop_tokens": (stop,)}, 8),
    ]
    for ends, options, count in cases:
        rig = make_rig(
            eos=frozenset(ends), chunking=Chunking(16), guessing=oracle(ends=frozenset(ends))
        )
        rig.submit("a", [1, 2, 3], 20, **options)
        rig.run_all()
        assert rig.tokens("a") == right[:count]
        assert not {end if ends else stop} & {token for guesses in spans(rig) for token in guesses}
        rig.check_empty()


def test_tokens_behind_a_stop_string_are_dropped(make_rig: type[Rig], alone: Alone) -> None:
    right = alone([1, 2, 3], 20)
    rig = make_rig(chunking=Chunking(16), guessing=oracle())
    rig.submit("a", [1, 2, 3], 20, stop_strings=(f"<{right[5]}>",))
    rig.run_all()
    assert rig.tokens("a") == right[:6] and len(rig.ends("a")) == 1
    rig.check_empty()


# Requests with states


def hybrid(make_rig: type[Rig], slots: int = MOST_GUESSES, **options: Any) -> Rig:
    limits = Limits(64, 100, prefix_cache=True, save_every=options.pop("save_every", 16 * 4))
    given: dict[str, Any] = {
        "blocks": 60,
        "chunking": Chunking(32),
        "states": 12,
        "limits": limits,
    } | options
    return make_rig(guessing=oracle(given.pop("wrong", 0.0), slots=slots), **given)


@pytest.mark.parametrize("slots", [0, 1, 3, 7])
def test_a_request_with_states_has_no_more_guesses_than_there_are_slots(
    make_rig: type[Rig], alone: Alone, slots: int
) -> None:
    rig = hybrid(make_rig, slots)
    rig.submit("a", [1, 2, 3], 40)
    rig.run_all()
    assert rig.tokens("a") == alone([1, 2, 3], 40)
    assert max(map(len, spans(rig))) == slots
    rig.check_empty()


def test_states_are_saved_where_they_are_without_guesses(make_rig: type[Rig], alone: Alone) -> None:
    """A span ends at each such position, so that the next turn of a conversation begins as late."""
    saved, hits = [], []
    for guessing in (None, oracle(slots=MOST_GUESSES)):
        limits = Limits(64, 100, prefix_cache=True, save_every=8)
        rig = make_rig(
            blocks=60, chunking=Chunking(32), states=12, limits=limits, guessing=guessing
        )
        rig.submit("a", [1, 2, 3], 30)
        rig.run_all()
        saved.append([copy.position for step in rig.steps for copy in step.plan.saves])
        turn = [1, 2, 3, *rig.tokens("a"), 60]
        rig.submit("b", turn, 5)
        rig.run_all()
        assert rig.tokens("a") == alone([1, 2, 3], 30) and rig.tokens("b") == alone(turn, 5)
        hits.append(rig.scheduler.stats.prefix_hit_tokens)
        rig.check_empty()
    assert saved[0] == saved[1] == [8, 16, 24, 32] and hits[0] == hits[1] == 32
    assert rig.scheduler.stats.right_guesses > 10


@pytest.mark.parametrize("mutant", ["behind the last guess", "behind what was certain"])
def test_states_that_are_not_rolled_back_show_in_the_tokens(
    make_rig: type[Rig], alone: Alone, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    """So the tests of requests with states fail if a stage starts from the wrong slot."""
    slot_behind = KvTable.slot_behind
    wrong: dict[str, Any] = {
        "behind the last guess": lambda table, position: slot_behind(table, table.length),
        "behind what was certain": lambda table, position: table.slot,
    }
    monkeypatch.setattr(KvTable, "slot_behind", wrong[mutant])
    rig = hybrid(make_rig, wrong=0.5)
    rig.submit("a", [1, 2, 3], 40)
    rig.run_all()
    assert rig.tokens("a") != alone([1, 2, 3], 40)


# Effects of a result


WRONG: dict[str, Any] = {
    "another before the last": lambda right: (
        replace(right[0], token=right[0].token + 1),
        *right[1:],
    ),
    "one too many": lambda right: (*right, replace(right[-1], position=right[-1].position + 1)),
    "a gap": lambda right: (right[0], right[2]),
    "backwards": lambda right: right[::-1],
    "one twice": lambda right: (*right, right[-1]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_token_that_follows_no_right_guess_is_refused(make_rig: type[Rig], what: str) -> None:
    rig = make_rig(blocks=12, chunking=Chunking(16), guessing=oracle())
    rig.submit("a", [1, 2, 3], 30)
    rig.take(rig.next_step())
    right = rig.stages[0].run(rig.formed_step()).tokens
    assert len(right) == 3
    with pytest.raises(InternalError, match="step 1 ") as caught:
        rig.scheduler.on_result(1, StepResult(WRONG[what](right)), 0.0)
    assert caught.value.reason == "WRONG_RESULT"


# Wherever they go


@pytest.mark.parametrize("has_states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("seed", range(80))
def test_no_schedule_changes_a_token(
    make_rig: type[Rig], make_ring: type[Ring], alone: Alone, seed: int, has_states: bool
) -> None:
    """Few requests, as only then tokens are guessed. They arrive, share beginnings, are preempted,
    swapped or cancelled, and get late tokens, while half of the guesses are wrong. With states,
    their tokens depend only on the states."""
    dice = random.Random(seed)
    size = dice.choice([1, 2, 4])
    own = random.Random(f"states {seed}")
    save_every = own.choice([1, 2, 5]) * size
    states = own.randint(4, 8)
    slots = own.randint(1, 7)
    limits = Limits(
        48, 6, overcommit=dice.random() < 0.4, answer_tokens=dice.choice([1, 8, 128]),
        prefix_cache=dice.random() < 0.7, save_every=save_every * has_states,
    )  # fmt: skip
    rig = make_rig(
        states=states * has_states,
        blocks=dice.randint(48, 80) // size,
        block_tokens=size,
        stages=dice.randint(1, 3),
        limits=limits,
        batching=Batching(dice.choice(list(Mode)), dice.randint(1, 4), 4, 1),
        chunking=Chunking(dice.randint(4, 24)),
        swapping=Swapping(dice.choice([0, 20, 100])),
        guessing=Guessing(
            proposer=partial(Oracle, dice, dice.choice([0.0, 0.3, 0.6])),
            slots=slots if has_states else None,
        ),
    )
    ring = make_ring(rig, dice)
    late = dice.choice([0.0, 0.0, 0.3])
    rig.stages[-1].is_late = lambda: dice.random() < late
    trunk = [3] * dice.randint(0, 9)
    prompts = {
        f"r{n}": [*trunk, *dice.choices(range(9), k=dice.randint(1, 6))]
        for n in range(dice.randint(1, 4))
    }
    coming, cancelled = list(prompts), set[str]()
    while coming or ring.enabled():
        event = dice.random()
        if coming and (event < 0.05 or not ring.enabled()):
            name = coming.pop()
            rig.submit(name, prompts[name], 48 - len(prompts[name]), client=dice.choice("ab"))
            ring.pump()
        elif event < 0.052:
            name = dice.choice(list(prompts))
            cancelled |= {name} if rig.cancel(name) else set()
            ring.pump()
        else:
            ring.happen()
    rig.check_empty()
    for name, prompt in prompts.items():
        right, got = alone(prompt, 48 - len(prompt)), rig.tokens(name)
        assert got == right[: len(got)] and (got == right or name in cancelled)
    stats = rig.scheduler.stats
    SEEN[has_states].append(
        (
            stats.guesses,
            stats.right_guesses,
            stats.swaps,
            stats.preemptions,
            stats.prefix_hit_tokens,
        )
    )


SEEN: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}


@pytest.mark.parametrize("has_states", SEEN)
def test_the_schedules_had_all_that_they_were_to_have(has_states: bool) -> None:
    if len(SEEN[has_states]) < 80:
        pytest.skip("not all schedules were run")
    guesses, right, swaps, preemptions, hits = map(sum, zip(*SEEN[has_states], strict=True))
    assert right > 500 and guesses - right > 150, (guesses, right)
    assert swaps > 10 and preemptions > swaps and hits > 50, (swaps, preemptions, hits)


# Tokens that a guide forces


def test_forced_tokens_are_guessed_first_and_teach_the_pace_nothing() -> None:
    guessing, guessed = Guessing(frozenset({9})), Guessed(NgramDrafter(), DraftPacing(rest=5))
    repeating = [1, 2, 3, 1, 2, 3, 1, 2]
    assert guessing.guesses(guessed, repeating, 7) == ()
    assert guessing.guesses(guessed, repeating, 3, (4, 5, 6, 7)) == (4, 5, 6)
    guessed.noted(3, 0)
    assert guessed.pace == DraftPacing(rest=5)
    assert guessing.guesses(guessed, repeating, 7, (4, 9, 5)) == (4,)
    assert guessing.guesses(guessed, repeating, 0, (4,)) == ()
    guessed.noted(0, 0)
    assert guessed.pace == DraftPacing(rest=4)
    guessed.pace = DraftPacing()
    assert guessing.guesses(guessed, repeating, 7) == (3, 1)
