"""Whose mask is made next: cheap ones cost nothing, dear ones a share of a core, and nobody waits for another's."""

from __future__ import annotations

from edgeshard_agent.guides.turns import (
    BURST_S,
    CHEAP_S,
    GRACE_S,
    MOST_IDLE,
    SHARE,
    TOKEN_S,
    RequestBudget,
    Turn,
    Turns,
)
from hypothesis import given
from hypothesis import strategies as st


def test_a_request_has_a_grace_and_so_much_a_token() -> None:
    budget = RequestBudget()
    budget.used_s = GRACE_S
    assert not budget.is_over
    budget.used_s += 0.9 * TOKEN_S
    assert budget.is_over
    budget.tokens += 1
    assert not budget.is_over


def run(turns: Turns, now_s: float, until_s: float, costs: dict[str, float]) -> tuple[dict[str, float], float]:
    """Everybody always has a mask to be made; what each used, and when it ended."""
    used = dict.fromkeys(costs, 0.0)
    for who in costs:
        turns.put(Turn(who))
    while now_s < until_s:
        turn = turns.next(now_s)
        if turn is None:
            wait_s = turns.wait_s(now_s)
            assert wait_s is not None
            now_s += wait_s
            continue
        cost = costs[turn.client]
        now_s += cost
        used[turn.client] += cost
        turns.put(Turn(turn.client))
        turns.ended(turn, cost, now_s)
    return used, now_s


def test_dear_masks_of_one_party_take_their_share_of_a_core_and_no_more() -> None:
    used, ended_s = run(Turns(), 0.0, 60.0, {"dear": 0.3})
    assert BURST_S + SHARE * (ended_s - BURST_S) - 1 < used["dear"] < BURST_S + SHARE * ended_s + 0.3


def test_cheap_masks_are_never_held_back() -> None:
    used, ended_s = run(Turns(), 0.0, 30.0, {"cheap": 0.9 * CHEAP_S})
    assert used["cheap"] > 0.99 * ended_s


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=40), st.floats(0.001, 1.0))
def test_a_cheap_one_waits_for_one_dear_one_at_most(others: list[str], cost: float) -> None:
    """However many of others wait. The one that is made when it comes cannot be stopped."""
    turns, now_s = Turns(), 0.0
    for who in others:
        turns.put(Turn(who))
    first = turns.next(now_s)
    assert first is not None
    late = Turn("honest")
    turns.put(late)
    turns.ended(first, cost, now_s + cost)
    # Of others it comes behind those who have had nothing yet, one mask each.
    met = []
    while (turn := turns.next(now_s)) is not None and turn is not late:
        met.append(turn.client)
        turns.ended(turn, cost, now_s)
    assert turn is late and len(met) == len(set(met)) <= 2


def test_what_nobody_wants_is_not_made() -> None:
    turns = Turns()
    one, other = Turn("a"), Turn("a")
    turns.put(one)
    turns.put(other)
    turns.drop(one)
    turns.drop(one)
    assert turns.next(0.0) is other and turns.next(0.0) is None and turns.wait_s(0.0) is None
    turns.drop(other)  # it has begun
    turns.ended(other, 0.1, 0.1)


def test_parties_that_have_all_their_share_again_are_forgotten() -> None:
    turns = Turns()
    for number in range(4 * MOST_IDLE):
        turn = Turn(f"p{number}")
        turns.put(turn)
        assert turns.next(number * 10.0) is turn
        turns.ended(turn, 0.5, number * 10.0)
        assert len(turns._shares) <= MOST_IDLE
