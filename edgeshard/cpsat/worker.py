"""The process that asks CP-SAT (`edgeshard.cpsat.process`): lines of JSON in and out, one question after the other."""

from __future__ import annotations

import json
import os
import sys

from edgeshard.cpsat.messages import answer_values, read_question
from edgeshard.process.parent import bound_memory, end_with, go_first


def main() -> None:
    """Until standard input ends. The arguments are the parent's id and the bytes that the process may grow by."""
    end_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints is no answer
    go_first()
    from edgeshard.cpsat.program import SolveLimits, answer

    bound_memory(int(sys.argv[2]))
    for line in sys.stdin.buffer:
        values = json.loads(line)
        solution = answer(read_question(values["question"]), SolveLimits(values["deterministic"], values["wall_s"]))
        answers.write(json.dumps(answer_values(solution)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
