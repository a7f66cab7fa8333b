"""The order of questions that are answered one at a time: first the identity that has used least.
Pure.

The cost of an answer is known once it is there, and is charged then. A new identity begins level
with the one that has used least. So an identity with few questions waits for one answer of
another's, however many questions the other has. (docs/papers/agent.md#fair-shares)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgeshard.domain.errors import ResourceExhaustedError

ItemT = TypeVar("ItemT")

RETRY_S = 1.0


@dataclass(slots=True)
class _Line(Generic[ItemT]):
    """Questions of one identity that wait, in the order it came, each with its bytes."""

    served: float
    waiting: deque[tuple[ItemT, int]] = field(default_factory=deque)
    size: int = 0
    running: int = 0


class Turns(Generic[ItemT]):
    """At most `most` items wait, of `most_bytes` together. `charge` takes a cost in any unit,
    always the same."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lines: dict[str, _Line[ItemT]] = {}

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def put(self, identity: str, size: int, item: ItemT) -> list[ItemT]:
        """Have an item of `size` bytes wait. Returns the items that it displaces: the newest ones
        of the identity that has the most.

        Raises ResourceExhaustedError if it is this identity that would have the most.
        """
        victims: list[ItemT] = []
        while len(self) >= self._most or self._bytes() + size > self._most_bytes:
            line = self._lines.get(identity)
            own = (
                self._share(line.size + size, len(line.waiting) + 1)
                if line
                else self._share(size, 1)
            )
            shares = [
                (self._share(other.size, len(other.waiting)), who)
                for who, other in self._lines.items()
            ]
            largest, heaviest = max(shares, default=(0.0, identity))
            if heaviest == identity or own >= largest:
                raise overloaded()
            victims.append(self._drop_newest(heaviest))
        if identity not in self._lines:
            self._lines[identity] = _Line(
                min((line.served for line in self._lines.values()), default=0.0)
            )
        line = self._lines[identity]
        line.waiting.append((item, size))
        line.size += size
        return victims

    def waiting(self) -> list[str]:
        """The identities that have something waiting."""
        return [who for who, line in self._lines.items() if line.waiting]

    def take(self, may: Callable[[str], bool] = lambda identity: True) -> tuple[str, ItemT] | None:
        """The next item of an identity that `may` have its turn, and whose it is; `charge` ends its
        turn."""
        waiting = [who for who in self.waiting() if may(who)]
        if not waiting:
            return None
        identity = min(waiting, key=lambda who: self._lines[who].served)
        line = self._lines[identity]
        item, size = line.waiting.popleft()
        line.size -= size
        line.running += 1
        return identity, item

    def charge(self, identity: str, cost: float) -> None:
        """An item that was taken is done."""
        line = self._lines[identity]
        line.served += cost
        line.running -= 1
        self._forget(identity)

    def remove(self, identity: str, item: ItemT) -> bool:
        """Remove an item whose caller left; False if it is not waiting."""
        line = self._lines.get(identity)
        for place, (other, size) in enumerate(line.waiting if line else ()):
            if other is item and line is not None:
                del line.waiting[place]
                line.size -= size
                self._forget(identity)
                return True
        return False

    def drain(self) -> list[ItemT]:
        """Take out whatever waits."""
        items = [item for line in self._lines.values() for item, _ in line.waiting]
        for identity, line in list(self._lines.items()):
            line.waiting.clear()
            line.size = 0
            self._forget(identity)
        return items

    def _bytes(self) -> int:
        return sum(line.size for line in self._lines.values())

    def _share(self, size: int, count: int) -> float:
        return max(size / self._most_bytes, count / self._most)

    def _drop_newest(self, identity: str) -> ItemT:
        line = self._lines[identity]
        item, size = line.waiting.pop()
        line.size -= size
        self._forget(identity)
        return item

    def _forget(self, identity: str) -> None:
        line = self._lines[identity]
        if not line.waiting and not line.running:
            del self._lines[identity]


def overloaded() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        "the queue of prompts is full: try again", reason="OVERLOADED", retry_after_s=RETRY_S
    )
