"""Equal shares of what is served: by priority, then who was served least, then who came first. Pure.

Each client has a counter of what it was served, tokens or anything else, and the lowest goes first.
(docs/papers.md#fair-shares)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """What waits for its turn: of whom, how urgent, and the number of its coming."""

    @property
    def client(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival(self) -> int: ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


class ServedTokens:
    """Tokens served to each client that has requests. A client that comes anew begins level with the least served."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()

    def open(self, client: str) -> None:
        """A request of the client came."""
        if client not in self._served:
            self._served[client] = min(self._served.values(), default=0)
        self._requests[client] += 1

    def close(self, client: str) -> None:
        """A request of the client ended."""
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client], self._served[client]

    def charge(self, client: str, tokens: int) -> None:
        self._served[client] += tokens

    def turn(self, item: Waiting) -> tuple[int, int, int]:
        """Smaller goes first."""
        return (-item.priority, self._served[item.client], item.arrival)

    def first(self, items: Iterable[WaitingT]) -> WaitingT | None:
        return min(items, key=self.turn, default=None)
