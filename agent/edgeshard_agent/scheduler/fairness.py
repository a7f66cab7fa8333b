"""Which request is next: by priority, then of the client whose tokens were run least, then who came first. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Container

from edgeshard.domain.fair_shares import ServedTokens
from edgeshard_agent.scheduler.sequence import Sequence


class FairQueue:
    """Requests not admitted yet, one queue for each priority and client, in the order they came."""

    def __init__(self, served_tokens: ServedTokens) -> None:
        self._served_tokens = served_tokens
        self._queues: dict[tuple[int, str], list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def put(self, sequence: Sequence) -> None:
        """A preempted request goes back to its place, before those of its client that came later."""
        queue = self._queues.setdefault((sequence.priority, sequence.client), [])
        insort(queue, sequence, key=lambda other: other.arrival)

    def first(self, behind: Container[str] = ()) -> Sequence | None:
        """Whose turn it is; that of a client in `behind` only where no other one waits."""
        firsts = [queue[0] for queue in self._queues.values()]
        return self._served_tokens.first([one for one in firsts if one.client not in behind] or firsts)

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
