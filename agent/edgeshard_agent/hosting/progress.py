"""How far a node is with loading, as it is told by what fetches and by what fills."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.nodes.device import StageFilling


@dataclass(slots=True)
class LoadProgress:
    """Bytes fetched, of those that lacked; then how far they are on their way into memory, None before that.

    Whoever loads calls `fetched` on the event loop and `filled` in a thread; each sets values and no more.
    """

    fetched_bytes: int = 0
    total_bytes: int = 0
    filling: StageFilling | None = None

    def fetched(self, fetched_bytes: int, total_bytes: int) -> None:
        self.fetched_bytes, self.total_bytes, self.filling = fetched_bytes, total_bytes, None

    def filled(self, filling: StageFilling) -> None:
        self.filling = filling
