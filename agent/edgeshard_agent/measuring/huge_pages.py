"""The part of this process's memory that the kernel has put in huge pages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path

from edgeshard.domain.clock import Clock
from edgeshard.domain.nodes.device import HugePages, StageStatus

AGAIN_S = 60.0
"""Reading takes the kernel some 10 ms for each gigabyte in ordinary pages. It makes them huge in the background."""
_FLAGS = re.compile(rb"\nVmFlags:([^\n]*)\n")
_MAPS = Path("/proc/self/smaps")


def read_huge_pages(maps: Path = _MAPS) -> HugePages | None:
    """Read the mappings that ask for huge pages; None if the system does not report it. `maps` is for tests."""
    try:
        text = maps.read_bytes()
    except OSError:
        return None
    parts = _FLAGS.split(text)  # a mapping, its flags, the next mapping, its flags, ...
    asking = [entry for entry, flags in zip(parts[::2], parts[1::2], strict=False) if b"hg" in flags.split()]
    return HugePages(
        sum(_kilobytes(entry, b"Rss") for entry in asking) << 10,
        sum(_kilobytes(entry, b"AnonHugePages") for entry in asking) << 10,
    )


def _kilobytes(entry: bytes, key: bytes) -> int:
    match = re.search(rb"\n" + key + rb": +(\d+) kB", entry)
    return 0 if match is None else int(match[1])


class HugePageWatch:
    """The result of `read_huge_pages`, read again when a stage has come or gone, and every `AGAIN_S` seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: frozenset[tuple[object, ...]] | None = None
        self._due = 0.0
        self._known: HugePages | None = None

    async def read(self, stages: Iterable[StageStatus]) -> HugePages | None:
        """Read in a thread: the kernel walks through all of the process's memory."""
        now = self._clock.now()
        stage_phases = frozenset((stage.deployment, stage.epoch, stage.phase) for stage in stages)
        if stage_phases != self._seen or now >= self._due:
            self._seen, self._due = stage_phases, now + AGAIN_S
            self._known = await asyncio.to_thread(read_huge_pages)
        return self._known
