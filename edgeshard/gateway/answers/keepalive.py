"""Streams that are never silent for long: proxies and clients close a connection without bytes.

A stream begins with its first event, so that an error until then has its own status. If that event
takes longer than `MAX_SILENCE_S`, the stream begins without it, and an error is a part of the
stream. A stream without events for that long sends a filler, which has no meaning for its client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeshard.domain.errors import CancelledRequestError, EdgeShardError
from edgeshard.gateway.answers.answers import unless_left

MAX_SILENCE_S = 14.0
"""The longest time without a byte: a second less than the promised one, for a busy machine."""
COMMENT = ":\n\n"
"""The filler of a stream of server-sent events: a comment."""


@dataclass(frozen=True, slots=True)
class StreamForm:
    """The form of a requested stream. `failed` makes the text of an error before the first
    event."""

    media_type: str
    failed: Callable[[EdgeShardError], str]
    filler: Callable[[], str] = lambda: COMMENT
    requested_s: float = field(default_factory=time.monotonic)
    """When the request was read, in seconds of the steady clock."""


Route = Callable[[Request], Awaitable[Response]]


def in_time(route: Route) -> Route:
    """A route whose stream begins within `MAX_SILENCE_S`; it sets `request.state.stream_form` if it
    makes one."""

    @wraps(route)
    async def answer(request: Request) -> Response:
        response = asyncio.ensure_future(route(request))
        try:
            while not response.done():
                form: StreamForm | None = getattr(request.state, "stream_form", None)
                began_s = time.monotonic() if form is None else form.requested_s
                left_s = began_s + MAX_SILENCE_S - time.monotonic()
                if form is not None and left_s <= 0:
                    return _Late(response, form)
                await asyncio.wait({response}, timeout=left_s)
        except asyncio.CancelledError:
            response.cancel()
            raise
        return response.result()

    return answer


class StreamedResponse(Response):
    """A response that is written part by part, until the client leaves, with fillers if there is no
    part for long."""

    def __init__(self, parts: AsyncGenerator[bytes, None], form: StreamForm) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, headers=headers, media_type=form.media_type)
        del self.headers["content-length"]
        self.parts = parts
        self._form = form
        self._sent_s = form.requested_s
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._write(send))
        except CancelledRequestError:
            return  # The client has left, so an error has no reader.
        finally:
            await self.end()

    async def end(self) -> None:
        """End the request, however far its parts were read: also if reading them has not begun."""
        await self.parts.aclose()

    async def _write(self, send: Send) -> None:
        filling = asyncio.ensure_future(self._fill(send))
        try:
            async with aclosing(self.parts) as parts:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                async for part in parts:
                    await self._send(send, part)
        finally:
            filling.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, part: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": part, "more_body": True})
        self._sent_s = time.monotonic()
        self._is_sending = False

    async def _fill(self, send: Send) -> None:
        """Send a filler each time that nothing was sent for `MAX_SILENCE_S`.

        A client that does not read what was sent gets none.
        """
        while True:
            silent_s = time.monotonic() - self._sent_s
            if silent_s < MAX_SILENCE_S:
                await asyncio.sleep(MAX_SILENCE_S - silent_s)
            elif self._is_sending:
                await asyncio.sleep(MAX_SILENCE_S)
            else:
                await self._send(send, self._form.filler().encode())


class _Late(StreamedResponse):
    """A response that was not there in time: a filler, and its parts once it is there."""

    def __init__(self, response: asyncio.Future[Response], form: StreamForm) -> None:
        super().__init__(self._awaited(), form)
        self._response = response

    async def _awaited(self) -> AsyncGenerator[bytes, None]:
        yield self._form.filler().encode()
        try:
            streamed = await self._response
        except EdgeShardError as error:
            yield self._form.failed(error).encode()
            return
        assert isinstance(streamed, StreamedResponse)
        async with aclosing(streamed.parts) as parts:
            async for part in parts:
                yield part

    async def end(self) -> None:
        """Cancel a response that is not there yet. One that is there may not have been read
        from."""
        await super().end()
        self._response.cancel()
        await asyncio.wait((self._response,))
        if self._response.cancelled() or self._response.exception() is not None:
            return
        streamed = self._response.result()
        assert isinstance(streamed, StreamedResponse)
        await streamed.end()
