"""The share that other processes, and a hypervisor, take of the cores that this one computes on."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from edgeshard_agent.measuring.stops import Stops

_SHORTEST_S = 0.9
"""The system counts in hundredths of a second, so over less a share is mostly rounding."""
_PARTS = ("user", "nice", "system", "irq", "softirq", "steal")
_REST = ("idle", "iowait")


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds since some start: in total of a number of cores, busy ones among them, and the part
    of this process."""

    cores: frozenset[int]
    total_s: float
    busy_s: float
    own_s: float


def read_cores() -> Reading:
    """Read the cores this process may run on. Time that a hypervisor stole of them counts as
    busy."""
    every = psutil.cpu_times(percpu=True)
    cores = frozenset(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
    )
    times = [every[core] for core in cores if core < len(every)]
    busy, rest = (
        sum(getattr(core, part, 0.0) for core in times for part in parts)
        for parts in (_PARTS, _REST)
    )
    return Reading(cores, busy + rest, busy, time.process_time())


def others_share(before: Reading, after: Reading, threads: int) -> float:
    """The time that others took beyond the cores that `threads` threads leave free, as a part of
    the threads' cores."""
    elapsed = after.total_s - before.total_s
    if before.cores != after.cores or elapsed <= 0:
        return 0.0
    count = len(after.cores)
    busy_cores = count * (after.busy_s - before.busy_s - (after.own_s - before.own_s)) / elapsed
    threads = min(threads, count)
    return min(1.0, max(0.0, busy_cores - (count - threads)) / threads)


class CoreMeter:
    """The fraction since it was made, without stretches between two laps in which the process was
    stopped."""

    def __init__(self, threads: int, stops: Stops) -> None:
        self._threads = threads
        self._stops = stops
        self._last, self._stops_before = read_cores(), stops()
        self._before = self._last

    def lap(self) -> None:
        now, stops = read_cores(), self._stops()
        if stops != self._stops_before:
            last, before = self._last, self._before
            self._before = Reading(
                before.cores,
                before.total_s + now.total_s - last.total_s,
                before.busy_s + now.busy_s - last.busy_s,
                before.own_s + now.own_s - last.own_s,
            )
        self._last, self._stops_before = now, stops

    def share(self) -> float:
        self.lap()
        return others_share(self._before, self._last, self._threads)


class OthersWatch:
    """The share since the last reading, over a second or so at least; 0 before there is one."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._last = read_cores()
        self._share = 0.0

    def share(self) -> float:
        now = read_cores()
        if now.cores != self._last.cores or now.total_s - self._last.total_s >= _SHORTEST_S * len(
            now.cores
        ):
            self._share = others_share(self._last, now, self._threads)
            self._last = now
        return self._share
