"""A model that is ready to be added, from a source of any form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeshard.storage.checkpoint import Checkpoint

Progress = Callable[[str, int, int], None]
"""A call with the kind of work (`DOWNLOADING`, `CONVERTING`), the bytes so far and in all, from the working thread; an
error that it raises ends the work."""
DOWNLOADING, CONVERTING = "downloading", "converting"


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint, and notes for an operator, such as about a loss."""

    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()
