"""The watch of the link to the next stage. Pure: times are the sender's monotonic seconds, as
values.

`next_tick` is the beat of a process's watches: all together, since a wake costs more than a watch's
work in it.


The receiver of a link sends a keepalive (beacon) every `BEACON_S`. A link is suspect in three
cases. No beacon arrives for `SUSPECT_S`. Sent data makes no progress for the same time. A link that
has worked is not open again by then; a link that has not worked is suspect if it gets no answer for
`FIRST_S`. A node that is not ready yet answers, with a refusal. Delays of the sender's own loop do
not count: a node that itself stood still suspects no other.

A head and its coordinator also watch each other with it, over the head's stream, on which only
beacons are expected.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from edgeshard.domain.requests.link import LinkBeacon

BEACON_S = 0.25
SUSPECT_S = 2.0
FIRST_S = 5.0
LONGEST_S = 10.0
"""The patience with a suspect link doubles up to this, since it may only be slow."""
TICK_S = 0.1
ALIVE = LinkBeacon(0, 0)
"""A beacon that reports nothing of the sent data."""


@dataclass(frozen=True, slots=True)
class LinkFault:
    """A reason to drop the stream and to dial the receiver over a new connection. `is_new`: an
    incident begins."""

    why: str
    is_new: bool


class LinkWatch:
    """Judges a link by its events and by `tick`, every `TICK_S`. `beacon` reports the end of an
    incident.

    A report is outstanding if a step was sent, at least in part, that the receiver has not reported
    as received.
    """

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._heard_at = now
        """The time at which the receiver last sent something, or got another chance."""
        self._moved_at = now
        """The time at which the receiver last reported progress, or since which a report is
        outstanding."""
        self._is_open = False
        self._has_worked = False
        self._faults = 0
        """Faults of the incident under way."""
        self._incident = False
        self._sent = self._next_step = self._received_bytes = 0
        """The step after the last one sent, and the receiver's report, both for the open stream."""

    def welcomed(self, next_step: int, now: float) -> None:
        """Note that a stream is open, and that the receiver wants `next_step`."""
        self._is_open = self._has_worked = True
        self._heard_at = self._moved_at = now
        self._sent = self._next_step = next_step
        self._received_bytes = 0

    def sent(self, step: int, now: float) -> None:
        """Note that the first bytes of a step are about to be written."""
        if not self._owes:
            self._moved_at = now
        self._sent = max(self._sent, step + 1)

    def beacon(self, beacon: LinkBeacon, now: float) -> bool:
        """Note a report of the receiver. Returns whether an incident is over: the receiver gets the
        sent data."""
        self._heard_at = now
        moved = beacon.received_bytes > self._received_bytes or beacon.next_step > self._next_step
        if moved:
            self._moved_at = now
            self._received_bytes, self._next_step = beacon.received_bytes, beacon.next_step
        over = self._incident and (moved or not self._owes)
        if over:
            self._incident, self._faults = False, 0
        return over

    def closed(self, answered: bool, now: float) -> None:
        """Note the end of the stream or of an attempt to open one; `answered` if the receiver
        itself ended it."""
        if answered:
            self._heard_at = now
        self._is_open = False

    def tick(self, now: float) -> LinkFault | None:
        """The fault at `now`, reported once: from then on the next attempt is watched."""
        late = max(0.0, now - self._ticked_at - TICK_S)
        self._ticked_at = now
        self._heard_at = min(now, self._heard_at + late)
        self._moved_at = min(now, self._moved_at + late)
        patience = min((SUSPECT_S if self._has_worked else FIRST_S) * 2.0**self._faults, LONGEST_S)
        why = self._why(now, patience)
        if why is None:
            return None
        is_new, self._incident = not self._incident, True
        self._faults += 1
        self._is_open, self._heard_at = False, now
        return LinkFault(why, is_new)

    @property
    def _owes(self) -> bool:
        return self._sent > self._next_step

    def _why(self, now: float, patience: float) -> str | None:
        if now - self._heard_at >= patience:
            return (
                f"{'nothing came back' if self._is_open else 'no stream could be opened'} for "
                f"{patience:.1f} s"
            )
        if self._is_open and self._owes and now - self._moved_at >= patience:
            return f"nothing that was sent was received for {patience:.1f} s"
        return None


async def next_tick() -> None:
    """Sleep for about `TICK_S` at most, until the event loop's clock has a multiple of it."""
    delay_s = TICK_S - asyncio.get_running_loop().time() % TICK_S
    # A remainder may be next to nothing if the time is a multiple except for its last bit.
    await asyncio.sleep(delay_s if delay_s > TICK_S / 100 else delay_s + TICK_S)
