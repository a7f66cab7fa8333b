"""A connection of the gateway's. uvicorn bounds neither how long one may take to say what it wants, nor to take an
answer, and h11 reads more than HTTP allows; and whoever cannot show a key can open one."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.gateway.connections import accepting
from edgeshard.gateway.connections.accepting import Door, Guest

STALLED_S = 120.0
"""A client that takes nothing for so long is taken for gone."""
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")


class _StrictLines(ReceiveBuffer):
    """Lines end with CR LF. Who takes a bare LF for an end, too, sees other requests than a proxy in front that does
    not; h11 has no option for it."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        data = bytes(self)
        end = 2 if data.startswith(b"\r\n") else data.find(b"\r\n\r\n")
        if _BARE_LINE_FEED.search(data, 0, len(data) if end < 0 else end):
            raise h11.LocalProtocolError("a line ends without CR")
        return super().maybe_extract_lines()


class _Strict(h11.Connection):
    """Refuses a request whose length is said twice: by RFC 9112, 6.3, it may be an attempt to smuggle another."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(h11.SERVER, most_bytes)
        self._receive_buffer = _StrictLines()

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("Transfer-Encoding stands beside another length")
        return event


class Connection(H11Protocol):
    """Given to uvicorn as the class of its connections, all of which came through `door`."""

    def __init__(self, door: Door, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Strict(self.config.h11_max_incomplete_event_size or 1 << 16)
        self.app_state = {**self.app_state, "connection": self}
        self._door = door
        self._guest: Guest | None = None
        self._head: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def showed_key(self, identity: str) -> None:
        """Raises ResourceExhaustedError where the identity has too many connections."""
        if self._guest is not None and not self._door.showed_key(self._guest, identity):
            raise ResourceExhaustedError(
                "connections: this API key has as many open as it may, all with a request: wait until one ends",
                field="connections",
                reason="TOO_MANY_CONNECTIONS",
                retry_after_s=1.0,
            )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._guest = self._door.guest_of(transport)
        self._guest.transport = transport
        self._head = self._guest.deadline

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head)
        super().connection_lost(exc)  # which has writing go on
        _cancel(self._stalled)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy:
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self._abort_after(accepting.HEAD_LIMIT_S)
        self._tell(is_busy)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._tell(self.cycle is not None and not self.cycle.response_complete)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, perhaps in the midst of a body: nothing is said of the request that it belongs to, and
        nothing after an answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

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

    def _tell(self, is_busy: bool) -> None:
        if self._guest is not None:
            self._door.crowd.busy(self._guest.fileno(), is_busy)

    def _abort_after(self, limit_s: float) -> asyncio.TimerHandle:
        return self.loop.call_later(limit_s, self._abort)

    def _abort(self) -> None:
        if self._guest is not None:
            self._guest.end()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
