"""CP-SAT in its process: limits of memory and time, a process that ends, an installation without
it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgeshard.cpsat import solver_process
from edgeshard.cpsat.program import SolveLimits, answer
from edgeshard.cpsat.solver_process import (
    CpSat,
    answer_values,
    question_values,
    read_answer,
    read_question,
)
from edgeshard.domain.errors import FailedPreconditionError, ResourceExhaustedError
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.linear import ROUNDING, GoalTerm, Linear, LinearAnswer, Question
from edgeshard.planning.solvers.scoring import violations
from tests.planning.oracles.instances import arbitrary, random_instance

pytestmark = pytest.mark.timing


def question(seed: int = 8) -> Question:
    instance = random_instance(seed, 5, 9)
    sides = (GoalTerm(instance),), (GoalTerm(instance, 4, busiest=True),)
    return Question(instance, sides, conditions=(Linear((0.0, 1.0, 1.0, 1.0, 1.0), most=3.0),))


def hard() -> Question:
    """A question that takes longer than any test."""
    instance = arbitrary(1, nodes=14, memory=1.3)
    return Question(instance, ((GoalTerm(instance),), (GoalTerm(instance, 9, busiest=True),)))


def test_the_process_answers_as_the_program_does() -> None:
    with CpSat() as prover:
        for seed in range(8, 12):
            asked = question(seed)
            assert answer_values(prover.ask(asked)) == answer_values(
                answer(asked, SolveLimits(6.0, 20.0))
            )


def test_questions_and_answers_come_back_as_they_were() -> None:
    asked = question()
    assert question_values(read_question(question_values(asked))) == question_values(asked)
    for found in (LinearAnswer(Cut((0, 2), (3, 9)), 0.25), LinearAnswer(None, float("inf"))):
        assert read_answer(answer_values(found)) == found


def test_a_time_limit_gives_a_bound_and_perhaps_a_cut() -> None:
    asked = hard()
    with CpSat(total_s=4.0) as prover:
        found = prover.ask(asked)
        assert 0 < found.bound_s < float("inf")
        if found.cut is not None:
            assert violations(asked.memory, found.cut) == ()
            assert found.bound_s <= asked.seconds(found.cut) * (1 + ROUNDING)
        for _ in range(3):
            found = prover.ask(asked)
        assert found.is_out_of_time
        assert 0 < found.bound_s < float("inf")


def test_a_process_that_ends_is_a_typed_error_and_another_one_starts() -> None:
    with CpSat() as prover:
        prover.ask(question())
        assert prover.pid is not None
        os.kill(prover.pid, signal.SIGKILL)
        with pytest.raises(ResourceExhaustedError) as raised:
            prover.ask(question())
        assert (raised.value.reason, raised.value.field) == ("CPSAT_EXHAUSTED", "rule")
        assert prover.ask(question()).cut is not None


def test_a_process_without_memory_is_a_typed_error() -> None:
    with CpSat(memory_bytes=8 << 20) as prover, pytest.raises(ResourceExhaustedError):
        prover.ask(hard())


def test_no_process_is_left() -> None:
    with CpSat() as prover:
        prover.ask(question())
        pid = prover.pid
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


def test_the_process_ends_with_the_one_that_started_it() -> None:
    code = (
        "import os, signal\n"
        "from edgeshard.cpsat.solver_process import CpSat\n"
        "from tests.cpsat.test_process import question\n"
        "prover = CpSat(); prover.ask(question()); print(prover.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    child = Path(f"/proc/{int(ended.stdout)}/stat")
    until = time.monotonic() + 30
    while child.exists() and child.read_text().split(")")[-1].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_process, "missing", lambda *extras: list(extras))
    with (
        CpSat() as prover,
        pytest.raises(FailedPreconditionError, match=r"pip install '\.\[rules\]'") as raised,
    ):
        prover.ask(question())
    assert (raised.value.reason, raised.value.field) == ("RULES_NEED_CPSAT", "rule")
    with CpSat(field="verify") as prover, pytest.raises(FailedPreconditionError, match="verify"):
        prover.ask(question())
