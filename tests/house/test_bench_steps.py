"""What the benchmark of tokens makes of a trace: gaps between steps."""

from __future__ import annotations

import pytest

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
