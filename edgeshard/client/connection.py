"""One channel to a coordinator, opened at first use, its failures as typed errors, and calls over
it.

The channel does not survive a fork: gRPC keeps threads and locks that a forked child does not have,
so its calls would hang.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from edgeshard.client.listening import Inbox, ListenerStream
from edgeshard.client.renewing import renew_over
from edgeshard.client.site_access import Access
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, UnavailableError
from edgeshard.domain.requests.generation import Finished, GenerateRequest, GenerationEvent, Started
from edgeshard.proto.v1 import inference_pb2
from edgeshard.proto.v1.admin_pb2_grpc import AdminServiceStub
from edgeshard.proto.v1.inference_pb2_grpc import InferenceServiceStub
from edgeshard.rpc.channel import WINDOW_BYTES, open_channel
from edgeshard.rpc.clocks import TLS_HANDSHAKE, explained
from edgeshard.wire.generation import event_from_wire, generate_request_to_wire
from edgeshard.wire.status import from_rpc_error

if TYPE_CHECKING:
    from edgeshard.rpc.renewal import Renew
import uuid

from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.domain.ids import OperationId
from edgeshard.proto.v1.identity_pb2_grpc import IdentityServiceStub


class _Process:
    """The process that first opened a channel; a forked child inherits its number."""

    number: int | None = None


def is_forked() -> bool:
    """Whether a parent process of this one had opened a channel when it forked."""
    return _Process.number not in (None, os.getpid())


def check_not_forked() -> None:
    """Note that this process uses the client. Raise FailedPreconditionError (FORKED) if its parent
    did before."""
    if is_forked():
        raise FailedPreconditionError(
            "this process was forked from one that had used EdgeShard's client, which does not "
            "survive a fork: start "
            "workers with multiprocessing.get_context('spawn'), or fork before the first call",
            field="process",
            reason="FORKED",
        )
    _Process.number = os.getpid()


class Connection:
    """The stubs of a coordinator over one channel. Every failed call raises the typed error naming
    `target`."""

    def __init__(self, access: Access) -> None:
        self.target = access.target
        self._access = access
        self._renewing: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._listener: ListenerStream | None = None
        self._stubs: dict[Any, Any] = {}

    def open(self) -> grpc.aio.Channel:
        """The channel. Must be called inside the event loop that is to use it, and in the process
        that began to use it.

        Raises DeniedError for plaintext beyond loopback and if there are no credentials,
        InvalidArgumentError if the target is not host:port, FailedPreconditionError after a fork.
        """
        check_not_forked()
        if self._channel is None:
            self._access.check()
            tls = self._access.tls
            try:
                self._channel = open_channel(
                    self.target, tls, "coordinator", window_bytes=WINDOW_BYTES
                )
            except InvalidArgumentError as error:
                raise self._with_file(error) from None
            self._stubs.clear()
            if tls is not None and os.access(tls.cert.parent, os.W_OK):
                # a tenth of a second, which plaintext need not wait
                from edgeshard.rpc.renewal import (
                    keep_renewed,
                )

                self._renewing = asyncio.ensure_future(keep_renewed(tls, self.renewal()))
        return self._channel

    def renewal(self) -> Renew:
        """The call that requests another certificate."""
        return renew_over(self.open(), self.target)

    async def close(self) -> None:
        """Close the channel; calls still running are cancelled."""
        channel, self._channel = self._channel, None
        listener, self._listener = self._listener, None
        renewing, self._renewing = self._renewing, None
        if is_forked():
            return  # they are the parent's
        if renewing is not None:
            renewing.cancel()
        if listener is not None:
            await listener.close()
        if channel is not None:
            await channel.close()

    def _stub(self, kind: Callable[[grpc.aio.Channel], Any]) -> Any:
        """The stub of a service, made once for the channel."""
        channel = self.open()
        if kind not in self._stubs:
            self._stubs[kind] = kind(channel)
        return self._stubs[kind]

    async def call(
        self, stub: Callable[[grpc.aio.Channel], Any], method: str, request: Any, timeout_s: float
    ) -> Any:
        """The answer to one call of a service."""
        try:
            return await getattr(self._stub(stub), method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from None

    async def generate(
        self, request: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one request. Closing the generator cancels its call."""
        stub: InferenceServiceStub = self._stub(InferenceServiceStub)
        inbox = self._open_inbox()
        if inbox is not None:
            request = replace(request, listener=inbox.listener)
        call = stub.Generate(generate_request_to_wire(request), timeout=timeout_s)
        try:
            while isinstance(message := await call.read(), inference_pb2.GenerateResponse):
                event = event_from_wire(message)
                if inbox is None or not isinstance(event, Started) or not event.listened:
                    yield event
                    continue
                yield replace(event, listened=False)
                inbox.watch(call)
                while not isinstance(event, Finished):
                    event = await inbox.next()
                    yield event
                return
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from None
        finally:
            if inbox is not None:
                inbox.close()
            # Without effect on a call that has ended; otherwise the server learns at once that the
            # client stopped listening.
            call.cancel()

    def _open_inbox(self) -> Inbox | None:
        """An inbox for a request's tokens; None if the coordinator knows no listeners."""
        listener = self._listener
        if listener is not None and listener.unknown:
            return None
        if listener is None or listener.over:
            listener = self._listener = ListenerStream(
                self._stub(InferenceServiceStub).Listen(), self.target
            )
        return listener.open_inbox()

    async def stream(
        self, method: str, request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """The messages of one call of the admin service. Closing the generator cancels the call."""
        call = getattr(self._stub(AdminServiceStub), method)(request, timeout=timeout_s)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from None
        finally:
            # Without effect on a call that has ended; otherwise the server learns at once that the
            # client stopped listening.
            call.cancel()

    async def _error_of(self, error: grpc.aio.AioRpcError) -> EdgeShardError:
        """The typed error; of a wrong clock if that is why TLS refused the coordinator."""
        return await explained(self._typed(error), self.target)

    def _typed(self, error: grpc.aio.AioRpcError) -> EdgeShardError:
        connected = (
            self._channel is not None
            and self._channel.get_state() is grpc.ChannelConnectivity.READY
        )
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not connected:
            # A host that swallows packets: for the caller it is unreachable, not slow.
            return self._with_file(
                UnavailableError(
                    f"cannot reach {self.target}: it does not answer", retry_after_s=1.0
                )
            )
        if error.code() is grpc.StatusCode.UNAVAILABLE and "Connection refused" in (
            error.details() or ""
        ):
            return self._with_file(
                UnavailableError(
                    f"cannot reach {self.target}: no coordinator listens there. `edgectl serve "
                    "MODEL` starts a "
                    "site on this machine, edgeshard-coordinator only a coordinator; --coordinator "
                    "HOST:PORT "
                    "names another",
                    retry_after_s=1.0,
                )
            )
        typed = from_rpc_error(error, self.target)
        return self._with_file(typed) if typed.reason == TLS_HANDSHAKE else typed

    def _with_file(self, error: EdgeShardError) -> EdgeShardError:
        """The error with the file that names the coordinator, if the caller named no target: the
        file may outlive its site."""
        if self._access.named_in is None:
            return error
        return type(error)(
            f"{error.message}. The site is named in {self._access.named_in}: if the site is gone, "
            "remove "
            "that file, or replace it with edgectl join TOKEN --force; --coordinator, --tls-ca, "
            "--tls-cert and --tls-key choose a site for one command",
            field=error.field,
            reason=error.reason,
            retry_after_s=error.retry_after_s,
        )


class Calls:
    """A part of the client's calls, each bounded by `timeout_s` unless it has a bound of its
    own."""

    def __init__(self, connection: Connection, timeout_s: float, clock: Clock) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._clock = clock

    @property
    def target(self) -> str:
        return self._connection.target

    async def _admin(self, method: str, request: Any) -> Any:
        return await self._connection.call(AdminServiceStub, method, request, self._timeout_s)

    async def _identity(self, method: str, request: Any) -> Any:
        return await self._connection.call(IdentityServiceStub, method, request, self._timeout_s)

    async def _inference(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return await self._connection.call(InferenceServiceStub, method, request, timeout_s)


def operation_id() -> OperationId:
    """A new one, for a call that changes something and may arrive twice."""
    return OperationId(uuid.uuid4().hex)
