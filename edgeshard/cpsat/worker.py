"""The process that asks CP-SAT (`edgeshard.cpsat.process`): lines of JSON in and out, one question after the other."""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from edgeshard.cpsat.messages import answer_values, read_question
from edgeshard.process.parent import end_with


def main() -> None:
    """Until standard input ends. The arguments are the parent's id and the bytes that the process may grow by."""
    end_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints is no answer
    with suppress(OSError):  # where memory runs out, this process goes before its parent
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    from edgeshard.cpsat.program import Effort, answer

    _limit_memory(int(sys.argv[2]))
    for line in sys.stdin.buffer:
        values = json.loads(line)
        found = answer(read_question(values["question"]), Effort(values["deterministic"], values["wall_s"]))
        answers.write(json.dumps(answer_values(found)).encode() + b"\n")
        answers.flush()


def _limit_memory(most_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # the library aborts without memory
    with suppress(OSError, ValueError):  # where there is no such file, or a service's own limit holds
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main()
