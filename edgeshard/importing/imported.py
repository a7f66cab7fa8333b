"""A model that is ready to be added, whatever form it came in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeshard.storage.checkpoint import Checkpoint

Progress = Callable[[str, int, int], None]
"""Called with what is done (`DOWNLOADING`, `CONVERTING`), bytes so far and in all, from the thread that does it; what
it raises ends the work."""
DOWNLOADING, CONVERTING = "downloading", "converting"


@dataclass(frozen=True, slots=True)
class Imported:
    """`notes` say what an operator should know, such as a loss."""

    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()
