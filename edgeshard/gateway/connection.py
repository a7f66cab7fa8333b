"""A connection of the gateway's. uvicorn bounds neither how many there are nor how long one may take to say what it
wants, or to take an answer; and whoever cannot show a key can open one."""

from __future__ import annotations

import asyncio
import socket
import struct

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
"""One more is closed at once: this process has its boxes' connections, too."""
HEAD_LIMIT_S = 20.0
"""From the first byte of a request, or from the connection's beginning, to the end of its headers."""
STALLED_S = 120.0
"""A client that takes nothing for so long is taken for gone."""

_AT_ONCE = struct.pack("ii", 1, 0)
"""Of SO_LINGER: closing breaks the connection."""


class Connection(H11Protocol):
    """Given to uvicorn as the class of its connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        if len(self.connections) > MOST_CONNECTIONS:
            self._abort()
        else:
            self._head = self._abort_after(HEAD_LIMIT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head)
        super().connection_lost(exc)  # which has writing go on
        _cancel(self._stalled)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self._abort_after(HEAD_LIMIT_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._stalled)
        self._stalled = self._abort_after(STALLED_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stalled)
        self._stalled = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # Closing waits until what was written is taken.
        if self.transport.get_write_buffer_size() and self._stalled is None:
            self._stalled = self._abort_after(STALLED_S)

    def _abort_after(self, limit_s: float) -> asyncio.TimerHandle:
        return self.loop.call_later(limit_s, self._abort)

    def _abort(self) -> None:
        # The system, too, keeps nothing for a client that may never take it.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
