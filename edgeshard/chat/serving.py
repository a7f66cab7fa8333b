"""The end of `edgeshard.chat.lane` that answers: a process whose questions have limits of time and
memory.

Questions are lines of JSON on its standard input, each followed by the bytes of its `parts`.
Answers are such lines on its standard output, followed by bytes if the line has `binary`. It
answers one after the other. A question that takes too much ends the process. The argument is added
to the process's niceness.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.forms import OWN

LOAD_LIMIT_S = 30.0
"""Limit of processor time for a model's files."""
TOKENISE_LIMIT_S = 10.0
"""Limit of processor time for a prompt's tokens, or their text; the longest prompts take some two
seconds."""
_TOKEN_TYPE = "I"
"""Element type of the `array`."""

Answer = tuple[dict[str, Any], bytes]


def serve(answer: Callable[[Mapping[str, Any], Mapping[str, bytes]], Answer]) -> None:
    """Until standard input ends. `answer` may raise EdgeShardError, which the asker gets;
    MemoryError ends it all."""
    os.nice(int(sys.argv[1]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(OSError):  # if memory runs out, this process ends before its parent
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    # the library aborts without memory: a core would hold prompts
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        parts = {name: sys.stdin.buffer.read(size) for name, size in question["parts"].items()}
        values, data = _answer(answer, question, parts)
        sys.stdout.buffer.write(json.dumps({**values, "binary": len(data)}).encode() + b"\n" + data)
        sys.stdout.buffer.flush()


def _answer(
    answer: Callable[[Mapping[str, Any], Mapping[str, bytes]], Answer],
    question: Mapping[str, Any],
    parts: Mapping[str, bytes],
) -> Answer:
    try:
        return answer(question, parts)
    except EdgeShardError as error:
        failure = error
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # A panic of the tokenizer's library is no Exception.
        # Not its text: it could quote the messages.
        failure = InternalError(
            f"the model's tokenizer or chat template failed: {type(error).__name__}"
        )
    return {"error": OWN.write(EdgeShardError, failure)}, b""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """End this process if the body takes more processor time.

    The kernel watches: one operation of a template can take forever, and nothing in the interpreter
    would interrupt it.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def limited_memory(most_bytes: int) -> Iterator[None]:
    """If the body grows by more than `most_bytes` of addresses, it gets MemoryError, or the process
    ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + most_bytes
    # If a service may not set it, its own limit holds.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as they travel between the two ends."""
    return array(_TOKEN_TYPE, tokens).tobytes()


def unpacked(data: bytes) -> array[int]:
    """The input of `packed`."""
    tokens = array(_TOKEN_TYPE)
    tokens.frombytes(data)
    return tokens
