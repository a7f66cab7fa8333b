"""gRPC without sockets: channels and servers of simulated processes, whose messages are bytes and take their time.

What can happen is what happens to real connections. A stream is ordered and loses nothing while it lasts; it ends at
any message, and what was under way is lost then. Between streams there is no order. A host that is cut off gets what was
sent late, or its connections end after the keepalive. A call of one request may be lost, answered late or come twice.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

import grpc

from edgeshard.rpc.server import ErrorInterceptor
from tests.simulator.loop import Process, VirtualLoop

KEEPALIVE_S = (2.0, 2.6)
"""Until a connection whose peer is cut off counts as lost."""
CONNECT_S = 3.0
"""How long an attempt to connect to a host that is cut off may take."""
ROOM = 24
"""Messages that may wait to be sent before a writer waits."""
OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, Any], ...]]
Fate = str
"""'' for what arrives, 'drop' for what ends its stream, 'twice' for what comes two times."""


@dataclass(eq=False)
class Network:
    """Who listens where, who is cut off from whom, and what becomes of each message (`fate` of its kind)."""

    loop: VirtualLoop
    dice: random.Random
    fate: Callable[[str, bool], Fate]
    trace: Callable[[str], None]
    listeners: dict[str, SimServer] = field(default_factory=dict)
    parted: set[tuple[str, str]] = field(default_factory=set)
    slow: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds that messages from a host to another take beyond the usual."""
    connections: list[Connection] = field(default_factory=list)
    opened: int = 0

    def latency(self, sender: str, receiver: str) -> float:
        return self.dice.uniform(0.0002, 0.002) + self.slow.get((sender, receiver), 0.0)

    def part(self, a: str, b: str, both: bool) -> None:
        self.parted.add((a, b))
        if both:
            self.parted.add((b, a))
        for connection in self.connections:
            if {connection.client.name, connection.server.name} == {a, b}:
                connection.watch_keepalive()

    def heal(self, a: str, b: str) -> None:
        self.parted -= {(a, b), (b, a)}
        for connection in list(self.connections):
            if {connection.client.name, connection.server.name} == {a, b}:
                connection.flush()

    def is_parted(self, a: str, b: str) -> bool:
        return (a, b) in self.parted or (b, a) in self.parted

    def crashed(self, process: Process, silently: bool) -> None:
        """Its host says so at once, or nothing is heard of it any more."""
        for address in [a for a, server in self.listeners.items() if server.process is process]:
            del self.listeners[address]
        for connection in list(self.connections):
            if process in (connection.client, connection.server):
                after = self.dice.uniform(*KEEPALIVE_S) if silently else self.latency("", "")
                connection.break_off("the peer is gone", after, after)


class Connection:
    """What a channel has open to a server: calls of two processes, which end when it breaks."""

    def __init__(self, network: Network, client: Process, server: SimServer) -> None:
        network.opened += 1
        self.number = network.opened
        self.network = network
        self.client = client
        self.server = server.process
        self.services = server
        self.calls: dict[int, Call] = {}
        self.broken = False
        network.connections.append(self)

    def watch_keepalive(self) -> None:
        network = self.network

        def look() -> None:
            if not self.broken and network.is_parted(self.client.name, self.server.name):
                self.break_off("keepalive", 0.0, network.dice.uniform(0.0, 0.5))

        network.loop.call_global(network.loop.now + network.dice.uniform(*KEEPALIVE_S), look)

    def flush(self) -> None:
        for call in list(self.calls.values()):
            call.up.flush()
            call.down.flush()

    def break_off(self, why: str, client_after: float, server_after: float) -> None:
        """Everything under way is lost; each end notices in its own time."""
        if self.broken:
            return
        self.broken = True
        if self in self.network.connections:
            self.network.connections.remove(self)
        status: Status = (UNAVAILABLE, why, ())
        for call in list(self.calls.values()):
            self.client.call_later(client_after, call.ended, status)
            self.server.call_later(server_after, call.lost)
            call.up.let_go()
            call.down.let_go()


