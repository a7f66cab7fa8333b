"""The budget of a token: its parts equal the trace's, and add up to the time between two tokens."""

from __future__ import annotations

import pytest

from bench.token_budget import PARTS, parts_of, row_of
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import StageTiming, Token
from edgeshard.domain.requests.trace import StageTrace, StepRecord

PERIOD_S = 1.0


def record(step: int, began: float, came: float, returned: float = 0.0) -> StepRecord:
    """It waits 0.02 for the thread, computes and frames in 0.3, and is sent 0.03 later."""
    at = step * PERIOD_S + began
    returned_s = step * PERIOD_S + returned if returned else 0.0
    return StepRecord(
        step, 1, 0, at, at + 0.02, at + 0.32, at + 0.35, returned_s, came_s=step * PERIOD_S + came
    )


def ring(steps: int) -> tuple[StageTrace, StageTrace]:
    """A transfer takes 0.1 there and 0.08 back, taking apart 0.05, and the head 0.02."""
    first = tuple(record(step, 10.0, 10.93, 10.98) for step in range(steps))
    second = tuple(record(step, 10.5, 10.45) for step in range(steps))
    return StageTrace(0, "a", LayerRange(0, 1), first), StageTrace(1, "b", LayerRange(1, 2), second)


def test_the_parts_of_a_token_add_up_to_the_time_between_two() -> None:
    timings = (StageTiming(0, 0.02, 0.25), StageTiming(1, 0.02, 0.2))
    tokens = [
        (step + 11.5, Token(step, 7, "", timings=timings, at_s=step + 10.985)) for step in range(3)
    ]
    found = list(parts_of(ring(3), tokens))
    assert len(found) == 2, "the last token's next step is not known"
    for parts in found:
        assert sum(parts[name] for name in PARTS) == pytest.approx(PERIOD_S)
        assert parts == pytest.approx(
            {
                "compute": 0.45,
                "framing": 0.15,
                "to_the_loop": 0.06,
                "transfer": 0.18,
                "taking_apart": 0.1,
                "scheduling": 0.02,
                "to_the_thread": 0.04,
                "delivery": 0.515,
            }
        )


def test_a_step_that_was_under_way_when_the_trace_began_counts_in_nothing() -> None:
    first, second = ring(3)
    later = StageTrace(1, "b", LayerRange(1, 2), second.records[1:])
    timings = (StageTiming(0, 0.02, 0.25), StageTiming(1, 0.02, 0.2))
    tokens = [
        (step + 11.5, Token(step, 7, "", timings=timings, at_s=step + 10.985)) for step in range(3)
    ]
    assert len(list(parts_of((first, later), tokens))) == 1
    assert list(parts_of((first, second), [])) == []


def test_a_row_says_what_tls_adds_what_one_node_takes_and_how_far_the_sum_is_off() -> None:
    figures = {f"{name}_ms": 1.0 for name in PARTS} | {
        "sum_ms": 7.0,
        "between_ms": 8.0,
        "delivery_ms": 2.0,
    }
    plain = figures | {"transfer_ms": 0.75, "sum_ms": 6.75}
    whole = {"compute_ms": 1.0, "between_ms": 6.0}
    row = row_of("after", {"tls": [figures], "plaintext": [plain], "whole": [whole]})
    assert (row["hop_ms"], row["hop_plaintext_ms"], row["tls_ms"], row["off"]) == (
        2.5,
        2.375,
        0.25,
        -0.125,
    )
    assert (row["of_whole"], row["whole_compute_ms"]) == (0.75, 1.0)
