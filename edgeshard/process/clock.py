"""The machine's clock."""

from __future__ import annotations

import time


class SystemClock:
    """Monotonic seconds of this machine; see `edgeshard.domain.clock.Clock`."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()
