"""CP-SAT in a process of its own: its time and memory for a program know no bound, and it may abort.

The process starts with the first question and ends with `close`, or with the process that started it. Only the process
imports ortools, which the extra `rules` installs.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from edgeshard.cpsat.messages import question_values, read_answer
from edgeshard.domain.errors import FailedPreconditionError, ResourceExhaustedError, extra_line
from edgeshard.planning.solvers.linear import LinearAnswer, Question
from edgeshard.process.extras import missing

EXTRA = "rules"
PLAN_S = 20.0
"""On the clock, for all questions of one plan."""
VERIFY_S = 60.0
"""The same for a plan that is verified."""
QUESTION_EFFORT = 6.0
"""Deterministic time of CP-SAT for one question of a plan, about as many seconds: beyond it the answer is a bound."""
MEMORY_BYTES = 3 << 30
"""That the process may grow by, of addresses; beyond half of it CP-SAT ends by itself."""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV")
_LATE_S = 15.0
"""After the time of a question, before the process is ended: it starts, and builds its program, besides."""
_PART = 1 << 16


def check_installed(field: str, what: str) -> None:
    """Raise FailedPreconditionError naming `field` if `what` needs the extra and it is not installed."""
    if missing(EXTRA):
        raise FailedPreconditionError(
            f"{field}: {what} needs CP-SAT, which is not installed: {extra_line(EXTRA)}",
            field=field,
            reason="RULES_NEED_CPSAT",
        )


class CpSat:
    """A `planning.solvers.linear.Prover` with a time limit in seconds for all queries. A context manager.

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
        self._left_s, self._effort, self._memory_bytes, self._field = total_s, effort, memory_bytes, field
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        line = {"question": question_values(question), "deterministic": self._effort, "wall_s": wall_s}
        began_s = time.monotonic()
        try:
            answer = read_answer(json.loads(self._exchanged(process, json.dumps(line).encode() + b"\n", wall_s)))
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
                [sys.executable, "-P", "-m", "edgeshard.cpsat.worker", str(os.getpid()), str(self._memory_bytes)],
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
            f"{self._field}: CP-SAT took too much time or memory and was ended; plan with fewer nodes or "
            "rules, or try again when this machine has more memory",
            field=self._field,
            reason="CPSAT_EXHAUSTED",
        )
