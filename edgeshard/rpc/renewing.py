"""A channel whose credentials follow the files of their origin.

Credentials of gRPC for a client hold one certificate for ever. Here every call begins on a channel
of the newest certificate. An older channel stays while it has calls, since a connection outlives
the certificate with which it was made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from edgeshard.domain.errors import EdgeShardError
from edgeshard.rpc.tls import TlsFiles

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
    return dict(zip(("request_serializer", "response_deserializer"), positional, strict=False)) | arguments