class Pipe:
    """One direction of a call: in order, and nothing is lost while the connection lasts."""

    def __init__(self, connection: Connection, upward: bool, arrive: Callable[[Any], None]) -> None:
        self.connection = connection
        self.sender, self.receiver = (
            (connection.client, connection.server) if upward else (connection.server, connection.client)
        )
        self._arrive = arrive
        self._last = 0.0
        self._held: list[Any] = []
        self._under_way = 0
        self._room: asyncio.Future[Any] | None = None

    def send(self, item: Any) -> None:
        network = self.connection.network
        if self.connection.broken or self.sender.dead:
            return
        now = network.loop.now
        self._last = max(self._last, now + network.latency(self.sender.name, self.receiver.name))
        self._under_way += 1
        network.loop.call_global(self._last, self._came, item, context=self.receiver.context)

    async def room(self) -> None:
        """Wait while too much is under way."""
        if self._under_way > ROOM and not self.connection.broken:
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)

    def _came(self, item: Any) -> None:
        connection = self.connection
        if connection.broken:
            return
        if self._held or connection.network.is_parted(self.sender.name, self.receiver.name):
            self._held.append(item)
            return
        self._under_way -= 1
        self.let_go()
        self._arrive(item)

    def let_go(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def flush(self) -> None:
        held, self._held = self._held, []
        self._under_way -= len(held)
        for item in held:
            self.send(item)


@dataclass(frozen=True, slots=True)
class Said:
    """A message on its way; `kind` names it for faults."""

    data: bytes


_HEADERS, _CANCEL, _METADATA, _HALF_CLOSE = "headers", "cancel", "metadata", "half-close"


class Call:
    """Both ends of one call. The client's end is what a stub returns; the server's is its handler's context."""

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
        """The client hears of the end."""
        if self._status is not None:
            return
        if status[0] is UNAVAILABLE and not status[2] and self.network.dice.random() < 0.5:
            self._incoming.clear()  # gRPC may lose what it had not handed out
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

    # What arrives

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

    # What the product calls on it

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
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)

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


def say(connection: Connection, pipe: Pipe, kind: str, said: Said) -> None:
    """Send a message, as its fate wants."""
    network = connection.network
    fate = network.fate(kind, False)
    if fate == "drop":
        network.trace(f"drop {kind} from {pipe.sender.name} to {pipe.receiver.name}")
        connection.break_off("Connection reset by peer", network.latency("", ""), network.latency("", ""))
        return
    pipe.send(said)
    if fate == "twice":
        network.trace(f"twice {kind} from {pipe.sender.name} to {pipe.receiver.name}")
        pipe.send(said)


class ServerContext:
    """The server's end of a call: what a handler gets as its context."""

    def __init__(self, call: Call, server: SimServer, deadline: float | None, ghost: bool = False) -> None:
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
        """Nobody waits for it any more."""
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

    # What handlers call

    async def read(self) -> Any:
        while not self._queue:
            if self._over:
                raise grpc.aio.UsageError("RPC already finished.")
            await self._more()
        data = self._queue[0]
        if data is None:
            return grpc.aio.EOF  # stays: there is nothing behind it
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

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
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

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass  # what is added so is registered by name, too

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

    work = ErrorInterceptor().intercept_service(found, _Details(path))  # type: ignore[arg-type]
    assert isinstance(work, Coroutine)
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the interceptor waits")


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    response: Callable[[bytes], Any]


_IDEMPOTENT = ("AdminService/", "CoordinatorService/Register", "CoordinatorService/ReportProfile")


