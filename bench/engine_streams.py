"""The engine's figures as client streams see them: rates, latencies, how busy the stages were.
Pure.

Rates are taken from the time at which all streams generate: after the last one's first token,
before the first one's last. Prompts and those who have finished weigh on nothing then.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgeshard.domain.requests.generation import StageTiming


@dataclass(frozen=True, slots=True)
class Arrival:
    """A token: the time when the client had it, and the times of the stages for its step."""

    at_s: float
    timings: tuple[StageTiming, ...] = ()


@dataclass(frozen=True, slots=True)
class Stream:
    """One request as its client saw it."""

    began_s: float
    arrivals: tuple[Arrival, ...]

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0].at_s - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        return [later.at_s - earlier.at_s for earlier, later in pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of some streams at once. Seconds are medians over tokens; lists are by stage.

    - `hop_s`: of each hop: what a token's round takes beyond waiting and computing, in equal parts.
    - `bubble_share`: part of the stages' time in which they do not compute; None if the pipeline
      has a single stage.
    """

    tokens_per_s: float
    inter_token_latency_s: float
    ttft_s: float
    stage_s: tuple[float, ...] = ()
    hop_s: tuple[float, ...] = ()
    bubble_share: float | None = None


def sample_of(streams: Sequence[Stream]) -> Sample:
    """Raises ValueError if there is no time at which all streams generate."""
    begin = max(stream.arrivals[0].at_s for stream in streams)
    end = min(stream.arrivals[-1].at_s for stream in streams)
    within = [[a for a in stream.arrivals if begin <= a.at_s <= end] for stream in streams]
    if any(len(arrivals) < 2 for arrivals in within):
        raise ValueError("at no time did all streams generate: ask for more tokens")
    rates = [(len(arrivals) - 1) / (arrivals[-1].at_s - arrivals[0].at_s) for arrivals in within]
    gaps = [
        later.at_s - earlier.at_s for arrivals in within for earlier, later in pairwise(arrivals)
    ]
    steps = {
        arrival.timings
        for arrivals in within
        for arrival in arrivals
        if begin < arrival.at_s <= end
    }
    stages = sorted({timing.stage for step in steps for timing in step})
    compute = [
        [timing.compute_s for step in steps for timing in step if timing.stage == stage]
        for stage in stages
    ]
    busy = [min(1.0, sum(seconds) / (end - begin)) for seconds in compute]
    return Sample(
        tokens_per_s=sum(rates),
        inter_token_latency_s=statistics.median(gaps),
        ttft_s=statistics.median(stream.ttft_s for stream in streams),
        stage_s=tuple(statistics.median(seconds) for seconds in compute),
        hop_s=_hops(within, len(stages)),
        bubble_share=1.0 - statistics.fmean(busy) if busy else None,
    )


def _hops(within: Sequence[Sequence[Arrival]], stages: int) -> tuple[float, ...]:
    if stages < 2:
        return ()
    rests = [
        later.at_s
        - earlier.at_s
        - sum(timing.wait_s + timing.compute_s for timing in later.timings)
        for arrivals in within
        for earlier, later in pairwise(arrivals)
    ]
    return (max(0.0, statistics.median(rests)) / stages,) * stages


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The median of each figure over several runs of the same case."""

    def middle(lists: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(statistics.median(values) for values in zip(*lists, strict=True))

    shares = [sample.bubble_share for sample in samples if sample.bubble_share is not None]
    return Sample(
        tokens_per_s=statistics.median(sample.tokens_per_s for sample in samples),
        inter_token_latency_s=statistics.median(sample.inter_token_latency_s for sample in samples),
        ttft_s=statistics.median(sample.ttft_s for sample in samples),
        stage_s=middle([sample.stage_s for sample in samples]),
        hop_s=middle([sample.hop_s for sample in samples]),
        bubble_share=statistics.median(shares) if shares else None,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
