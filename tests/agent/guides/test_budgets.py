"""The budget of guides: cheap masks cost nothing, expensive ones use a share of a core, and no
party waits for another's.
"""

from __future__ import annotations

from edgeshard_agent.guides.guides import (
    BURST_S,
    CHEAP_S,
    GRACE_S,
    MOST_IDLE,
    SHARE,
    TOKEN_S,
    RequestBudget,
    Shares,
)


def test_a_request_has_a_grace_and_so_much_a_token() -> None:
    budget = RequestBudget()
    budget.used_s = GRACE_S
    assert not budget.is_over
    budget.used_s += 0.9 * TOKEN_S
    assert budget.is_over
    budget.tokens += 1
    assert not budget.is_over


def run(until_s: float, cost_s: float) -> tuple[float, float]:
    """One party always has a mask to make; returns its use, and its end."""
    shares = Shares()
    now_s = 0.0
    used_s = 0.0
    while now_s < until_s:
        if wait_s := shares.wait_s("one", now_s):
            assert not shares.wait_s("other", now_s)
            now_s += wait_s + 1e-6
            continue
        now_s += cost_s
        used_s += cost_s
        shares.charge("one", cost_s, now_s)
    return used_s, now_s


def test_dear_masks_of_one_party_take_their_share_of_a_core_and_no_more() -> None:
    used_s, ended_s = run(60.0, 0.3)
    assert BURST_S + SHARE * (ended_s - BURST_S) - 1 < used_s < BURST_S + SHARE * ended_s + 0.3


def test_cheap_masks_are_never_held_back() -> None:
    used_s, ended_s = run(30.0, 0.9 * CHEAP_S)
    assert used_s > 0.99 * ended_s


def test_parties_that_have_all_their_share_again_are_forgotten() -> None:
    shares = Shares()
    for number in range(4 * MOST_IDLE):
        shares.charge(f"p{number}", 0.5, number * 10.0)
        assert len(shares._used) <= MOST_IDLE