class SimChannel:
    """In place of `grpc.aio.Channel`, from a process to an address."""

    def __init__(self, network: Network, process: Process, target: str) -> None:
        self.network = network
        self.process = process
        self.target = target
        self._connection: Connection | None = None
        self._closed = False
        self._calls: list[Call] = []
        self._last = 0

    def next_call(self) -> int:
        self._last += 1
        return self._last

    def dial(self, call: Call) -> None:
        self._calls = [known for known in self._calls if not known.done()] + [call]
        connection = self._connection
        if connection is not None and not connection.broken:
            call.opened(connection)
            return
        self.process.call_later(self.network.latency("", ""), self._connect, call, self.network.loop.now)

    def _connect(self, call: Call, since: float) -> None:
        network = self.network
        if self._connection is None or self._connection.broken:
            server = network.listeners.get(self.target)
            host = self.target.partition(":")[0]
            if network.is_parted(self.process.name, host):
                if network.loop.now - since > CONNECT_S:
                    call.ended((UNAVAILABLE, "failed to connect: timeout", ()))
                elif not call.done():
                    self.process.call_later(0.1, self._connect, call, since)
                return
            if server is None:
                call.ended((UNAVAILABLE, "Connection refused", ()))
                return
            self._connection = Connection(network, self.process, server)
        call.opened(self._connection)

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        method = self._method(path, response_deserializer)

        def call(request: Any, timeout: float | None = None, **_: Any) -> Any:
            return self._unary(method, request, timeout)

        return call

    async def _unary(self, method: Method, request: Any, timeout: float | None) -> Any:
        """With the retries that the channel's service configuration asks for."""
        attempts = 4 if any(name in method.path for name in _IDEMPOTENT) else 1
        pause_s, until = 0.1, None if timeout is None else self.network.loop.now + timeout
        while True:
            left = None if until is None else until - self.network.loop.now
            call = Call(self, method, left)
            try:
                await call.write(request)
                await call.done_writing()
                if self.network.fate(kind_of(request), True) == "twice":
                    self._send_twice(call, request)
                return await call
            except asyncio.CancelledError:
                call.cancel()
                raise
            except grpc.aio.AioRpcError as error:
                attempts -= 1
                answered = bool(tuple(error.trailing_metadata() or ()))
                if error.code() is not UNAVAILABLE or not attempts or answered:
                    raise
            await asyncio.sleep(pause_s * self.network.dice.uniform(0.8, 1.2))
            pause_s *= 2

    def _send_twice(self, call: Call, request: Any) -> None:
        """As after a retry whose first attempt was taken for lost: it comes again, and nobody hears the answer."""
        data = request.SerializeToString()

        def again() -> None:
            server = self.network.listeners.get(self.target)
            if server is None or call.connection is None:
                return
            ghost = ServerContext(call, server, None, ghost=True)
            self.network.trace(f"twice {kind_of(request)}")
            ghost.got(data)
            ghost.begin()

        server = self.network.listeners.get(self.target)
        if server is not None:
            server.process.call_later(self.network.dice.choice((0.003, 0.05, 0.7)), again)

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        method = self._method(path, response_deserializer)

        def call(request: Any, timeout: float | None = None, **_: Any) -> Call:
            made = Call(self, method, timeout)
            said = Said(request.SerializeToString())
            if made.connection is None:
                made._unsent.append((kind_of(request), said))
            else:
                made._say(kind_of(request), said)
            made._closing = True
            return made

        return call

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        method = self._method(path, response_deserializer)

        def call(request: object = None, timeout: float | None = None, **_: Any) -> Call:
            return Call(self, method, timeout)

        return call

    stream_unary = stream_stream

    def _method(self, path: str, response: Any) -> Method:
        return Method(path, response)

    def get_state(self) -> grpc.ChannelConnectivity:
        up = self._connection is not None and not self._connection.broken
        return grpc.ChannelConnectivity.READY if up else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()
        self._calls = []
        if self._connection is not None:
            self._connection.break_off("Channel closed!", 0.0, self.network.latency("", ""))
        self._connection = None


_ONEOFS: dict[type, str | None] = {}


def kind_of(message: Any) -> str:
    """The name of a message for faults: its type, and which of its alternatives it holds."""
    cls = type(message)
    if cls not in _ONEOFS:
        real = [o.name for o in message.DESCRIPTOR.oneofs if not o.name.startswith("_")]
        _ONEOFS[cls] = real[0] if len(real) == 1 else None
    oneof = _ONEOFS[cls]
    name = cls.__name__
    if name in ("ExchangeRequest", "ExchangeResponse"):
        inner = message.message
        which = inner.WhichOneof("message") or "padding"
        return f"Link {which}"
    return name if oneof is None else f"{name} {message.WhichOneof(oneof)}"
