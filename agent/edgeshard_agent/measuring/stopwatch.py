"""Repeated timing of one piece of work, on a processor or on an accelerator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from edgeshard.profiles.grid import Repeats
from edgeshard_agent.measuring.stops import Stops, no_stops

STEADY_SPREAD = 0.01
"""Repeats end when the median is known this well: its standard error over itself."""
FEWEST = 5
"""With fewer repeats a spread is meaningless."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The median of the repeats in seconds, and their median absolute deviation over it."""

    seconds: float
    spread: float
    repeats: int


def summarise(seconds: list[float]) -> Measurement:
    median = statistics.median(seconds)
    deviation = statistics.median(abs(value - median) for value in seconds)
    return Measurement(median, deviation / median if median > 0 else 0.0, len(seconds))


def is_steady(seconds: list[float]) -> bool:
    """Whether the median would hardly change with more repeats."""
    if len(seconds) < FEWEST:
        return False
    # 1.2533 x 1.4826: the median's standard error from the median absolute deviation, for normal
    # noise.
    error: float = 1.858 * summarise(seconds).spread / len(seconds) ** 0.5
    return error <= STEADY_SPREAD


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """The cores that control groups leave a process, for a computation of `threads` threads; 0
    cores: no limit.

    The kernel lets a process run at full speed until its share of a period is used up, and then
    stops it for the rest of the period. Short calls are timed between two such stops, so that one
    looks faster than many in a row are.
    """

    cores: float = 0.0
    threads: int = 1

    @property
    def share(self) -> float:
        """The part of each thread's core that the quota leaves."""
        return min(1.0, self.cores / self.threads) if self.cores else 1.0

    def sustained_s(self, seconds: float, processor_s: float) -> float:
        """The time of a call in a long row of them: it took `seconds`, and `processor_s` of all
        cores."""
        return max(seconds, processor_s / self.cores) if self.cores else seconds


class Stopwatch:
    """Times calls on a device. On CUDA between two events on its stream, so that launching is not
    waited for twice.

    A call during which the process was stopped is made again. Under a quota the time of a call on a
    processor is that of many calls in a row.
    """

    def __init__(self, device: str, stops: Stops = no_stops, quota: CpuQuota | None = None) -> None:
        self.device = torch.device(device)
        self._stops = stops
        self._quota = quota or CpuQuota()
        self._wall_s = 0.0
        self._processor_s = 0.0

    @property
    def processor_share(self) -> float:
        """The fraction of all calls' time so far in which the caller really had a core, relative to
        its quota; 1 on an accelerator."""
        return (
            min(1.0, self._processor_s / (self._wall_s * self._quota.share))
            if self._wall_s > 0
            else 1.0
        )

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one call."""
        while True:
            stops = self._stops()
            all_before = time.process_time()
            seconds, computed = self._timed(work)
            all_threads_s = time.process_time() - all_before
            if stops == self._stops():
                self._wall_s += seconds
                self._processor_s += computed
                return (
                    seconds
                    if self.device.type == "cuda"
                    else self._quota.sustained_s(seconds, all_threads_s)
                )

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds of one call, and seconds of core time that the caller had; both are the same on
        an accelerator."""
        if self.device.type != "cuda":
            began, computed = time.perf_counter(), time.thread_time()
            work()
            return time.perf_counter() - began, time.thread_time() - computed
        with torch.cuda.device(self.device):
            event: Any = torch.cuda.Event
            first, last = event(enable_timing=True), event(enable_timing=True)
            torch.cuda.synchronize()
            first.record()
            work()
            last.record()
            last.synchronize()
            seconds = float(first.elapsed_time(last)) / 1e3
            return seconds, seconds

    def collect(self, work: Callable[[], object], repeats: Repeats, parts: int = 1) -> list[float]:
        """One pass: seconds of one of the `parts` equal pieces a call consists of, for each repeat.
        Warm up before."""
        durations: list[float] = []
        left_s = repeats.limit_s
        while len(durations) < repeats.most:
            seconds = self.once(work)
            left_s -= seconds
            durations.append(seconds / parts)
            if len(durations) >= repeats.least and (is_steady(durations) or left_s < 0.0):
                break
        return durations
