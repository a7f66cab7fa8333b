"""One channel to a coordinator, opened at first use, and the translation of its failures."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc

from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.proto.v1 import admin_pb2_grpc, inference_pb2_grpc
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles
from edgeshard.wire.status import from_rpc_error


class Connection:
    """The stubs of a coordinator behind one channel. Every failed call raises the typed error naming `target`."""

    def __init__(self, target: str, tls: TlsFiles | None) -> None:
        self.target = target
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._admin: admin_pb2_grpc.AdminServiceStub | None = None
        self._inference: inference_pb2_grpc.InferenceServiceStub | None = None

    def open(self) -> grpc.aio.Channel:
        """The channel. Must be called inside the event loop that is to use it.

        Raises DeniedError for plaintext beyond loopback, InvalidArgumentError for a target that is not host:port.
        """
        if self._channel is None:
            self._channel = open_channel(self.target, self._tls, "coordinator")
            self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
            self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        return self._channel

    async def close(self) -> None:
        """Close the channel; calls still running are cancelled."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def admin(self, method: str, request: Any, timeout_s: float) -> Any:
        self.open()
        return await self._unary(getattr(self._admin, method), request, timeout_s)

    async def inference(self, method: str, request: Any, timeout_s: float) -> Any:
        self.open()
        return await self._unary(getattr(self._inference, method), request, timeout_s)

    def generate(self, request: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """The messages of one Generate call. Closing the generator cancels the call."""
        self.open()
        assert self._inference is not None
        return self._stream(self._inference.Generate, request, timeout_s)

    def profile(self, request: Any) -> AsyncGenerator[Any, None]:
        """The messages of one Profile call. Closing the generator cancels the call."""
        self.open()
        assert self._admin is not None
        return self._stream(self._admin.Profile, request, None)

    def trace(self, request: Any) -> AsyncGenerator[Any, None]:
        """The messages of one Trace call. Closing the generator cancels the call."""
        self.open()
        assert self._admin is not None
        return self._stream(self._admin.Trace, request, None)

    def dump(self, request: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """The messages of one Dump call. Closing the generator cancels the call."""
        self.open()
        assert self._admin is not None
        return self._stream(self._admin.Dump, request, timeout_s)

    async def _stream(self, method: Any, request: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        call = method(request, timeout=timeout_s)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._typed(error) from None
        finally:
            # Without effect on a call that has ended; otherwise the server learns at once that nobody listens.
            call.cancel()

    async def _unary(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._typed(error) from None

    def _typed(self, error: grpc.aio.AioRpcError) -> EdgeShardError:
        connected = self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not connected:
            # A host that swallows packets: for the caller it is unreachable, not slow.
            return UnavailableError(f"cannot reach {self.target}: it does not answer", retry_after_s=1.0)
        return from_rpc_error(error, self.target)
