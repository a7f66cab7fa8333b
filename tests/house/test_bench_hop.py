"""The benchmark's arithmetic, on samples whose answer is known."""

from __future__ import annotations

import pytest

from bench.hop import LIMIT_MS, SPLIT, WHOLE, Run, report


def run(inter_token_ms: float, *compute_ms: float, tokens: tuple[int, ...] = (1, 2, 3)) -> Run:
    return Run(inter_token_ms, inter_token_ms * 2, compute_ms, tokens)


def test_a_hop_costs_half_of_what_the_split_adds() -> None:
    runs = {
        WHOLE: [run(10, 9), run(11, 9), run(30, 25)],
        SPLIT: [run(12, 4, 5), run(13, 4, 5), run(32, 12, 13)],
    }
    result = report(runs, 3)
    assert result["milliseconds_added_per_token"] == pytest.approx(2)
    assert result["milliseconds_per_token_and_hop"] == pytest.approx(1)
    assert result["ratio"] == pytest.approx(13 / 11)
    assert result["within_limit"] and result["same_tokens"]
    assert result["stage_compute_milliseconds"] == {WHOLE: [9], SPLIT: [4, 5]}
    assert [sample["inter_token_ms"] for sample in result["samples"][WHOLE]] == [10, 11, 30]


def test_a_slow_hop_and_other_tokens_are_told() -> None:
    slow = 10 + 2 * LIMIT_MS + 0.1
    result = report({WHOLE: [run(10, 9)], SPLIT: [run(slow, 4, 5, tokens=(1, 2, 4))]}, 3)
    assert not result["within_limit"]
    assert not result["same_tokens"]
