"""The order of requests: by priority, then the client that was served least, then the request that
came first. Pure.

Clients of one priority get equal shares of the tokens run: each has a counter of tokens it was
served, and the lowest goes first. (docs/papers/agent.md#fair-shares)
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Container, Iterable
from typing import Protocol, TypeVar

from edgeshard_agent.scheduler.sequence import Sequence


class Waiting(Protocol):
    """A thing that waits for its turn: its client, its priority, and the number of its arrival."""

    client: str
    arrival: int

    @property
    def priority(self) -> int: ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


class ServedTokens:
    """Tokens served to each client that has requests. A new client begins level with the least
    served."""

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


class FairQueue:
    """Requests not admitted yet, one queue for each priority and client, in the order they came."""

    def __init__(self, served_tokens: ServedTokens) -> None:
        self._served_tokens = served_tokens
        self._queues: dict[tuple[int, str], list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def put(self, sequence: Sequence) -> None:
        """A preempted request returns to its place, before its client's later requests."""
        queue = self._queues.setdefault((sequence.priority, sequence.client), [])
        insort(queue, sequence, key=lambda other: other.arrival)

    def first(self, behind: Container[str] = ()) -> Sequence | None:
        """The request whose turn it is; a request of a client in `behind` only if no other one
        waits."""
        firsts = [queue[0] for queue in self._queues.values()]
        return self._served_tokens.first(
            [one for one in firsts if one.client not in behind] or firsts
        )

    def remove(self, sequence: Sequence) -> bool:
        """Take a request out; False when it is not waiting."""
        key = (sequence.priority, sequence.client)
        queue = self._queues.get(key, [])
        if sequence not in queue:
            return False
        queue.remove(sequence)
        if not queue:
            del self._queues[key]
        return True
