"""The gateway's listening socket: every connection is counted from the moment it is accepted,
before any TLS, and has a limited time for its request's head."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

from edgeshard.gateway.connections.connection_limits import Crowd, neighbourhood

HEAD_LIMIT_S = 10.0
"""The seconds from a connection's beginning, or from the first byte of a later request, to the end
of its headers."""
_AT_ONCE = 16
"""The connections that are accepted at once, before older ones have their turn: a flood must not
displace a connection before its first bytes were read."""
_BREAKING = struct.pack("ii", 1, 0)
"""The value of SO_LINGER by which closing breaks the connection."""


class Guest(socket.socket):
    """A connection that was accepted by a `ListeningSocket`."""

    door: ListeningSocket
    transport: asyncio.Transport | None = None
    deadline: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Break the connection; the system, too, keeps nothing for a client that may never take
        it."""
        if self.fileno() < 0:
            return
        self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _BREAKING)
        if self.transport is not None:
            self.transport.abort()
        else:  # still in its handshake, whose reader finds the end
            with suppress(OSError):  # the other side was quicker
                self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.door.left(self)
        super().close()


class ListeningSocket(socket.socket):
    """The listening socket. A `Crowd` decides which connections stay."""

    def __init__(self, family: int, kind: int, number: int) -> None:
        super().__init__(family, kind, number)
        self.crowd = Crowd()
        self._guests: dict[int, Guest] = {}
        self._accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, as every socket does, in the event loop."""
        loop = asyncio.get_running_loop()
        if self._accepted >= _AT_ONCE:
            raise BlockingIOError
        if not self._accepted:
            loop.call_soon(self._turn_over)
        self._accepted += 1
        accepted, address = super().accept()
        guest = Guest(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        guest.door = self
        guest.deadline = loop.call_later(HEAD_LIMIT_S, guest.end)
        self._guests[guest.fileno()] = guest
        self._end(self.crowd.came(guest.fileno(), neighbourhood(address[0])))
        return guest, address

    def guest_of(self, transport: asyncio.BaseTransport) -> Guest:
        """The connection under a transport, also under one of TLS."""
        return self._guests[transport.get_extra_info("socket").fileno()]

    def showed_key(self, guest: Guest, identity: str) -> bool:
        """Note a request with the key of `identity`. False if that has too many connections, all
        busy."""
        going = self.crowd.showed_key(guest.fileno(), identity)
        if going == guest.fileno():
            return False
        self._end(going)
        return True

    def left(self, guest: Guest) -> None:
        """Forget a connection that is closed."""
        number = guest.fileno()
        if self._guests.get(number) is guest:
            del self._guests[number]
            self.crowd.left(number)

    def _end(self, number: int | None) -> None:
        if number is not None and (guest := self._guests.get(number)) is not None:
            guest.end()

    def _turn_over(self) -> None:
        self._accepted = 0
