"""How many guesses are requested from the draft, and how many pay; none of them changes a token.

These mutants fail here: a step keeps the rows of guesses that were not made, or the head does not
receive the guesses that were made.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.drafting import DraftAsk, Prices, Trust, goes_on, is_kept
from edgeshard_agent.scheduler.guessing import (
    LONGEST_MATCH,
    MOST_REST,
    DraftPacing,
    Guessed,
    Guessing,
    NgramDrafter,
)
from edgeshard_agent.scheduler.scheduler import HeadStep, Limits
from edgeshard_agent.scheduler.swapping import Swapping

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import Span, StepPlan
from tests.support.rig import Alone, Rig, Ring, expected


class Silent:
    """Has no guess of its own."""

    def propose(self, tokens: object, limit: int) -> list[int]:
        return []


DRAFTS = Guessing(proposer=Silent, drafts=True)


def oracle(
    dice: random.Random, wrong: float = 0.0, missing: float = 0.0
) -> Callable[[DraftAsk], list[int]]:
    """A draft that guesses the drawn tokens, except for a `wrong` fraction of them; for a `missing`
    fraction it returns fewer guesses than requested.
    """

    def draft(ask: DraftAsk) -> list[int]:
        right = expected(list(ask.tokens), ask.most)
        if dice.random() < missing:
            right = right[: dice.randrange(ask.most)]
        return [dice.randrange(97) if dice.random() < wrong else token for token in right]

    return draft


# Its costs and savings


def prices(rounds: list[tuple[int, int, float]], guess_s: float, drafting_s: float = 0.0) -> Prices:
    known = Prices()
    known.drew(guess_s)
    for guesses, tokens, seconds in rounds:
        known.passed(guesses, tokens, seconds, drafting_s)
    return known


def test_a_row_costs_the_slope_of_what_rounds_took() -> None:
    assert not Prices().are_known and Prices().row_s == 0.0
    alike = prices([(0, 1, 0.010)] * 3, 0.001)
    assert (
        alike.are_known
        and alike.row_s == pytest.approx(0.001)
        and alike.token_s == pytest.approx(0.010)
    )
    assert not prices([(0, 1, 0.010)], 0.0).are_known
    seen = prices([(0, 1, 0.010), (4, 3, 0.014)] * 20, 0.001)
    assert seen.row_s == pytest.approx(0.001, rel=0.01) and seen.token_s == pytest.approx(
        0.024 / 4, rel=0.2
    )
    assert prices([(0, 1, 0.014), (4, 3, 0.010)] * 20, 0.001).row_s == 0.0


def test_a_round_that_waited_for_something_else_counts_little() -> None:
    seen = prices([(0, 1, 0.010)] * 20, 0.001)
    seen.passed(0, 1, 60.0, 0.0)
    seen.drew(60.0)
    assert seen.token_s < 0.014 and seen.guess_s < 0.0014


def test_the_time_of_the_draft_is_part_of_what_a_token_takes() -> None:
    assert prices([(1, 2, 0.010)] * 9, 0.002, drafting_s=0.002).token_s == pytest.approx(0.006)
    dear = prices([(1, 2, 0.011)] * 9, 0.1, drafting_s=0.1)
    assert dear.token_s == pytest.approx(0.010), "no guess saves more than a round without any"


def test_a_guess_is_drawn_where_it_saves_more_than_it_costs() -> None:
    # a guess and its row take 3 ms, a token 10
    seen = prices([(0, 1, 0.010), (4, 1, 0.014)] * 20, 0.002)
    assert seen.token_s == pytest.approx(0.010, rel=0.05)
    assert goes_on(1.0, 0.4, seen) and not goes_on(1.0, 0.2, seen) and not goes_on(0.5, 0.5, seen)
    assert is_kept(0.15, seen) and not is_kept(0.05, seen)


def test_trust_follows_what_was_right_by_how_sure_the_draft_was() -> None:
    trust = Trust()
    before = trust.chance(0.95), trust.chance(0.05)
    for _ in range(20):
        trust.noted([0.95, 0.05, 0.95], 1)  # the last one was not tested
    assert trust.chance(0.95) > 0.9 > before[0] and trust.chance(0.05) < 0.1 < before[1]
    for _ in range(40):
        trust.drawn(0.05)
    assert trust.expected < 0.1
    for _ in range(200):  # recent guesses count more
        trust.noted([0.95], 0)
    assert trust.chance(0.95) < 0.05


def test_it_rests_where_no_guess_pays_and_tries_again() -> None:
    dear, cheap = prices([(0, 1, 0.010)] * 9, 0.009), prices([(0, 1, 0.010)] * 9, 0.0001)
    trust, begun = Trust(), list[int]()
    for step in range(400):
        if trust.begins(dear):
            assert trust.is_trial
            begun.append(step)
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert gaps[:5] == [3, 5, 9, 17, 33] and gaps[-1] == MOST_REST + 1
    while not trust.begins(cheap):
        pass
    assert trust.begins(cheap) and not trust.is_trial and trust.misses == 0
    assert Trust().begins(Prices())


# The step that asks


def test_a_step_runs_with_the_guesses_that_were_made() -> None:
    spans = (
        Span(1, 5, 3, sample=True, guesses=2),
        Span(2, 9, 2),
        Span(3, 4, 3, sample=True, guesses=2),
        Span(4, 7, 2, sample=True, guesses=1),
    )
    asks = (DraftAsk(1, (0,) * 6, 2, Sampling(), 2), DraftAsk(3, (0,) * 5, 2, Sampling(), 2))
    step = HeadStep(
        8, StepPlan(frees=(9,), spans=spans), (10, 0, 0, 20, 21, 30, 0, 0, 40, 41), asks
    )
    ran = step.with_drafted({1: (11,), 3: (31, 32, 33)})
    assert (
        ran.tokens == (10, 11, 20, 21, 30, 31, 32, 40, 41)
        and ran.plan.frees == (9,)
        and ran.is_drafted
    )
    assert [(span.token_count, span.guesses) for span in ran.plan.spans] == [
        (2, 1),
        (2, 0),
        (3, 2),
        (2, 1),
    ]
    assert ran.guessed == {1: (11,), 3: (31, 32), 4: (41,)} and not ran.asks
    assert step.with_drafted({}).guessed == {4: (41,)}
    assert step.with_drafted({}).plan.spans[0] == Span(1, 5, 1, sample=True)


def test_right_guesses_of_the_draft_save_steps_and_change_nothing(
    make_rig: type[Rig], alone: Alone
) -> None:
    rig = make_rig(
        blocks=12, chunking=Chunking(16), guessing=DRAFTS, draft=oracle(random.Random(1))
    )
    rig.submit("a", [1, 2, 3], 40)
    rig.run_all()
    assert rig.tokens("a") == alone([1, 2, 3], 40)
    stats = rig.scheduler.stats
    assert (stats.guesses, stats.right_guesses, stats.new_tokens) == (34, 34, 40)
    asked = [ask for step in rig.steps for ask in step.asks]
    assert [ask.most for ask in asked] == [7, 7, 7, 7, 6] and {
        ask.prompt_count for ask in asked
    } == {3}
    assert [len(ask.tokens) for ask in asked] == [4, 12, 20, 28, 36]
    rig.check_empty()


def test_a_draft_that_says_nothing_costs_no_row(make_rig: type[Rig], alone: Alone) -> None:
    rig = make_rig(blocks=12, chunking=Chunking(16), guessing=DRAFTS)
    rig.submit("a", [1, 2, 3], 40)
    rig.run_all()
    assert rig.tokens("a") == alone([1, 2, 3], 40)
    assert rig.scheduler.stats.guesses == 0 and rig.scheduler.stats.steps == 41
    rig.check_empty()


def test_it_is_asked_where_nothing_else_guesses(make_rig: type[Rig]) -> None:
    guessed = Guessed(NgramDrafter(LONGEST_MATCH))
    short, long = [1, 2, 3, 9, 1, 2], [1, 2, 3, 4, 9, 1, 2, 3, 4]
    assert DRAFTS.guesses(guessed, short, 7) == () and DRAFTS.asked(guessed, (), 7) == 7
    guessed.noted(7, 0)
    assert guessed.pace == DraftPacing()
    guessed = Guessed(NgramDrafter(LONGEST_MATCH))
    found = DRAFTS.guesses(guessed, long, 7)
    assert found == (9, 1) and DRAFTS.asked(guessed, found, 7) == 0
    guessed.noted(2, 0)
    assert guessed.pace.rest == 1
    forced = DRAFTS.guesses(guessed, long, 7, (5, 6))
    assert forced == (5, 6) and DRAFTS.asked(guessed, forced, 7) == 0
    DRAFTS.guesses(guessed, long, 0)
    assert DRAFTS.asked(guessed, (), 0) == 0
    assert Guessing(proposer=Silent).asked(guessed, (), 7) == 0


def test_a_request_that_stops_says_which_tokens_are_never_guessed(make_rig: type[Rig]) -> None:
    guessing = Guessing(frozenset({5}), proposer=Silent, drafts=True)
    rig = make_rig(chunking=Chunking(16), guessing=guessing)
    rig.submit("a", [1, 2, 3], 20, stop_tokens=(8,), sampling=Sampling(seed=4))
    rig.take(rig.next_step())
    (ask,) = rig.formed_step().asks
    assert ask.ends == {5, 8} and ask.sampling.seed == 4


# Wherever they go


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_changes_a_token(
    make_rig: type[Rig], make_ring: type[Ring], alone: Alone, seed: int
) -> None:
    """The tokens equal a run without a draft, although the draft guesses wrong at times, and fewer
    than requested, or nothing.
    """
    dice = random.Random(1000 + seed)
    size = dice.choice([1, 2, 4])
    limits = Limits(
        48,
        6,
        overcommit=dice.random() < 0.4,
        answer_tokens=dice.choice([1, 8, 128]),
        prefix_cache=dice.random() < 0.7,
    )
    rig = make_rig(
        blocks=dice.randint(48, 80) // size,
        block_tokens=size,
        stages=dice.randint(1, 3),
        limits=limits,
        batching=Batching(dice.choice(list(Mode)), dice.randint(1, 4), 4, 1),
        chunking=Chunking(dice.randint(4, 24)),
        swapping=Swapping(dice.choice([0, 20, 100])),
        guessing=DRAFTS,
        draft=oracle(dice, dice.choice([0.0, 0.3, 0.6]), 0.4),
    )
    ring = make_ring(rig, dice)
    late = dice.choice([0.0, 0.0, 0.3])
    rig.stages[-1].is_late = lambda: dice.random() < late
    prompts = {
        f"r{n}": dice.choices(range(9), k=dice.randint(1, 9)) for n in range(dice.randint(1, 4))
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
    stats: Any = rig.scheduler.stats
    SEEN.append((stats.guesses, stats.right_guesses, stats.swaps, stats.preemptions))


SEEN: list[tuple[int, ...]] = []


def test_the_schedules_had_all_that_they_were_to_have() -> None:
    if len(SEEN) < 60:
        pytest.skip("not all schedules were run")
    guesses, right, swaps, preemptions = map(sum, zip(*SEEN, strict=True))
    assert right > 400 and guesses - right > 100, (guesses, right)
    assert swaps > 5 and preemptions > swaps, (swaps, preemptions)
