"""Time as a dependency. The implementation that reads the machine's clock is in
`edgeshard.process.clock`."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds from an arbitrary origin."""
        ...
