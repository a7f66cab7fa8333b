"""In place of a gRPC channel: what stubs make their calls with."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tests.simulator.calls import Call, Method, ServerContext
from tests.simulator.loop import Process
from tests.simulator.network import UNAVAILABLE, Connection, Network, Said, kind_of

CONNECT_S = 3.0
"""How long an attempt to connect to a host that is cut off may take."""
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
        self.process.call_later(
            self.network.latency("", ""), self._connect, call, self.network.loop.now
        )

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

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        method = self._method(path, response_deserializer)

        def call(request: Any, timeout: float | None = None, **_: Any) -> Any:
            return self._unary(method, request, timeout)

        return call

    async def _unary(self, method: Method, request: Any, limit_s: float | None) -> Any:
        """With the retries of the channel's service configuration."""
        attempts = 4 if any(name in method.path for name in _IDEMPOTENT) else 1
        pause_s, until = 0.1, None if limit_s is None else self.network.loop.now + limit_s
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
        """As after a retry whose first attempt was taken for lost: it arrives again, and its answer
        is dropped."""
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

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
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

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
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
