"""The client's end of a listener: one stream brings the tokens of all its requests.

A request is still a call of its own, which refuses, starts, cancels and ends it. The coordinator
chooses whether its tokens arrive by the call or by the listener, and reports that with its start. A
coordinator that knows no listeners ignores them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from itertools import chain

import grpc

from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.requests.generation import (
    UNREAD_TOKENS,
    Finished,
    Listener,
    ListenerHello,
    ListenerMessage,
    Token,
    TokensRead,
)
from edgeshard.proto.v1 import inference_pb2 as pb
from edgeshard.wire.listening import heard_from_wire, listener_message_to_wire

# The coordinator gets reports of half a window at once: an ordinary answer is shorter and costs no
# message.
_TOLD_TOKENS = UNREAD_TOKENS // 2

# A call whose connection is lost ends within this time of the listener.
_CALL_ENDS_S = 1.0

Generate = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
Listen = grpc.aio.StreamStreamCall[pb.ListenRequest, pb.ListenResponse]


class Inbox:
    """The tokens and the end of one request, as its listener receives them. For one reader."""

    def __init__(self, stream: ListenerStream, number: int) -> None:
        self.listener = Listener(stream.id, number)
        self.broken: EdgeShardError | None = None
        """Why no more events will arrive; earlier ones can still be taken."""
        self._stream = stream
        self._call: Generate | None = None
        self._events: deque[Token | Finished | EdgeShardError] = deque()
        self._wake = asyncio.Event()
        self._read = 0

    def put(self, event: Token | Finished | EdgeShardError) -> None:
        self._events.append(event)
        self._wake.set()

    def break_off(self, error: EdgeShardError) -> None:
        self.broken = error
        self._wake.set()

    def watch(self, call: Generate) -> None:
        """Hear of the end of the request's call, too."""
        self._call = call
        call.add_done_callback(lambda _: self._wake.set())

    async def next(self) -> Token | Finished:
        """The next event. Raises the error that the request ended with, AioRpcError if its call has
        ended."""
        call = self._call
        assert call is not None
        while True:
            if self._events:
                return self._take()
            if self.broken is not None:
                # A lost connection ends the call too, and the call's error has more details.
                await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=_CALL_ENDS_S)
            if call.done():
                await call.read()  # raises unless it ended well, after the last event
            if self.broken is not None:
                raise self.broken
            await self._wake.wait()
            self._wake.clear()

    def _take(self) -> Token | Finished:
        event = self._events.popleft()
        if isinstance(event, EdgeShardError):
            raise event
        self._read += 1
        if self._read >= _TOLD_TOKENS:
            self._stream.tell(TokensRead(self.listener.number, self._read))
            self._read = 0
        return event

    def close(self) -> None:
        self._stream.forget(self.listener.number)


class ListenerStream:
    """One Listen stream. It is `over` when it has ended; a later request wants a new one."""

    def __init__(self, call: Listen, target: str) -> None:
        self.id = uuid.uuid4().hex
        self.over = False
        self.unknown = False
        """Whether the coordinator knows no listeners."""
        self._call = call
        self._target = target
        self._inboxes: dict[int, Inbox] = {}
        self._last_number = 0
        self._untold: deque[ListenerMessage] = deque([ListenerHello(self.id)])
        self._untold_wake = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._write())]

    def open_inbox(self) -> Inbox:
        self._last_number += 1
        inbox = self._inboxes[self._last_number] = Inbox(self, self._last_number)
        return inbox

    def forget(self, number: int) -> None:
        self._inboxes.pop(number, None)

    def tell(self, message: TokensRead) -> None:
        self._untold.append(message)
        self._untold_wake.set()

    async def close(self) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        why = "the coordinator ended it"
        try:
            while isinstance(message := await self._call.read(), pb.ListenResponse):
                self._deliver(message)
        except grpc.aio.AioRpcError as error:
            self.unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED
            why = error.details() or error.code().name
        except (EdgeShardError, grpc.aio.UsageError) as error:
            why = str(error) or type(error).__name__
        finally:
            self.over = True
            self._untold_wake.set()
            self._call.cancel()
            for inbox in list(self._inboxes.values()):
                failure = f"the stream of tokens from {self._target} broke: {why}"
                inbox.break_off(UnavailableError(failure, retry_after_s=1.0))

    def _deliver(self, message: pb.ListenResponse) -> None:
        batch = heard_from_wire(message)
        for number, event in chain(batch.tokens, batch.ends):
            inbox = self._inboxes.get(number)
            if inbox is not None:  # otherwise its reader has left
                inbox.put(event)

    async def _write(self) -> None:
        try:
            while not self.over:
                while self._untold:
                    await self._call.write(listener_message_to_wire(self._untold.popleft()))
                self._untold_wake.clear()
                await self._untold_wake.wait()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the reading end raises the reason
