"""The rates at which weights stream from a directory's disk, and at which it is written and
flushed.

Weights are read past the page cache, two units at once in chunks by several threads, and their
checksums are computed. Sequential reads gave a third of the rate that stages reach, so streaming
seemed three times as slow as it is.

The file that is read was just written and flushed: no other file may be read at will, and data in
the page cache would be as fast as memory. Writing ends after a fixed number of bytes or a fixed
time, whichever is first. Then the file is read repeatedly for the same time.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.nodes.profile import DiskProfile, Effort
from edgeshard.process.machine_facts import disk_bytes
from edgeshard_agent.model.weights.packed_modules import unit_checksum, unit_memory
from edgeshard_agent.model.weights.weight_store import UNITS_AT_ONCE
from edgeshard_agent.store.direct import CHUNK_BYTES, ChunkReader

PIECE_BYTES = 8 << 20
"""Written and flushed at once."""
UNIT_BYTES = 16 << 20
"""The size that is read as one unit, as a layer is. The size matters little, since two are read at
once."""
LEFT_FREE = 8
"""A disk is written to only if its free space is at least this many times the bytes to write."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The most bytes, and the longest that writing them may take; they are read again and again for
    as long."""

    most_bytes: int = 256 << 20
    longest_s: float = 1.5
    piece_bytes: int = PIECE_BYTES


EXTENTS: Mapping[Effort, Extent | None] = {
    Effort.FIRST: None,
    Effort.QUICK: Extent(64 << 20, 0.25),
    Effort.FULL: Extent(),
}


def measure_disk(directory: Path, extent: Extent | None) -> DiskProfile | None:
    """None without an extent, and if the disk is full, not writable, or cannot be read past the
    page cache.

    Blocks for some seconds.
    """
    if extent is None:
        return None
    _, free = disk_bytes(directory)
    if free < LEFT_FREE * extent.most_bytes or not hasattr(os, "O_DIRECT"):
        return None
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".disk-") as file:
            written, write_rate = _write(file.fileno(), extent)
            rate = _read(Path(file.name), written, extent.longest_s)
    except OSError:  # no such directory, a full disk, or a file system without direct reading
        return None
    return DiskProfile(rate, free, write_rate)


def _write(descriptor: int, extent: Extent) -> tuple[int, float]:
    """Bytes written and flushed, at least one piece, and how many a second.

    They are random, so that no disk has them packed; making them does not count.
    """
    written = 0
    seconds = 0.0
    ends = time.monotonic() + extent.longest_s
    while written < extent.most_bytes and (not written or time.monotonic() < ends):
        piece, began = os.urandom(extent.piece_bytes), time.monotonic()
        written += os.write(descriptor, piece)
        os.fsync(descriptor)  # else the page cache takes all of it in no time
        seconds += time.monotonic() - began
    return (
        written // extent.piece_bytes * extent.piece_bytes,
        written / seconds if seconds > 0 else 0.0,
    )


def _read(path: Path, size: int, longest_s: float) -> float:
    """Bytes a second of reading the file's first `size` bytes, once at the least. OSError without
    direct reading."""
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    reader = ChunkReader(unit_checksum)
    units = [unit_memory(min(size, UNIT_BYTES)).fill_(0).numpy().data for _ in range(UNITS_AT_ONCE)]
    began, once = time.monotonic(), -(-size // UNIT_BYTES)

    def arrived(_: int, chunk: memoryview) -> None:
        reader.checksum(chunk)

    def read(first: int) -> int:
        done = 0
        for number in itertools.count(first, UNITS_AT_ONCE):
            if number >= once and time.monotonic() - began >= longest_s:
                break
            place = number % once * UNIT_BYTES
            part = units[first][: size - place]
            chunks = [len(part[at : at + CHUNK_BYTES]) for at in range(0, len(part), CHUNK_BYTES)]
            reader.read(path, place, part, chunks, arrived, cached=False)
            done += len(part)
        return done

    try:
        with ThreadPoolExecutor(UNITS_AT_ONCE) as threads:
            done = sum(threads.map(read, range(UNITS_AT_ONCE)))
    finally:
        reader.close()
    return done / max(time.monotonic() - began, 1e-9)
