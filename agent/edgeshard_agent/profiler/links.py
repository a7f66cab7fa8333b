"""How a link is probed: which payloads, when to stop, what the answers say. Pure; `net.probing` does the sending."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgeshard.profile import LinkProfile, LinkSample
from edgeshard.profile_fit import fit_link

SIZES = (0, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of payload, from what is all latency to what is all bandwidth on a fast link."""
REPEATS = 7
ENOUGH_S = 0.2
"""A payload that takes this long shows the bandwidth; a larger one would only be in the way of others."""
MOST_BYTES = 40 << 20


@dataclass(slots=True)
class ProbeSchedule:
    """Sizes grow only while a probe is quick, so a slow link carries few bytes.

    Ask `next_size`, send that much, tell `answered` how long the acknowledgement took. The two smallest sizes are
    always sent, once at least; without two sizes there is no slope.
    """

    most_bytes: int = MOST_BYTES
    sent_bytes: int = 0
    answers: dict[int, list[float]] = field(default_factory=dict)
    _index: int = 0

    def next_size(self) -> int | None:
        """Bytes to send now, None when enough is known."""
        while self._index < len(SIZES):
            size = SIZES[self._index]
            taken = self.answers.get(size, [])
            if not taken and (self._index < 2 or self._may_grow(size)):
                return size
            if not taken:
                return None
            slow = statistics.median(taken) >= ENOUGH_S
            affordable = self.sent_bytes + size <= self.most_bytes
            if len(taken) < (2 if slow else REPEATS) and affordable:
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
    """Samples of the way there: the acknowledgement's way back is taken to be half of an empty payload's round trip.

    Where the two directions' delays differ, each is given their mean; the sum around a ring is right all the same.
    """
    back = statistics.median(answers[0]) / 2
    return [
        LinkSample(size, max(seconds - back, seconds / 1e3))
        for size, taken in sorted(answers.items())
        for seconds in taken
    ]


def link_profile(answers: dict[int, list[float]]) -> LinkProfile:
    """Raises InvalidArgumentError when there are too few answers."""
    return fit_link(one_way(answers))


def refreshed(known: LinkProfile, live: Sequence[LinkSample]) -> LinkProfile:
    """The profile brought up to date by live traffic, without a probe: its bandwidth, from the larger half of frames.

    Small frames say nothing of bandwidth; when no frame took longer than the latency, nothing changes.
    """
    telling = [s for s in live if s.seconds > 2 * known.latency_s and s.size_bytes > 0]
    if len(telling) < 5:
        return known
    rate = statistics.median(8 * s.size_bytes / (s.seconds - known.latency_s) for s in telling)
    return LinkProfile(
        latency_s=known.latency_s,
        bandwidth_bps=rate,
        spread=known.spread,
        samples=known.samples + len(telling),
        largest_bytes=max(known.largest_bytes, *(s.size_bytes for s in telling)),
    )
