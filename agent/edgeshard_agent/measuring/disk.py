"""How fast a directory's disk is read, one piece after the other and past the page cache, and written, flushed.

The file read is one that was just written and flushed: no other file may be read at will, and what is in the page cache
would be as fast as memory. Writing ends as reading does, after so many bytes or so much time, whichever is first.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.profile import DiskProfile
from edgeshard.process.machine import disk_bytes

PIECE_BYTES = 8 << 20
"""Read at once, as large as the parts of a block's weights."""
LEFT_FREE = 8
"""A disk with less than so many times what would be written free is not written to for this."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The most bytes, and the longest that writing them may take; reading them takes no longer either."""

    most_bytes: int = 256 << 20
    longest_s: float = 1.5
    piece_bytes: int = PIECE_BYTES


FULL, QUICK = Effort(), Effort(64 << 20, 0.25)


def measure_disk(directory: Path, effort: Effort = FULL) -> DiskProfile | None:
    """None where the disk is full, not writable, or cannot be read past the page cache. Blocks for some seconds."""
    most_bytes, longest_s, piece_bytes = effort.most_bytes, effort.longest_s, effort.piece_bytes
    _, free = disk_bytes(directory)
    if free < LEFT_FREE * most_bytes or not hasattr(os, "O_DIRECT"):
        return None
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".disk-") as file:
            written, write_rate = _write(file.fileno(), most_bytes, longest_s, piece_bytes)
            rate = _read(Path(file.name), written, longest_s, piece_bytes)
    except OSError:  # no such directory, a full disk, or a file system without direct reading
        return None
    return None if rate is None else DiskProfile(rate, free, write_rate)


def _write(descriptor: int, most_bytes: int, longest_s: float, piece_bytes: int) -> tuple[int, float]:
    """Bytes written and flushed, at least one piece, and how many a second.

    They are random, so that no disk has them packed; making them does not count.
    """
    written, seconds, ends = 0, 0.0, time.monotonic() + longest_s
    while written < most_bytes and (not written or time.monotonic() < ends):
        piece, began = os.urandom(piece_bytes), time.monotonic()
        written += os.write(descriptor, piece)
        os.fsync(descriptor)  # else the page cache takes all of it in no time
        seconds += time.monotonic() - began
    return written // piece_bytes * piece_bytes, written / seconds if seconds > 0 else 0.0


def _read(path: Path, size: int, longest_s: float, piece_bytes: int) -> float | None:
    """Bytes a second of reading the file's first `size` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with suppress(AttributeError, OSError):
            os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(-1, piece_bytes) as piece:  # direct reading wants memory that begins at a page
            began, done = time.monotonic(), 0
            while done < size and time.monotonic() - began < longest_s:
                count = os.preadv(descriptor, [piece], done)
                if count <= 0:
                    break
                done += count
            seconds = time.monotonic() - began
    finally:
        os.close(descriptor)
    return done / seconds if done and seconds > 0 else None
