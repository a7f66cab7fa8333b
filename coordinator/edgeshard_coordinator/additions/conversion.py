"""The process that makes a model ready for the coordinator's store (`adder.py`): one line of JSON
in, several out.

It has the lowest priority and bounded memory, and ends with the coordinator. Its files lie in
TMPDIR, which belongs to the coordinator. After the line with `ready` it keeps them until standard
input ends.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import EdgeShardError, InternalError, ResourceExhaustedError
from edgeshard.importing.blocks import Width
from edgeshard.importing.model_sources import Source, opened, parse_repository
from edgeshard.process.parent import bound_memory, end_with, go_first
from edgeshard.storage.checkpoint import draft_manifest
from edgeshard.storage.files import MOVE_STATE, naming_full_disk
from edgeshard.storage.local_model import local_model
from edgeshard.wire.status import error_to_bytes
from edgeshard.wire.store import local_model_to_bytes

NICENESS = 19
PROGRESS_EVERY_S = 0.1
READY_FILE = "model.pb"
"""The file of TMPDIR with the ready model, as `local_model_to_bytes` writes it."""
Say = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """The arguments are the parent's id and the bytes that the process may grow by."""
    end_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    os.nice(NICENESS)
    go_first()
    bound_memory(int(sys.argv[2]), maps_files=True)  # a GGUF file is mapped as a whole
    question = json.loads(sys.stdin.buffer.readline())

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    try:
        _convert(question, say)
    except Exception as error:
        say({"error": base64.b64encode(error_to_bytes(_typed(error))).decode()})


def _convert(question: Mapping[str, str], say: Say) -> None:
    source = (
        Source(Path(question["path"]))
        if question["path"]
        else parse_repository(question["repository"])
    )
    assert source is not None, "the coordinator has checked the repository's name"
    scratch = Path(tempfile.gettempdir())
    name = question["name"]
    with (
        naming_full_disk(scratch / READY_FILE, f"model {name}"),
        opened(source, Width(question["width"]), _throttled(say)) as imported,
    ):
        model = local_model(imported.checkpoint, draft_manifest(name, imported.checkpoint))
        (scratch / READY_FILE).write_bytes(local_model_to_bytes(model))
        say({"ready": True, "notes": imported.notes_as(name)})
        sys.stdin.buffer.read()


def _throttled(say: Say) -> Callable[[str, int, int], None]:
    said_at = 0.0

    def report(work: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at >= PROGRESS_EVERY_S or done_bytes == total_bytes:
            said_at = now
            say({"work": work, "done": done_bytes, "total": total_bytes})

    return report


def _typed(error: Exception) -> EdgeShardError:
    if isinstance(error, ResourceExhaustedError) and error.reason == "DISK_FULL":
        # The conversion's own remedy names TMPDIR, which the coordinator sets.
        message = f"{error.message.rpartition('; ')[0] or error.message}; {MOVE_STATE}"
        return ResourceExhaustedError(message, field=error.field, reason=error.reason)
    if isinstance(error, EdgeShardError):
        return error
    if isinstance(error, MemoryError):
        return ResourceExhaustedError(
            "the conversion needs more memory than the coordinator gives it: run `edgectl model "
            "add` on a machine "
            "with more",
            field="source",
            reason="CONVERSION_MEMORY",
        )
    return InternalError(f"the conversion failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
