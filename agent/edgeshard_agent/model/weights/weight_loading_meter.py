"""The progress of a stage's weights on their way into memory, and the time that the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgeshard.domain.nodes.device import StageFilling, WeightLoadingWork


@dataclass(slots=True)
class Share:
    """Bytes of one sort of work, and the seconds that those done have taken."""

    done_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0


def seconds_left(shares: Iterable[Share]) -> float | None:
    """Seconds that the rest takes if each kind continues at its rate so far; None while one has no rate yet."""
    left = 0.0
    for share in shares:
        rest = max(0, share.total_bytes - share.done_bytes)
        if rest and not share.done_bytes:
            return None
        left += rest * share.seconds / share.done_bytes if rest else 0.0
    return left


class WeightLoadingMeter:
    """Tells `tell` how far it is. Reads from packed files have a rate of their own: they are many times as fast."""

    def __init__(self, tell: Callable[[StageFilling], None], now: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._now = now
        self._since = now()
        self._work = WeightLoadingWork.CONVERTING
        self._read, self._made = Share(), Share()

    def expect(self, size: int, *, read: bool) -> None:
        """Add `size` bytes of work, to be read from a packed file or not."""
        (self._read if read else self._made).total_bytes += size

    def begin(self, work: WeightLoadingWork) -> None:
        """This is done from now on."""
        self._work = work
        self.say()

    def done(self, size: int) -> None:
        """Count `size` bytes of the present work as done."""
        share, now = self._read if self._work is WeightLoadingWork.READING else self._made, self._now()
        share.done_bytes += size
        share.seconds += now - self._since
        self._since = now
        self.say()

    def say(self) -> None:
        shares = (self._read, self._made)
        done, total = sum(share.done_bytes for share in shares), sum(share.total_bytes for share in shares)
        self._tell(StageFilling(self._work, done, total, seconds_left(shares) or 0.0))
