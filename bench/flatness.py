"""Whether a site that has run for long still uses the same resources: memory, threads, open files,
KV. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20
GROWTH_LIMIT = 1.0 * MIB / 600
"""Bytes a second by which a process may grow: 1 MiB in ten minutes."""
WARM_UP_SHARE = 0.25
"""The part of the time at the start in which allocators and caches may still fill."""
LEAST_JUDGED_S = 600.0
"""Over a shorter time, growth is within an allocator's normal behaviour."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process as the system sees it: resident bytes, threads, open files."""

    rss_bytes: int
    threads: int
    files: int


@dataclass(frozen=True, slots=True)
class Sample:
    """All of a site at one time, in seconds from the start. KV bytes in use are by node."""

    at_s: float
    processes: Mapping[str, ProcessSample]
    kv_bytes: Mapping[str, int]
    requests: int


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line through (time, value) by least squares; 0 if all times are equal."""
    if not points:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def after_warm_up(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples to judge: none if they span too few seconds."""
    if not samples:
        return ()
    first, last = samples[0].at_s, samples[-1].at_s
    begin = first + WARM_UP_SHARE * (last - first)
    return [s for s in samples if s.at_s >= begin] if last - begin >= LEAST_JUDGED_S else ()


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Bytes a second by which each process grew after warm-up; empty if that cannot be judged."""
    return _slopes(after_warm_up(samples), lambda process: process.rss_bytes)


def problems(samples: Sequence[Sample]) -> list[str]:
    """Descriptions of everything that grew although it should not have; empty for a site that
    stayed the same."""
    judged = after_warm_up(samples)
    found = [
        f"{name} grew by {rate * 600 / MIB:.2f} MiB in ten minutes, more than "
        f"{GROWTH_LIMIT * 600 / MIB:g}"
        for name, rate in growth(samples).items()
        if rate > GROWTH_LIMIT
    ]
    # Threads and files come and go with streams, one or two at a time; a leak adds one for many a
    # request.
    counts: dict[str, Callable[[ProcessSample], int]] = {
        "threads": lambda process: process.threads,
        "open files": lambda process: process.files,
    }
    for what, count in counts.items():
        for name, rate in _slopes(judged, count).items():
            added = rate * (judged[-1].at_s - judged[0].at_s)
            if added >= 3:
                found.append(f"{name} has {added:.0f} more {what} than after warm-up")
    return found


def _slopes(samples: Sequence[Sample], value: Callable[[ProcessSample], int]) -> dict[str, float]:
    names = samples[0].processes if samples else ()
    return {name: slope([(s.at_s, value(s.processes[name])) for s in samples]) for name in names}
