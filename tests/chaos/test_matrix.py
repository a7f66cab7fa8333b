"""The cases are the ones on the page, the same for the same seed, and a run reports its faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeshard.domain.requests.step import Span
from tests.chaos import matrix, pauses, run
from tests.chaos.failpoints import Action, Failpoint, Moment, Place
from tests.chaos.matrix import CHUNK, NEW_TOKENS, PROMPT, STAGES, Case, Dtype, Fault
from tests.chaos.trial import Outcome

CASE = Case("every step", Dtype.FP32, (Fault(1, Place.BEFORE_COMPUTE, PROMPT + 9),))


def spans_of_a_request() -> list[Span]:
    """The steps of a single request: chunks of its prompt, then a step for each token but the
    first."""
    chunks = [Span(1, begin, CHUNK, begin + CHUNK == PROMPT) for begin in range(0, PROMPT, CHUNK)]
    return [*chunks, *(Span(1, PROMPT + n, 1, True) for n in range(NEW_TOKENS - 1))]


def test_every_step_of_every_stage_is_a_case_and_hits_that_step_alone() -> None:
    spans = spans_of_a_request()
    for stage in range(STAGES):
        for place in (Place.BEFORE_COMPUTE, Place.AFTER_SEND):
            faults = [case.faults[0] for case in matrix.every_step()]
            positions = [
                fault.position for fault in faults if (fault.at, fault.place) == (stage, place)
            ]
            assert len(positions) == len(spans) == 34
            for number, position in enumerate(positions):
                point = Failpoint("f", place, position=position)
                assert [
                    point.matches(Moment(place, n, (span,))) for n, span in enumerate(spans)
                ].index(True) == number


def test_every_step_of_every_stage_of_each_shape_is_a_case() -> None:
    # the request begins from the cached part of its prompt
    spans = [
        Span(1, 80, 16, True),
        *spans_of_a_request()[3:],
    ]
    for shape in matrix.Shape:
        faults = [case.faults[0] for case in matrix.shaped() if case.shape is shape]
        for stage in range(STAGES):
            points = [
                Failpoint("f", fault.place, position=fault.position)
                for fault in faults
                if fault.at == stage
            ]
            hit = [
                [p.matches(Moment(p.place, 0, (span,))) for span in spans].index(True)
                for p in points
            ]
            assert hit == list(range(len(spans)))


def test_names_say_which_step_it_is() -> None:
    assert [matrix.step_name(position) for position in matrix.steps()][:5] == [
        "chunk0",
        "chunk1",
        "chunk2",
        "token2",
        "token3",
    ]
    assert CASE.name == "every step/fp32/stage1.before_compute.token11/seed1"


def test_names_of_cases_are_their_own() -> None:
    names = [case.name for case in matrix.full(3)]
    assert len(set(names)) == len(names)


def test_a_seed_chooses_the_same_cases_and_another_seed_others() -> None:
    assert matrix.full(3) == matrix.full(3) and matrix.quick(3) == matrix.quick(3)
    assert matrix.quick(3) != matrix.quick(4)
    assert set(matrix.quick(3)) <= set(matrix.full(3)), "a quick run has no cases of its own"
    assert {case.group for case in matrix.quick(3)} == {case.group for case in matrix.full(3)} - {
        "halted node"
    }


def test_a_crowd_fills_the_pool_but_for_less_than_one_request() -> None:
    """The cases assume this: five decode, two more fit, and one has to wait."""
    first, late = matrix.asks(Case("crowd", Dtype.FP32, crowd=True))
    blocks = [-(-(ask.prompt_tokens + ask.new_tokens) // 16) for ask in (*first, *late)]
    assert (len(first), len(late)) == (5, 3)
    assert sum(blocks[:7]) <= 32 < sum(blocks)


def test_the_last_line_and_the_table_count_what_went_wrong(tmp_path: Path) -> None:
    good, bad = Outcome(CASE, (), 0, 1, 0.25, 1.0), Outcome(CASE, ("lost",), 2, 1, 3.0, 1.0)
    assert run.last_line([good, bad], [], 9.0) == (
        "2 kills in 2 cases, 2 wrong tokens, 1 cases failed; pause 0.25 s median, 0.25 s worst; 9 "
        "s in all"
    )
    assert "1 leaks" in run.last_line([good], ["a holds KV"], 9.0)
    assert (
        run.table([good, bad]).splitlines()[2]
        == "| every step | fp32 | 2 | 2 | 0 | 2 | 1 | 1.62 s | 3.00 s |"
    )
    page = tmp_path / "page.md"
    page.write_text(f"a\n\n{run.BEGIN}\n\nold\n\n{run.END}\nb\n")
    for _ in range(2):
        run.write_table(page, "new")
    assert page.read_text() == f"a\n\n{run.BEGIN}\n\nnew\n\n{run.END}\nb\n"
    page.write_text("a\n")
    with pytest.raises(ValueError, match="must hold the lines"):
        run.write_table(page, "new")


def test_the_parts_of_a_pause_come_from_the_log_and_make_up_the_whole() -> None:
    def logged(second: float, event: str, **fields: str) -> str:
        rest = "".join(f', "{name}": "{value}"' for name, value in fields.items())
        return f'{{"event": "{event}"{rest}, "timestamp": "2026-01-01T00:00:{second:09.6f}Z"}}'

    begin = next(pauses.log_events([logged(0, "start")]))[0]
    lines = [
        logged(0.5, "service_ended"),
        "a line of something else",
        logged(1.0, "service_ended"),
        logged(1.25, "replanned"),
        logged(1.5, "deployment_saved", phase="loading"),
        logged(2.0, "deployment_saved", phase="activating"),
        logged(2.5, "deployment_saved", phase="ready"),
    ]
    parts = pauses.parts_of(begin + 0.75, begin + 3.0, lines)
    assert parts == pytest.approx({"detect": 0.25, "plan": 0.25, "load": 0.75, "rebuild": 1.0})
    assert pauses.parts_of(begin + 1.1, begin + 3.0, lines) == {}, (
        "without its first milestone nothing is known"
    )


def test_each_way_to_lose_a_node_is_tried_on_every_stage() -> None:
    for kind in pauses.KINDS:
        cases = [kind.case(number) for number in range(STAGES)]
        assert len({case.name for case in cases}) == STAGES
    assert pauses.Kind("halted node").case(0).faults[0].action is Action.HALT
