"""A connection of the gateway, with limits.

uvicorn does not bound the time to read a request's head or to write an answer, and h11 reads more
than HTTP allows. A client without a key can open a connection."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.gateway.connections import accepting
from edgeshard.gateway.connections.accepting import Guest, ListeningSocket
from edgeshard.gateway.errors import error_response

STALLED_S = 120.0
"""The seconds without taking anything after which a client is taken for gone."""
MIN_CHUNK_BYTES = 512
"""The least bytes of a body's chunks on average. h11 makes an event of each chunk, which costs some
15 us."""
FREE_CHUNKS = 2048
"""The chunks that may be shorter."""
_HOST_FAULTS = {
    "Missing mandatory Host: header": "The header Host is missing.",
    "Found multiple Host: headers": "There are several headers Host.",
}
"""Errors of h11 that a person who writes a request by hand can act on, in our own words."""
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")


class _StrictLines(ReceiveBuffer):
    """A buffer whose lines end with CR LF. A server that takes a bare LF for an end, too, sees
    other requests than a proxy in front that does not; h11 has no option for it."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        data = bytes(self)
        end = 2 if data.startswith(b"\r\n") else data.find(b"\r\n\r\n")
        if _BARE_LINE_FEED.search(data, 0, len(data) if end < 0 else end):
            raise h11.LocalProtocolError("a line ends without CR")
        return super().maybe_extract_lines()


class TooManyChunksError(h11.RemoteProtocolError):
    """The error of a body in chunks that are too short."""


class _Strict(h11.Connection):
    """A connection that refuses a request with two lengths, by which another may be smuggled (RFC
    9112, 6.3).

    It refuses a body of many short chunks, too, before anything reads it.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(h11.SERVER, most_bytes)
        self._receive_buffer = _StrictLines()
        self._chunks = 0
        self._body_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (
                b"content-length" in names or event.http_version < b"1.1"
            ):
                raise h11.RemoteProtocolError("Transfer-Encoding is combined with another length")
            self._chunks = self._body_bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
                raise TooManyChunksError("the body has too many chunks", error_status_hint=400)
        return event


class HttpConnection(H11Protocol):
    """The class of uvicorn's connections, which all pass `door`."""

    def __init__(self, door: ListeningSocket, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Strict(self.config.h11_max_incomplete_event_size or 1 << 16)
        self.app_state = {**self.app_state, "connection": self}
        self._door = door
        self._guest: Guest | None = None
        self._head: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def showed_key(self, identity: str) -> None:
        """Raises ResourceExhaustedError if the identity has too many connections."""
        if self._guest is not None and not self._door.showed_key(self._guest, identity):
            raise ResourceExhaustedError(
                "connections: this API key has its maximum of connections open, all with a "
                "request: wait "
                "until one ends",
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
        super().connection_lost(exc)  # which continues writing
        _cancel(self._stalled)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy:
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self._abort_after(accepting.HEAD_LIMIT_S)
        self._tell()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._tell()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP, perhaps in the midst of a body, without an answer to the
        request around them, and without a word after an answer."""
        if self._is_busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        fault = sys.exception()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        elif isinstance(fault, TooManyChunksError):
            self._refuse_chunks()
        else:
            super().send_400_response(_HOST_FAULTS.get(str(fault), msg))

    def _refuse_chunks(self) -> None:
        error = InvalidArgumentError(
            f"the body has too many chunks: after the first {FREE_CHUNKS}, send {MIN_CHUNK_BYTES} "
            "bytes or more in "
            "each, or the body with Content-Length",
            field="body",
            reason="TOO_MANY_CHUNKS",
        )
        answer = error_response(error, self.scope["path"])
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=answer.status_code, headers=headers),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
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

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _tell(self) -> None:
        if self._guest is not None:
            self._door.crowd.busy(self._guest.fileno(), self._is_busy)

    def _abort_after(self, limit_s: float) -> asyncio.TimerHandle:
        return self.loop.call_later(limit_s, self._abort)

    def _abort(self) -> None:
        if self._guest is not None:
            self._guest.end()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
