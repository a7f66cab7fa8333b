"""CP-SAT in a process of its own: its time and memory for a program know no bound, and it may
abort.

Both ends of it: questions and answers are lines of JSON, one question after the other.

The process starts with the first question and ends with `close`, or with the process that started
it. Only the process imports ortools, which the extra `rules` installs.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from edgeshard.domain.errors import FailedPreconditionError, ResourceExhaustedError, extra_line
from edgeshard.planning.solvers.instance import Cut, Instance
from edgeshard.planning.solvers.linear import GoalTerm, Linear, LinearAnswer, Question
from edgeshard.process.extras import missing

_COUNTS = ("max_layers",)
"""Fields of an Instance that are arrays of whole numbers."""


def question_values(question: Question) -> dict[str, Any]:
    """Each instance is in there once; parts have its index in `instances`."""
    instances = list({id(one): one for one in _instances(question)}.values())
    place = {id(one): at for at, one in enumerate(instances)}

    def part(one: GoalTerm) -> list[Any]:
        return [place[id(one.instance)], one.weight, one.busiest]

    return {
        "instances": [_instance_values(one) for one in instances],
        "memory": place[id(question.memory)],
        "sides": [[part(one) for one in side] for side in question.sides],
        "limits": [[part(one), most] for one, most in question.limits],
        "conditions": [[list(one.weights), one.least, one.most] for one in question.conditions],
        "without": [[list(cut.nodes), list(cut.ends)] for cut in question.without],
        "below": question.below,
        "any": question.any_will_do,
    }


def read_question(values: Mapping[str, Any]) -> Question:
    """The question that `question_values` was made of."""
    instances = [_read_instance(one) for one in values["instances"]]

    def part(one: list[Any]) -> GoalTerm:
        place, weight, busiest = one
        return GoalTerm(instances[place], weight, busiest)

    return Question(
        memory=instances[values["memory"]],
        sides=tuple(tuple(part(one) for one in side) for side in values["sides"]),
        limits=tuple((part(one), most) for one, most in values["limits"]),
        conditions=tuple(
            Linear(tuple(weights), least, most) for weights, least, most in values["conditions"]
        ),
        without=tuple(Cut(tuple(nodes), tuple(ends)) for nodes, ends in values["without"]),
        below=values["below"],
        any_will_do=values["any"],
    )


def answer_values(answer: LinearAnswer) -> dict[str, Any]:
    cut = answer.cut
    return {
        "cut": None if cut is None else [list(cut.nodes), list(cut.ends)],
        "bound_s": answer.bound_s,
    }


def read_answer(values: Mapping[str, Any]) -> LinearAnswer:
    """The answer that `answer_values` was made of."""
    cut = values["cut"]
    return LinearAnswer(
        None if cut is None else Cut(tuple(cut[0]), tuple(cut[1])), values["bound_s"]
    )


def _instances(question: Question) -> list[Instance]:
    parts = [
        *(part for side in question.sides for part in side),
        *(part for part, _ in question.limits),
    ]
    return [question.memory, *(part.instance for part in parts)]


def _instance_values(instance: Instance) -> dict[str, Any]:
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def _read_instance(values: Mapping[str, Any]) -> Instance:
    instance_values: dict[str, Any] = {
        name: np.array(value, dtype=np.int64 if name in _COUNTS else np.float64)
        if isinstance(value, list)
        else value
        for name, value in values.items()
    }
    return Instance(**instance_values)


EXTRA = "rules"
PLAN_S = 20.0
"""On the clock, for all questions of one plan."""
VERIFY_S = 60.0
"""The same for a plan that is verified."""
QUESTION_EFFORT = 6.0
"""Deterministic time of CP-SAT for one question of a plan, about as many seconds: beyond it the
answer is a bound."""
MEMORY_BYTES = 3 << 30
"""That the process may grow by, of addresses; beyond half of it CP-SAT ends by itself."""
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
)
_LATE_S = 15.0
"""After the time of a question, before the process is ended: it starts, and builds its program,
besides."""
_PART = 1 << 16


def check_installed(field: str, what: str) -> None:
    """Raise FailedPreconditionError naming `field` if `what` needs the extra and it is not
    installed."""
    if missing(EXTRA):
        raise FailedPreconditionError(
            f"{field}: {what} needs CP-SAT, which is not installed: {extra_line(EXTRA)}",
            field=field,
            reason="RULES_NEED_CPSAT",
        )


class CpSat:
    """A `planning.solvers.linear.Prover` with a time limit in seconds for all queries. A context
    manager.

    `field` names the user's option in errors. A query after the time limit gets the bound that is
    available at once.
    """

    def __init__(
        self,
        total_s: float = PLAN_S,
        effort: float = QUESTION_EFFORT,
        memory_bytes: int = MEMORY_BYTES,
        field: str = "rule",
    ) -> None:
        self._left_s = total_s
        self._effort = effort
        self._memory_bytes = memory_bytes
        self._field = field
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Question) -> LinearAnswer:
        """The answer, or the bound that was proven in time.

        Raises FailedPreconditionError without the extra, and ResourceExhaustedError if the process
        took too much memory or time, or ended.
        """
        check_installed(self._field, "a rule" if self._field == "rule" else "it")
        process = self._started()
        wall_s = max(0.0, self._left_s)
        line = {
            "question": question_values(question),
            "deterministic": self._effort,
            "wall_s": wall_s,
        }
        began_s = time.monotonic()
        try:
            answer = read_answer(
                json.loads(self._exchanged(process, json.dumps(line).encode() + b"\n", wall_s))
            )
        finally:
            self._left_s -= time.monotonic() - began_s
        return replace(answer, is_out_of_time=self._left_s <= 0)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "edgeshard.cpsat.solver_process",
                    str(os.getpid()),
                    str(self._memory_bytes),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        return self._process

    def _exchanged(self, process: subprocess.Popen[bytes], line: bytes, wall_s: float) -> bytes:
        """The line of the answer. Ends the process and raises if none arrives."""
        assert process.stdin is not None and process.stdout is not None
        until_s = time.monotonic() + wall_s + _LATE_S
        parts = list[bytes]()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while selector.select(max(0.0, until_s - time.monotonic())):
                    part = os.read(process.stdout.fileno(), _PART)
                    parts.append(part)
                    if part.endswith(b"\n"):
                        return b"".join(parts)
                    if not part:
                        break
        except OSError:  # it is gone
            pass
        except BaseException:
            self.close()
            raise
        self.close()
        raise ResourceExhaustedError(
            f"{self._field}: CP-SAT took too much time or memory and was ended; plan with fewer "
            "nodes or "
            "rules, or try again when this machine has more memory",
            field=self._field,
            reason="CPSAT_EXHAUSTED",
        )


def main() -> None:
    """Until standard input ends. The arguments are the parent's id and the bytes that the process
    may grow by."""
    from edgeshard.process.parent import bound_memory, end_with, go_first

    end_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints is no answer
    go_first()
    from edgeshard.cpsat.program import SolveLimits, answer

    bound_memory(int(sys.argv[2]))
    for line in sys.stdin.buffer:
        values = json.loads(line)
        solution = answer(
            read_question(values["question"]),
            SolveLimits(values["deterministic"], values["wall_s"]),
        )
        answers.write(json.dumps(answer_values(solution)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
