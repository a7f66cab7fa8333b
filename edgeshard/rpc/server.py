"""Servers of gRPC: their addresses, the errors they send, and their health service."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from edgeshard.domain.audit import CALLER_LEFT
from edgeshard.domain.errors import (
    CancelledRequestError,
    EdgeShardError,
    InternalError,
    UnavailableError,
)
from edgeshard.domain.identity import Principal
from edgeshard.rpc.access import (
    COUNTED_ELSEWHERE,
    CallFrom,
    call_from,
    check_access,
    check_enrolment,
)
from edgeshard.rpc.channel import COMMON_OPTIONS, KEEPALIVE_S, fixed_window
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.open_calls import CallContext, OpenCalls, rightful
from edgeshard.rpc.tls import TlsFiles, check_secure, join_address, split_address
from edgeshard.wire.status import abort

log = structlog.get_logger()

Check = Callable[[Any, str], Principal | None]
"""Takes a call's context and method; returns the caller, None if callers cannot be distinguished.
Raises DeniedError for a call that must not be served."""

HANDSHAKE_S = 10.0
"""Limit for TLS and HTTP/2 to begin on a new connection, equal to the time limit of a caller's
attempt."""
IDLE_S = 300.0
"""A connection without a call is closed after this time; the next call opens another."""
MOST_CONNECTIONS = 1024
"""Default of a server. An open connection takes 60 kB of memory and a descriptor."""

_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


_LEFT: EdgeShardError | None = CancelledRequestError(
    "the caller left before the answer", reason=CALLER_LEFT
)
"""The end of a call of which nothing else is known: it was cancelled."""


def _limits(most_connections: int, idle_s: float) -> list[tuple[str, int]]:
    return [
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.max_connection_idle_ms", int(idle_s * 1000)),
    ]


def _options(
    keepalive_s: float, window_bytes: int | None, most_connections: int
) -> list[tuple[str, int]]:
    options = [
        *_OPTIONS,
        *_limits(most_connections, IDLE_S),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
    ]
    if window_bytes is not None:
        options += fixed_window(window_bytes)
    return options


class CallWatch(Protocol):
    """Hears of calls; it neither waits nor raises."""

    def began(self, method: str, source: CallFrom, request: Any) -> None:
        """Hear of a permitted call whose answer is a stream."""

    def ended(
        self, method: str, source: CallFrom, request: Any, answer: Any, error: EdgeShardError | None
    ) -> None:
        """Hear of the end of any call, before its caller does. `answer` is None of a stream and
        after an error."""


class _NoWatch:
    """Tells nobody."""

    def began(self, method: str, source: CallFrom, request: Any) -> None:
        pass

    def ended(
        self, method: str, source: CallFrom, request: Any, answer: Any, error: EdgeShardError | None
    ) -> None:
        pass


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that `check` refuses, and ends open calls of principals that `denials` names
    from then on.

    A typed error of a servicer becomes its status; any other exception is logged and becomes
    INTERNAL.
    """

    def __init__(
        self, check: Check, watch: CallWatch | None = None, denials: Denials | None = None
    ) -> None:
        self._check = check
        self._watch = watch or _NoWatch()
        self._calls = OpenCalls(Denials() if denials is None else denials)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        # A service written for threads keeps its own behaviour. A stream may be a generator or
        # write to its context.
        for kind in ("unary_unary", "stream_unary", "unary_stream", "stream_stream"):
            behaviour = getattr(handler, kind)
            stream = "" if kind == "unary_unary" or method in COUNTED_ELSEWHERE else method
            if inspect.isasyncgenfunction(behaviour):
                return handler._replace(**{kind: self._guard_stream(behaviour, method, stream)})
            if inspect.iscoroutinefunction(behaviour):
                return handler._replace(**{kind: self._guard_unary(behaviour, method, stream)})
        return handler

    def _guard_unary(
        self, behaviour: Callable[..., Awaitable[Any]], method: str, stream: str
    ) -> Callable[..., Awaitable[Any]]:
        check = self._check
        watch = self._watch
        calls = self._calls

        async def call(request: Any, context: Any) -> Any:
            answer = None
            end = _LEFT
            source = call_from(context)
            try:
                with calls.entered(check(context, method), context, stream) as opened:
                    try:
                        answer = await behaviour(
                            rightful(request, opened), CallContext(context, opened)
                        )
                    except asyncio.CancelledError:
                        end = opened.caught()
                        if end is None:
                            end = _LEFT
                            raise
                    else:
                        end = None
            except EdgeShardError as error:
                end = _without_frames(error)
            except (grpc.aio.AbortError, grpc.RpcError):
                raise
            except Exception:
                log.exception("rpc_failed", method=method)
                end = _unexpected(method)
            finally:
                watch.ended(method, source, request, answer, end)
            del request  # An abort's traceback keeps this frame.
            if end is not None:
                await abort(context, end)
            return answer

        return call

    def _guard_stream(
        self, behaviour: Callable[..., AsyncGenerator[Any, None]], method: str, stream: str
    ) -> Callable[..., AsyncIterator[Any]]:
        check = self._check
        watch = self._watch
        calls = self._calls

        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            end, source = _LEFT, call_from(context)
            try:
                with calls.entered(check(context, method), context, stream) as opened:
                    watch.began(method, source, request)
                    try:
                        async with aclosing(
                            behaviour(rightful(request, opened), CallContext(context, opened))
                        ) as responses:
                            async for response in responses:
                                opened.is_sending = True
                                yield response
                                opened.is_sending = False
                                if opened.error is not None:
                                    break
                        end = opened.error
                    except asyncio.CancelledError:
                        end = opened.caught()
                        if end is None:
                            end = _LEFT
                            raise
            except EdgeShardError as error:
                end = _without_frames(error)
            except (grpc.aio.AbortError, grpc.RpcError):
                raise
            except Exception:
                log.exception("rpc_failed", method=method)
                end = _unexpected(method)
            finally:
                watch.ended(method, source, request, None, end)
            del request  # An abort's traceback keeps this frame.
            if end is not None:
                await abort(context, end)

        return call


