"""How a link is probed: which payloads, when to stop, what the answers say. Pure; `net.probing` does the sending."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

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


TELLING_S = 0.01
"""Parts that arrive within less say more of the receiver's scheduling than of the link."""
FEWEST_TELLING = 5
CHANGED = 0.1
REPORT_INTERVAL_S = 60.0
_REMEMBERED = 15
"""Odd, so that the median of what was before a change and after it is one of the two."""


class Arrivals:
    """What the parts of one step say of the link, where they are received.

    Parts of a step are sent back to back, so that those behind the first arrive as fast as the link carries them,
    whatever waited before them. (The sender sees only how fast its own buffers take them.)
    """

    def __init__(self) -> None:
        self._first_at: float | None = None
        self._size_bytes = 0

    def part(self, now: float, size_bytes: int, completes: bool) -> LinkSample | None:
        """A part of `size_bytes` is here; a sample once it completes a step that tells something."""
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
    """One probed link, and what traffic says of it since."""

    def __init__(self, known: LinkProfile, now: float) -> None:
        self._known = known
        self._told_at = now
        self._heard: deque[LinkSample] = deque(maxlen=_REMEMBERED)

    def heard(self, sample: LinkSample, now: float) -> LinkProfile | None:
        """The link as it is now when that is worth telling: changed by CHANGED, and not told for REPORT_INTERVAL_S."""
        self._heard.append(sample)
        if now - self._told_at < REPORT_INTERVAL_S:
            return None
        current = refreshed(self._known, self._heard)
        if abs(current.bandwidth_bps / self._known.bandwidth_bps - 1) <= CHANGED:
            return None
        self._known, self._told_at = current, now
        self._heard.clear()
        return current


def refreshed(known: LinkProfile, live: Iterable[LinkSample]) -> LinkProfile:
    """The profile brought up to date by live traffic, without a probe: its bandwidth, from what `Arrivals` gives.

    Latency stays as it was probed. With few samples nothing changes.
    """
    rates = [8 * sample.size_bytes / sample.seconds for sample in live]
    if len(rates) < FEWEST_TELLING:
        return known
    return replace(known, bandwidth_bps=statistics.median(rates), samples=known.samples + len(rates))
