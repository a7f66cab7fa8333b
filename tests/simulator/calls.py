"""A call without gRPC: the client's end, which a stub returns, and the server's, which is a
handler's context."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from edgeshard.rpc.denials import Denials
from edgeshard.rpc.server import GuardInterceptor
from tests.simulator.loop import Process
from tests.simulator.network import (
    UNAVAILABLE,
    Connection,
    Network,
    Pipe,
    Said,
    Status,
    kind_of,
    say,
)

if TYPE_CHECKING:
    from tests.simulator.channel import SimChannel

OK = grpc.StatusCode.OK
_HEADERS = "headers"
_CANCEL = "cancel"
_METADATA = "metadata"
_HALF_CLOSE = "half-close"


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    response: Callable[[bytes], Any]


class Call:
    """Both ends of one call. The client's end is the stub's result; the server's is its handler's
    context."""

    def __init__(self, channel: SimChannel, method: Method, timeout: float | None) -> None:
        self.channel = channel
        self.network = channel.network
        self.method = method
        self.number = channel.next_call()
        self.connection: Connection | None = None
        loop = channel.network.loop
        self._deadline = None if timeout is None else loop.now + max(0.0, timeout)
        self._status: Status | None = None
        self._cancelled = False
        self._metadata = False
        self._incoming: deque[bytes] = deque()
        self._reader: asyncio.Future[Any] | None = None
        self._waiting: list[asyncio.Future[Any]] = []
        self._callbacks: list[Callable[[Any], None]] = []
        self._unsent: list[tuple[str, Said]] = []
        self._closing = False
        self.context: ServerContext | None = None
        if timeout is not None:
            channel.process.call_later(max(0.0, timeout), self._too_late)
        channel.dial(self)

    # The channel's side

    def opened(self, connection: Connection) -> None:
        if self._status is not None:
            return
        self.connection = connection
        connection.calls[self.number] = self
        self.up = Pipe(connection, True, self._server_got)
        self.down = Pipe(connection, False, self._client_got)
        self.up.send(_HEADERS)
        unsent, self._unsent = self._unsent, []
        for kind, said in unsent:
            self._say(kind, said)
        if self._closing:
            self.up.send(_HALF_CLOSE)

    def ended(self, status: Status) -> None:
        """The client receives the end."""
        if self._status is not None:
            return
        local = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
        if not status[2] and (
            status[0] in local or (status[0] is UNAVAILABLE and self.network.dice.random() < 0.5)
        ):
            self._incoming.clear()  # gRPC may lose messages it had not handed out
        self._status = status
        if self.connection is not None:
            self.connection.calls.pop(self.number, None)
        self._wake_reader()
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        for callback in self._callbacks:
            self.network.loop.call_soon(callback, self, context=self.channel.process.context)

    def lost(self) -> None:
        """The server hears that the connection broke."""
        if self.context is not None:
            self.context.gone()

    def _too_late(self) -> None:
        if self._status is None:
            self._tell_cancel()
            self.ended((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ()))

    def _tell_cancel(self) -> None:
        if self.connection is not None:
            self.up.send(_CANCEL)

    def _say(self, kind: str, said: Said) -> None:
        connection = self.connection
        assert connection is not None
        say(connection, self.up, kind, said)

    # Arriving messages

    def _server_got(self, item: Any) -> None:
        if item is _HEADERS:
            assert self.connection is not None
            self.context = ServerContext(self, self.connection.services, self._deadline)
            self.context.begin()
        elif self.context is None:
            return
        elif item is _CANCEL:
            self.context.gone()
        elif item is _HALF_CLOSE:
            self.context.got(None)
        else:
            self.context.got(item.data)

    def _client_got(self, item: Any) -> None:
        if self._status is not None:
            return
        if item is _METADATA:
            self._metadata = True
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
        elif isinstance(item, Said):
            self._metadata = True
            self._incoming.append(item.data)
            self._wake_reader()
        else:
            self.ended(item)

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    # The interface that the product calls

    def done(self) -> bool:
        return self._status is not None and not self._incoming

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._cancelled = True
        self._tell_cancel()
        self.ended((grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ()))
        return True

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._status is not None:
            self.network.loop.call_soon(callback, self)
        else:
            self._callbacks.append(callback)

    async def read(self) -> Any:
        try:
            while not self._incoming and self._status is None:
                if self._reader is None:
                    self._reader = self.network.loop.create_future()
                await asyncio.shield(self._reader)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._incoming:
            return self.method.response(self._incoming.popleft())
        self._raise_unless_ok()
        return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        said = Said(message.SerializeToString())
        if self.connection is None:
            self._unsent.append((kind_of(message), said))
            return
        self._say(kind_of(message), said)
        try:
            await self.up.room()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self) -> None:
        self._closing = True
        if self.connection is not None:
            self.up.send(_HALF_CLOSE)

    async def code(self) -> grpc.StatusCode:
        await self._ended()
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        await self._ended()
        assert self._status is not None
        return self._status[1]

    async def trailing_metadata(self) -> Any:
        await self._ended()
        assert self._status is not None
        return grpc.aio.Metadata(*self._status[2])

    async def initial_metadata(self) -> Any:
        while not self._metadata and self._status is None:
            await self._wait()
        return grpc.aio.Metadata()

    async def _ended(self) -> None:
        while self._status is None:
            await self._wait()

    async def _wait(self) -> None:
        future = self.network.loop.create_future()
        self._waiting.append(future)
        await future

    def _raise_unless_ok(self) -> None:
        assert self._status is not None
        code, details, trailing = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not OK:
            raise grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details
            )

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def _only(self) -> Any:
        answer = await self.read()
        if answer is grpc.aio.EOF:
            raise AssertionError("a call of one answer ended without it")
        return answer

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()


class ServerContext:
    """The server's end of a call: the context of a handler."""

    def __init__(
        self, call: Call, server: SimServer, deadline: float | None, ghost: bool = False
    ) -> None:
        self.call = call
        self.server = server
        self.deadline = deadline
        self.ghost = ghost
        self._network = call.network
        self._queue: deque[bytes | None] = deque()
        self._reader: asyncio.Future[Any] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._task: asyncio.Task[Any] | None = None
        self._over = False
        self._gone = False
        self._request: Any = None

    def begin(self) -> None:
        handler = self.server.handler(self.call.method.path)
        if handler is None:
            self._send((grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ()))
            return
        self._request = handler.request_deserializer
        self._task = self.server.process.spawn(self._run(handler))
        self._task.add_done_callback(self._finished)

    def got(self, data: bytes | None) -> None:
        self._queue.append(data)
        self._wake()

    def gone(self) -> None:
        """Its caller has left."""
        if self._gone or self._over:
            return
        self._gone = True
        self._queue.append(None)
        self._wake()
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()
        self._over = True
        for callback in self._callbacks:
            callback(self)
        self._wake()

    async def _run(self, handler: Any) -> None:
        try:
            await self._handle(handler)
        except grpc.aio.AbortError:
            return
        except asyncio.CancelledError:
            if not self._gone:
                self._send((grpc.StatusCode.CANCELLED, "the handler was cancelled", ()))
            raise
        except Exception as error:
            self._send((grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}", ()))
            return
        self._send((OK, "", ()))

    async def _handle(self, handler: Any) -> None:
        if not handler.request_streaming:
            while not self._queue:
                await self._more()
            data = self._queue.popleft()
            if data is None:
                return
            request = handler.request_deserializer(data)
            if not handler.response_streaming:
                await self.write(await handler.unary_unary(request, self))
                return
            async for response in handler.unary_stream(request, self):
                await self.write(response)
            return
        if not handler.response_streaming:
            await self.write(await handler.stream_unary(self._requests(), self))
        elif inspect.isasyncgenfunction(handler.stream_stream):
            async for response in handler.stream_stream(self._requests(), self):
                await self.write(response)
        else:
            await handler.stream_stream(self._requests(), self)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def _more(self) -> None:
        if self._reader is None:
            self._reader = self._network.loop.create_future()
        await asyncio.shield(self._reader)

    def _send(self, item: Any) -> None:
        if not self._gone and not self.ghost:
            self.call.down.send(item)

    # The interface that handlers call

    async def read(self) -> Any:
        while not self._queue:
            if self._over:
                raise grpc.aio.UsageError("RPC already finished.")
            await self._more()
        data = self._queue[0]
        if data is None:
            return grpc.aio.EOF  # stays: nothing follows it
        self._queue.popleft()
        return self._request(data)

    async def write(self, message: Any) -> None:
        if self._over:
            raise grpc.aio.UsageError("RPC already finished.")
        if self._gone:
            raise grpc.aio.UsageError("the call is gone")
        if self.ghost:
            return
        connection = self.call.connection
        assert connection is not None
        say(connection, self.call.down, kind_of(message), Said(message.SerializeToString()))
        await self.call.down.room()

    async def send_initial_metadata(self, metadata: object) -> None:
        self._send(_METADATA)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        self._send((code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError("Locally aborted.")

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - self._network.loop.now)

    def peer(self) -> str:
        assert self.call.connection is not None
        return f"sim:{self.call.connection.number}"

    def auth_context(self) -> dict[str, Any]:
        return {}


class SimServer:
    """In place of `edgeshard.rpc.server.Server`, with its translation of errors."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.process = process
        self.grpc = self
        self._network = network
        self._address = address
        self._handlers: dict[str, Any] = {}
        self.denials = Denials()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass  # handlers added like this are registered by name, too

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            path = f"/{service}/{name}"
            self._handlers[path] = _guarded(handler, path)

    def handler(self, path: str) -> Any:
        return self._handlers.get(path)

    async def start(self) -> str:
        self._network.listeners[self._address] = self
        return self._address

    async def stop(self, grace_s: float = 0.5) -> None:
        self._network.listeners.pop(self._address, None)
        for connection in list(self._network.connections):
            if connection.services is self:
                connection.break_off("Socket closed", self._network.latency("", ""), 0.0)


@dataclass(frozen=True, slots=True)
class _Details:
    method: str


def _guarded(handler: Any, path: str) -> Any:
    """With the project's interceptor around it."""

    async def found(details: object) -> Any:
        return handler

    work = GuardInterceptor(lambda context, method: None).intercept_service(found, _Details(path))  # type: ignore[arg-type]
    assert isinstance(work, Coroutine)
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the interceptor waits")
