"""The probing of a link: its payloads, its end, and the profile from its answers. Pure;
`measuring.probing` sends."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from edgeshard.domain.nodes.profile import LinkProfile, LinkSample
from edgeshard.profiles.fit import fit_link

SIZES = (0, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of payload: the smallest shows a fast link's latency, the largest its bandwidth."""
REPEATS = 7
ENOUGH_S = 0.2
"""A payload that takes this long shows the bandwidth; a larger one would only hold up other
traffic."""
MOST_BYTES = 40 << 20


@dataclass(slots=True)
class ProbeSchedule:
    """Sizes grow only while a probe is quick, so a slow link carries few bytes.

    Call `next_size`, send that much, pass the time of the acknowledgement to `answered`. The two
    smallest sizes are sent at least once, because a slope needs two sizes.
    """

    most_bytes: int = MOST_BYTES
    sent_bytes: int = 0
    answers: dict[int, list[float]] = field(default_factory=dict)
    _index: int = 0

    def next_size(self) -> int | None:
        """Bytes to send now, None when enough is known."""
        while self._index < len(SIZES):
            size = SIZES[self._index]
            times = self.answers.get(size, [])
            if not times and (self._index < 2 or self._may_grow(size)):
                return size
            if not times:
                return None
            slow = statistics.median(times) >= ENOUGH_S
            affordable = self.sent_bytes + size <= self.most_bytes
            if len(times) < (2 if slow else REPEATS) and affordable:
                return size
            self._index += 1
        return None

    def answered(self, size_bytes: int, seconds: float) -> None:
        self.sent_bytes += size_bytes
        self.answers.setdefault(size_bytes, []).append(seconds)

    def _may_grow(self, size: int) -> bool:
        before = statistics.median(self.answers[SIZES[self._index - 1]])
        return before < ENOUGH_S and self.sent_bytes + size <= self.most_bytes


def one_way(answers: dict[int, list[float]]) -> list[LinkSample]:
    """Samples of one direction: the acknowledgement is assumed to take half of an empty payload's
    round trip.

    If the two directions' delays differ, each gets their mean; the sum around a ring is right all
    the same.
    """
    back = statistics.median(answers[0]) / 2
    return [
        LinkSample(size, max(seconds - back, seconds / 1e3))
        for size, times in sorted(answers.items())
        for seconds in times
    ]


def link_profile(answers: dict[int, list[float]]) -> LinkProfile:
    """The profile of a probed link. Raises InvalidArgumentError when there are too few answers."""
    return fit_link(one_way(answers))


TELLING_S = 0.01
"""Parts that arrive within less time show the receiver's scheduling rather than the link."""
FEWEST_TELLING = 5
CHANGED = 0.1
REPORT_INTERVAL_S = 60.0
_REMEMBERED = 15
"""Odd, so that the median of samples before and after a change is one of them."""


class Arrivals:
    """Measures the link at the receiver, from the parts of one step.

    Parts of a step are sent back to back. So the parts after the first arrive as fast as the link
    carries them, whatever the step waited before. (The sender sees only how fast its own buffers
    take them.)
    """

    def __init__(self) -> None:
        self._first_at: float | None = None
        self._size_bytes = 0

    def part(self, now: float, size_bytes: int, completes: bool) -> LinkSample | None:
        """A part of `size_bytes` has arrived; returns a sample when it completes a step that was
        long enough."""
        if self._first_at is None:
            self._first_at, self._size_bytes = now, 0
        else:
            self._size_bytes += size_bytes
        if not completes:
            return None
        sample = LinkSample(self._size_bytes, now - self._first_at)
        self._first_at = None
        return sample if sample.size_bytes > 0 and sample.seconds >= TELLING_S else None


class LiveLink:
    """One probed link, and the newest samples of its traffic."""

    def __init__(self, profile: LinkProfile, now: float) -> None:
        self._known = profile
        self._told_at = now
        self._heard: deque[LinkSample] = deque(maxlen=_REMEMBERED)

    def heard(self, sample: LinkSample, now: float) -> LinkProfile | None:
        """The link as it is now if it is to be reported: changed by CHANGED, and not reported for
        REPORT_INTERVAL_S."""
        self._heard.append(sample)
        if now - self._told_at < REPORT_INTERVAL_S:
            return None
        current = refreshed(self._known, self._heard)
        if abs(current.bandwidth_bps / self._known.bandwidth_bps - 1) <= CHANGED:
            return None
        self._known, self._told_at = current, now
        self._heard.clear()
        return current


def refreshed(profile: LinkProfile, live: Iterable[LinkSample]) -> LinkProfile:
    """The profile brought up to date by live traffic, without a probe: its bandwidth, from the
    samples of `Arrivals`.

    Latency stays as it was probed. With few samples nothing changes.
    """
    rates = [8 * sample.size_bytes / sample.seconds for sample in live]
    if len(rates) < FEWEST_TELLING:
        return profile
    return replace(
        profile, bandwidth_bps=statistics.median(rates), samples=profile.samples + len(rates)
    )
