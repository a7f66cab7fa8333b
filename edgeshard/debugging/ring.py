"""The newest events of a state machine, with the state before them: what replays to the state there
is now.

Entries are references to frozen values, so recording costs next to nothing; they become text only
in a dump. They are in segments, each with the state before its first entry. The oldest segment is
dropped if there are too many entries or bytes. The events of a dropped segment that are not routine
stay for a while: they can be read, but not replayed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import chain
from typing import Any, Generic, TypeVar, cast

from edgeshard.forms import field_names

StateT = TypeVar("StateT")
EventT = TypeVar("EventT")

SEGMENTS = 16
SEGMENT_ENTRIES = 64
MOST_BYTES = 8 << 20
"""Most bytes of all entries, roughly, and as much again for those that cannot be replayed any
more."""
MOST_ENTRY_BYTES = 1 << 20
"""An event larger than this is not kept; the replay begins after it."""
MOST_EARLIER = 512


@dataclass(frozen=True, slots=True)
class RingEntry(Generic[EventT]):
    """An event, the how manieth it was, and when (monotonic seconds). `refused` is the reason if it
    changed nothing."""

    number: int
    at: float
    event: EventT
    refused: str = ""
    rough_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RingView(Generic[StateT, EventT]):
    """`entries` lead from `checkpoint` to the newest state; `earlier` precede it, without routine
    ones."""

    checkpoint: StateT
    entries: tuple[RingEntry[EventT], ...]
    earlier: tuple[RingEntry[EventT], ...]
    recorded: int


@dataclass(slots=True)
class _Segment(Generic[StateT, EventT]):
    before: StateT
    entries: list[RingEntry[EventT]] = field(default_factory=list)
    rough_bytes: int = 0


class EventRing(Generic[StateT, EventT]):
    """`routine` are the classes of frequent events that are of little use once they are old."""

    def __init__(self, routine: tuple[type, ...] = ()) -> None:
        self._routine = routine
        self._segments: deque[_Segment[StateT, EventT]] = deque()
        self._earlier: deque[RingEntry[EventT]] = deque()
        self._bytes = self._earlier_bytes = 0
        self._count = 0

    def record(self, before: StateT, event: EventT, at: float, refused: str = "") -> None:
        """Note that `event` was applied to `before`, or refused by it, at `at`. An event may know
        its `rough_bytes`."""
        size = getattr(event, "rough_bytes", None) or rough_bytes(event, MOST_ENTRY_BYTES)
        self._count += 1
        if size > MOST_ENTRY_BYTES:
            while self._segments and not refused:
                self._drop_oldest()
            return
        newest = self._segments[-1] if self._segments else None
        if (
            newest is None
            or len(newest.entries) >= SEGMENT_ENTRIES
            or newest.rough_bytes > MOST_BYTES // SEGMENTS
        ):
            newest = _Segment(before)
            self._segments.append(newest)
        newest.entries.append(RingEntry(self._count, at, event, refused, size))
        newest.rough_bytes += size
        self._bytes += size
        while len(self._segments) > 1 and (
            len(self._segments) > SEGMENTS or self._bytes > MOST_BYTES
        ):
            self._drop_oldest()

    def view(self, state: StateT) -> RingView[StateT, EventT]:
        """What is kept. `state` is the one after the newest event, and the checkpoint of a ring
        without entries."""
        checkpoint = self._segments[0].before if self._segments else state
        entries = tuple(chain.from_iterable(segment.entries for segment in self._segments))
        return RingView(checkpoint, entries, tuple(self._earlier), self._count)

    def _drop_oldest(self) -> None:
        segment = self._segments.popleft()
        self._bytes -= segment.rough_bytes
        for entry in segment.entries:
            if not isinstance(entry.event, self._routine):
                self._earlier.append(entry)
                self._earlier_bytes += entry.rough_bytes
        while self._earlier and (
            len(self._earlier) > MOST_EARLIER or self._earlier_bytes > MOST_BYTES
        ):
            self._earlier_bytes -= self._earlier.popleft().rough_bytes


def rough_bytes(value: Any, limit: int) -> int:
    """Memory of a value and of all that it refers to, even if shared; at most slightly above
    `limit`."""
    total = 0
    waiting = [value]
    while waiting and total <= limit:
        item = waiting.pop()
        kind = type(item)
        total += sys.getsizeof(item)
        if kind in _LEAVES:
            continue
        names = _parts(cast("Hashable", kind))
        if names:
            waiting += [getattr(item, name) for name in names]
        elif isinstance(item, Mapping):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list | tuple | frozenset):
            waiting += item
    return total


_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})


@cache
def _parts(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, Enum):
        return ()
    return field_names(kind) or (("args",) if issubclass(kind, BaseException) else ())
