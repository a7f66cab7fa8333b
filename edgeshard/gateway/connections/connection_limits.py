"""The choice of connections that stay if there are too many: a connection with a key precedes one
without. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass

MOST_CONNECTIONS = 512
"""The most connections of all; this process has its nodes' connections, too."""
MOST_KEYLESS = 384
"""The most connections from one address without a key; one more costs the oldest of them its place.
Some hundred may be there for a moment: a program that begins as many requests at once dials first
and speaks then."""
MOST_OF_ONE = 384
"""The most connections of one identity, so that no key has them all."""


@dataclass(slots=True)
class _Guest:
    """A connection from `address`; `identity` is None until it shows a key. `is_busy` while it has
    a request."""

    address: str
    identity: str | None = None
    is_busy: bool = False


class Crowd:
    """All connections of a listener, by numbers that the caller chooses, in the order of their
    arrival.

    Methods return the number of a connection that must go now: the caller ends it and calls `left`.
    """

    def __init__(
        self,
        most: int = MOST_CONNECTIONS,
        most_keyless: int = MOST_KEYLESS,
        most_of_one: int = MOST_OF_ONE,
    ) -> None:
        self._most = most
        self._most_strangers = most_keyless
        self._most_of_one = most_of_one
        self._guests: dict[int, _Guest] = {}
        self._strangers: Counter[str] = Counter()
        self._known: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._guests)

    def came(self, number: int, address: str) -> int | None:
        """The connection to close for a new one; None if there is a free place.

        It is a stranger's if there is one, else an idle connection of the identity with the most,
        else the new one.
        """
        self._guests[number] = _Guest(address)
        self._strangers[address] += 1
        if self._strangers[address] > self._most_strangers:
            return self._oldest_stranger(address)
        if len(self._guests) <= self._most:
            return None
        others = self._strangers.copy()
        others[address] -= 1
        most, crowded = max(((count, where) for where, count in others.items()), default=(0, ""))
        if most > 0:
            return self._oldest_stranger(crowded)
        return _first(self._idle_of_most(), number)

    def showed_key(self, number: int, identity: str) -> int | None:
        """The connection to close if this identity has too many: its oldest idle one, else this
        one."""
        guest = self._guests.get(number)
        if guest is None or guest.identity == identity:
            return None
        self._uncount(guest)
        guest.identity = identity
        self._known[identity] += 1
        if not identity or self._known[identity] <= self._most_of_one:
            return None
        return _first(self._idle_of(identity), number)

    def busy(self, number: int, is_busy: bool) -> None:
        """Note whether a connection has a request that is not answered yet."""
        if (guest := self._guests.get(number)) is not None:
            guest.is_busy = is_busy

    def left(self, number: int) -> None:
        """Forget a connection that has ended."""
        if (guest := self._guests.pop(number, None)) is not None:
            self._uncount(guest)

    def _uncount(self, guest: _Guest) -> None:
        counts, name = self._strangers, guest.address
        if guest.identity is not None:
            counts, name = self._known, guest.identity
        counts[name] -= 1
        if not counts[name]:
            del counts[name]

    def _oldest_stranger(self, address: str) -> int:
        return next(
            n
            for n, guest in self._guests.items()
            if guest.identity is None and guest.address == address
        )

    def _idle_of_most(self) -> int | None:
        idle = (self._idle_of(identity) for identity, _ in self._known.most_common())
        return next((number for number in idle if number is not None), None)

    def _idle_of(self, identity: str) -> int | None:
        idle = (
            n
            for n, guest in self._guests.items()
            if guest.identity == identity and not guest.is_busy
        )
        return next(idle, None)


def neighbourhood(address: str) -> str:
    """The network that counts as one address: of IPv6 the 64 bits of one customer."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped or ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return address


def _first(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
