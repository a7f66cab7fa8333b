"""What the benchmarks of steps make of a trace: gaps between steps, and what theory says of a pipeline."""

from __future__ import annotations

import pytest

from bench.micro_batches import row, theory
from bench.token_cost import gap_s, has_pairs
from edgeshard.domain.ids import NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.trace import StageTrace, StepRecord

HOP_S, FIRST_S, SECOND_S = 0.001, 0.02, 0.03


def traces(steps: int, first_s: float = FIRST_S, clock_s: float = 7.0) -> list[StageTrace]:
    """One micro-batch of 8 that goes round a ring of two nodes, the second of which has a clock of its own."""
    first, second, now_s = [], [], 0.0
    for number in range(steps):
        ended_s = now_s + first_s
        there_s = ended_s + HOP_S
        back_s = there_s + SECOND_S + HOP_S
        first.append(StepRecord(number, 8, 0, now_s, now_s, ended_s, ended_s, back_s))
        there = [clock_s + at_s for at_s in (there_s, there_s, there_s + SECOND_S, there_s + SECOND_S)]
        second.append(StepRecord(number, 8, 0, *there))
        now_s = back_s
    return [
        StageTrace(index, NodeName(name), LayerRange(index, index + 1), tuple(records))
        for index, (name, records) in enumerate((("a", first), ("b", second)))
    ]


def test_a_hop_is_measured_without_comparing_clocks() -> None:
    found = traces(6)
    assert has_pairs(found) and not has_pairs(traces(2))
    assert gap_s(found) == pytest.approx(HOP_S)


def test_of_one_stage_the_gap_is_between_its_steps() -> None:
    alone = traces(6)[:1]
    assert gap_s(alone) == pytest.approx(SECOND_S + 2 * HOP_S)


@pytest.mark.parametrize(("first_s", "period_s"), [(FIRST_S, 2 * SECOND_S), (0.04, 0.08)])
def test_theory_is_the_round_or_the_turns_at_the_busiest_stage(first_s: float, period_s: float) -> None:
    """Two micro-batches of 8: m b / max(R, m B)."""
    assert theory(traces(9, first_s), 16) == pytest.approx(16 / period_s)


def test_the_heads_choice_is_compared_with_the_best_number_round_by_round() -> None:
    rates = {"m1": [10.0, 30.0, 10.0], "m2": [20.0, 40.0, 20.0], "m3": [5.0, 5.0, 5.0], "auto": [19.0, 38.0, 20.0]}
    found = row("equal", 8, rates, [0.9])
    assert (found["best"], found["of_best"]) == ("m2", 0.95)
    assert "of_theory" not in found and row("equal", 16, rates, [0.9, 0.8, 0.7])["of_theory"] == 0.8