def _without_frames(error: EdgeShardError) -> EdgeShardError:
    """The error without its frames, which refer to the request.

    gRPC's context keeps the exception of an abort, whose frames refer to the context and to the
    error. Only the collector of garbage would free that cycle, and with it the request, however
    large.
    """
    error.__context__ = None
    return error.with_traceback(None)


def _unexpected(method: str) -> InternalError:
    return InternalError(
        f"{method.rpartition('/')[2]} failed unexpectedly; the process's log has the details"
    )


class _Listener:
    """A gRPC server on one address."""

    def __init__(
        self,
        listen: str,
        guard: GuardInterceptor,
        options: list[tuple[str, int]],
        most_calls: int | None = None,
    ) -> None:
        self._address = listen
        self.grpc = grpc.aio.server(
            interceptors=[guard], options=options, maximum_concurrent_rpcs=most_calls
        )

    async def _listen(self, credentials: grpc.ServerCredentials | None, field: str) -> str:
        """Listen; returns the real host:port. Raises UnavailableError naming `field` when the port
        is taken."""
        host, _ = split_address(self._address, field)
        try:
            if credentials is None:
                port = self.grpc.add_insecure_port(self._address)
            else:
                port = self.grpc.add_secure_port(self._address, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise UnavailableError(
                f"{field} {self._address}: the address is in use or not of this machine; choose "
                f"another with --{field}",
                field=field,
                reason="PORT_IN_USE",
            )
        await self.grpc.start()
        return join_address(host, port)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Take no more calls; cancel those that run after `grace_s`."""
        await self.grpc.stop(grace_s)


class Server(_Listener):
    """A grpc.aio server with the project's options, error mapping and health service.

    Servicers are added with the generated `add_*_to_server(servicer, server.grpc)`; then `await
    start()`. `keepalive_s` is as in `open_channel`. `window_bytes` fixes how much a peer may send
    ahead on a stream. If it is None, gRPC measures each path with pings, nearly one for every
    message if messages arrive one by one. `denials` are the refused certificates; without it a
    server makes a list of its own. `watch` receives every call. Connections beyond
    `most_connections` are closed on arrival, and connections without a certificate after
    `HANDSHAKE_S`.
    """

    def __init__(
        self,
        listen: str,
        tls: TlsFiles | None,
        keepalive_s: float = KEEPALIVE_S,
        window_bytes: int | None = None,
        denials: Denials | None = None,
        watch: CallWatch | None = None,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self._tls = tls
        self.denials = Denials() if denials is None else denials
        site = None if tls is None else tls.principal().site
        self._guard = GuardInterceptor(
            lambda context, method: check_access(context, method, site, self.denials),
            watch,
            self.denials,
        )
        super().__init__(listen, self._guard, _options(keepalive_s, window_bytes, most_connections))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def start(self) -> str:
        """Listen; returns the real host:port (port 0 picks a free one).

        Raises DeniedError for a listener beyond loopback without TLS, UnavailableError when the
        port is taken.
        """
        check_secure(self._address, self._tls, "listen")
        address = await self._listen(
            None if self._tls is None else self._tls.server_credentials(), "listen"
        )
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        return address

    async def stop(self, grace_s: float = 0.5) -> None:
        await self._health.enter_graceful_shutdown()
        await super().stop(grace_s)


class EnrolmentServer(_Listener):
    """A server for callers without a certificate. It serves only EnrolmentService, over TLS only.

    It serves MOST_CALLS calls at a time, and MOST_CALLS_OF_ONE of one connection, so that a slow
    caller takes no place of others. A message has at most MOST_BYTES, enough for a certificate.
    """

    MOST_CALLS = 128
    MOST_CALLS_OF_ONE = 4
    MOST_BYTES = 64 << 10

    def __init__(
        self,
        listen: str,
        tls: TlsFiles,
        watch: CallWatch | None = None,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self._tls = tls
        options = [
            *_OPTIONS,
            *_limits(most_connections, 10.0),
            ("grpc.max_receive_message_length", self.MOST_BYTES),
            ("grpc.max_concurrent_streams", self.MOST_CALLS_OF_ONE),
            ("grpc.max_connection_age_ms", 60_000),
            ("grpc.max_connection_age_grace_ms", 5_000),
        ]
        super().__init__(listen, GuardInterceptor(check_enrolment, watch), options, self.MOST_CALLS)

    async def start(self) -> str:
        """Listen; returns the real host:port. Raises UnavailableError when the port is taken."""
        return await self._listen(self._tls.server_credentials(asks=False), "enrol-listen")
