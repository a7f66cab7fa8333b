"""Client channels: keepalive that notices a dead link within seconds, retries for idempotent calls.

Credentials of gRPC for a client hold one certificate for ever. Here every call begins on a channel
of the newest certificate. An older channel stays while it has calls, since a connection outlives
the certificate with which it was made.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import Principal, Role, coordinator_of
from edgeshard.domain.ids import NodeName
from edgeshard.rpc.tls import TlsFiles, check_secure

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Generation:
    """One channel, the version of its files, and the number of its calls."""

    channel: grpc.aio.Channel
    version: tuple[int, ...]
    calls: int = 0


class RenewingChannel(grpc.aio.Channel):
    """A channel over TLS; `make` opens one with the credentials that `files` hold at the moment."""

    def __init__(self, files: TlsFiles, make: Callable[[], grpc.aio.Channel]) -> None:
        self._files = files
        self._make = make
        self._old: set[_Generation] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._newest = _Generation(make(), files.version())

    def _current(self) -> _Generation:
        newest = self._newest
        try:
            version = self._files.version()
            if version != newest.version:
                # First: a file that cannot be used leaves the channel as it is.
                self._newest = _Generation(self._make(), version)
                self._retire(newest)
        except EdgeShardError as error:
            log.error("the renewed certificate could not be loaded: %s", error.message)
        return self._newest

    def _retire(self, generation: _Generation) -> None:
        self._old.add(generation)
        if not generation.calls:
            self._close(generation)

    def _close(self, generation: _Generation) -> None:
        self._old.discard(generation)
        task = asyncio.ensure_future(generation.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _begin(self, kind: str, method: str, arguments: dict[str, Any]) -> Callable[..., Any]:
        binding: tuple[_Generation, Any] | None = None

        def call(*values: Any, **options: Any) -> Any:
            nonlocal binding
            generation = self._current()
            if binding is None or binding[0] is not generation:
                binding = generation, getattr(generation.channel, kind)(method, **arguments)
            begun = binding[1](*values, **options)
            generation.calls += 1
            begun.add_done_callback(lambda _: self._ended(generation))
            return begun

        return call

    def _ended(self, generation: _Generation) -> None:
        generation.calls -= 1
        if generation in self._old and not generation.calls:
            self._close(generation)

    def unary_unary(self, method: str, *positional: Any, **arguments: Any) -> Any:
        return self._begin("unary_unary", method, _named(positional, arguments))

    def unary_stream(self, method: str, *positional: Any, **arguments: Any) -> Any:
        return self._begin("unary_stream", method, _named(positional, arguments))

    def stream_unary(self, method: str, *positional: Any, **arguments: Any) -> Any:
        return self._begin("stream_unary", method, _named(positional, arguments))

    def stream_stream(self, method: str, *positional: Any, **arguments: Any) -> Any:
        return self._begin("stream_stream", method, _named(positional, arguments))

    async def close(self, grace: float | None = None) -> None:
        """Close every channel; calls that run are cancelled after `grace` seconds."""
        channels = [self._newest.channel, *(generation.channel for generation in self._old)]
        self._old.clear()
        await asyncio.gather(*(channel.close(grace) for channel in channels), *self._closing)

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()


def _named(positional: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name: stubs name all of them, others need not."""
    return (
        dict(zip(("request_serializer", "response_deserializer"), positional, strict=False))
        | arguments
    )


MESSAGE_LIMIT_BYTES = 16 << 20
"""The largest message that gRPC takes. A larger one ends its stream: ask `is_sendable` before.

A manifest of the most experts that EdgeShard runs, with three tensors each, has 13 MB.
"""
_PASSED_ON_BYTES = 64 << 10
WINDOW_BYTES = 4 << 20
"""The window of channels that carry tokens and control, and of the coordinator's server: a model's
upload over a path of 100 ms may reach 40 MB/s."""
KEEPALIVE_S = 1.0
CONTROL_KEEPALIVE_S = 2.0
"""Keepalive between nodes and their coordinator, where more frequent heartbeats make the ping
unnecessary."""
CONTROL_PING_TIMEOUT_S = 15.0
"""Longer than a node may be silent: one that pauses for a moment keeps its control stream."""

COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
]

# Calls that may be repeated without changing what they do: reads, and mutations that carry an
# operation id.
_IDEMPOTENT = [
    ("edgeshard.proto.v1.AdminService", ""),
    ("edgeshard.proto.v1.CoordinatorService", "Register"),
    ("edgeshard.proto.v1.CoordinatorService", "ReportProfile"),
    ("edgeshard.proto.v1.InferenceService", "ListModels"),
    ("edgeshard.proto.v1.InferenceService", "RenderChat"),
    ("edgeshard.proto.v1.InferenceService", "Tokenize"),
    ("edgeshard.proto.v1.InferenceService", "Detokenize"),
    ("edgeshard.proto.v1.ModelStoreService", "GetManifest"),
    ("edgeshard.proto.v1.ModelStoreService", "RegisterModel"),
]
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": s, "method": m} if m else {"service": s} for s, m in _IDEMPOTENT
                ],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


def open_channel(
    target: str,
    tls: TlsFiles | None,
    field: str = "address",
    ping_timeout_s: float | None = None,
    reconnect_s: float = 2.0,
    keepalive_s: float = KEEPALIVE_S,
    node: NodeName | None = None,
    window_bytes: int | None = None,
) -> grpc.aio.Channel:
    """A channel to `host:port`: to the node of that name, or to the coordinator.

    Over TLS the peer must show the certificate of that node or of the coordinator, whatever the
    address, and calls begin with the newest certificate of the files. Raises DeniedError naming
    `field` for plaintext beyond loopback.

    A ping is sent after `keepalive_s` without data. If not even TCP acknowledges it, as after a
    cable was pulled, the link counts as dead one second later (gRPC makes keepalive_timeout the
    socket's TCP_USER_TIMEOUT). If TCP does and the peer's gRPC does not answer, as with a proxy or
    a stopped process, the peer counts as gone after `ping_timeout_s`; None leaves it at gRPC's
    minute. It may be short if the channel carries little: an answer that follows bulk data on a
    slow link takes as long as the data. Attempts to connect are at most `reconnect_s` apart; a call
    made between them fails without an attempt. `window_bytes` is as in a `Server`: the bytes that
    the peer may send ahead on a stream.
    """
    check_secure(target, tls, field)
    options: list[tuple[str, int | str]] = [
        *COMMON_OPTIONS,
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the time one attempt to connect may take, TLS handshake included: seconds on a slow
        # link.
        ("grpc.min_reconnect_backoff_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", int(reconnect_s * 1000)),
        # Several channels to one node must not share a connection: control messages must not queue
        # after activations.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if ping_timeout_s is not None:
        options.append(("grpc.http2.ping_timeout_ms", int(ping_timeout_s * 1000)))
    if window_bytes is not None:
        options += fixed_window(window_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(target, options)
    site = tls.principal().site
    peer = coordinator_of(site) if node is None else Principal(site, Role.AGENT, node)
    options.append(("grpc.ssl_target_name_override", peer.dns_name))
    files = tls
    return RenewingChannel(
        files, lambda: grpc.aio.secure_channel(target, files.channel_credentials(), options)
    )


def fixed_window(window_bytes: int) -> list[tuple[str, int]]:
    """Options that fix how much a peer may send ahead on a stream. Without them gRPC measures the
    path with pings. These wake both ends once more for each message if messages arrive one by
    one."""
    return [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)]


def is_sendable(message: Message) -> bool:
    """Whether a message may be written to a stream, and its reader may pass it on with a little
    more around it."""
    return message.ByteSize() <= MESSAGE_LIMIT_BYTES - _PASSED_ON_BYTES


async def half_close(
    call: grpc.aio.StreamUnaryCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any],
) -> None:
    """Tell the peer that nothing more will be written.

    Raises nothing: if the call is over, its status has the reason, and the caller reads that next.
    The `done_writing` of grpcio raises InternalError if the connection broke a moment before.
    """
    with suppress(grpc.aio.InternalError):
        await call.done_writing()
