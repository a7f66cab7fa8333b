"""The size of a step's parts: as much as the link carries in a quarter of a second. Pure; times come in as values.

A part counts as received when all of it is, so on a slow link large parts would look like no progress at all.
"""

from __future__ import annotations

from collections import deque

from edgeshard.wire.frames import LEAST_PART_BYTES, PART_BYTES

PART_S = 0.25
FIRST_PART_BYTES = 64 << 10
"""While nothing is known: two seconds for a part of it would be 0.26 Mbit/s."""


class PartSize:
    """`bytes` is the size for the next step; any thread may read it.

    The bytes that arrived between the start of a step and the receiver's report are the least that
    the link carries, because that time includes all waiting. So a step can always enlarge the
    parts. It makes them smaller if it had several: then its time was the link's.
    """

    def __init__(self, window: int) -> None:
        self.bytes = FIRST_PART_BYTES
        self._window = window
        self._sizes: dict[int, int] = {}
        self._under_way: deque[tuple[int, float]] = deque()

    def note(self, step: int, size_bytes: int) -> None:
        """A step with `size_bytes` bytes of tensor will be sent."""
        self._sizes[step] = size_bytes
        self._sizes.pop(step - 2 * self._window, None)

    def restarted(self) -> None:
        """A new stream is open; it is unknown how much of a step the former one carried."""
        self._under_way.clear()

    def sent(self, step: int, now: float) -> None:
        """The step's first bytes are about to be written."""
        if not self._under_way or step > self._under_way[-1][0]:
            self._under_way.append((step, now))

    def received(self, next_step: int, now: float) -> None:
        """The receiver has all steps before `next_step`."""
        while self._under_way and self._under_way[0][0] < next_step:
            step, began_at = self._under_way.popleft()
            size = self._sizes.get(step, 0)
            carried = int(size * PART_S / max(now - began_at, 1e-6))
            if carried > self.bytes or size > self.bytes:
                self.bytes = min(max(carried, LEAST_PART_BYTES), PART_BYTES)
