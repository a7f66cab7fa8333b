"""Open calls of one server by their callers: a revoked principal's calls end at once, and streams
are counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from edgeshard.domain.errors import DeniedError, ResourceExhaustedError
from edgeshard.domain.identity import Principal
from edgeshard.rpc.denials import Denials

MOST_STREAMS = 512
"""Most streams of one principal and method at one server. Processes may share a certificate; each
listens once."""


class OpenCall:
    """One open call. `error` is the reason for which it must end, None if it need not."""

    __slots__ = ("_context", "error", "is_sending", "task")

    def __init__(self, context: Any, task: asyncio.Task[Any] | None) -> None:
        self._context = context
        self.task = task
        self.error: DeniedError | None = None
        self.is_sending = False
        """True while a message is handed to gRPC. The task must not be cancelled then: no status
        would be sent."""

    def check(self, principal: Principal, denials: Denials) -> None:
        """End the call if its certificate is refused now."""
        if self.task is not None and self.task.done():
            # It is over, and its context must not be used any more; its generator was not closed
            # yet.
            return
        try:
            denials.check(self._context, principal)
        except DeniedError as error:
            if self.error is None:
                self.error = error
                if self.task is not None and not self.is_sending:
                    self.task.cancel()

    def caught(self) -> DeniedError | None:
        """The reason of a cancellation that the caller of this has caught, None if it has another
        source.

        A cancellation of `check` is over with it.
        """
        if self.error is not None and self.task is not None:
            self.task.uncancel()
        return self.error


def rightful(request: Any, call: OpenCall) -> Any:
    """The request of a call; a stream of messages raises DeniedError from the revocation of its
    caller on."""
    return _RightfulMessages(request, call) if hasattr(request, "__aiter__") else request


class _RightfulMessages:
    """The messages of a call. The call itself may end later if its caller does not read the sent
    ones."""

    __slots__ = ("_call", "_messages")

    def __init__(self, messages: AsyncIterator[Any], call: OpenCall) -> None:
        self._call = call
        self._messages = messages

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await anext(aiter(self._messages))
        if self._call.error is not None:
            raise self._call.error
        return message


class CallContext:
    """gRPC's context of an open call, whose end waits until the initial metadata are sent.

    If a task is cancelled while gRPC sends them, gRPC sends them once more with the status. The
    core refuses that, and the call stays open.
    """

    __slots__ = ("_call", "_context", "_has_begun")

    def __init__(self, context: Any, call: OpenCall) -> None:
        self._context = context
        self._call = call
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Send the metadata. Raises DeniedError if the caller has been revoked."""
        await self._begin(self._context.send_initial_metadata(metadata))

    async def write(self, message: Any) -> None:
        """Send a message, the first one with the metadata. Raises DeniedError if the caller has
        been revoked."""
        sending = self._context.write(message)
        await (sending if self._has_begun else self._begin(sending))

    async def _begin(self, sending: Awaitable[None]) -> None:
        if asyncio.current_task() is not self._call.task:
            await sending  # No end of the call cancels this task.
            self._has_begun = True
            return
        self._call.is_sending = True
        try:
            await sending
        finally:
            self._call.is_sending = False
        self._has_begun = True
        if self._call.error is not None:
            raise self._call.error


class OpenCalls:
    """The open calls of one server. Only for the thread of the event loop."""

    def __init__(self, denials: Denials) -> None:
        self._denials = denials
        self._open: dict[Principal, set[OpenCall]] = {}
        self._streams: Counter[tuple[Principal, str]] = Counter()
        denials.follow(self._end_denied)

    @contextmanager
    def entered(
        self, principal: Principal | None, context: Any, stream: str = ""
    ) -> Iterator[OpenCall]:
        """Hold a call open for the body, in the task that serves it.

        `principal` is its caller, None in plaintext, as checked in the same turn of the loop.
        `stream` is the method of a stream that counts, else "". Raises ResourceExhaustedError with
        reason STREAMS for a stream beyond MOST_STREAMS.
        """
        call = OpenCall(context, asyncio.current_task())
        if principal is None:
            yield call
            return
        with self._counted((principal, stream)) if stream else nullcontext():
            yield from self._held(principal, call)

    @contextmanager
    def _counted(self, whose: tuple[Principal, str]) -> Iterator[None]:
        if self._streams[whose] >= MOST_STREAMS:
            raise ResourceExhaustedError(
                f"{whose[0]} has {MOST_STREAMS} streams of {whose[1].rpartition('/')[2]} open "
                "already: end one first",
                field="certificate",
                reason="STREAMS",
            )
        self._streams[whose] += 1
        try:
            yield
        finally:
            self._streams[whose] -= 1
            if not self._streams[whose]:
                del self._streams[whose]

    def _held(self, principal: Principal, call: OpenCall) -> Iterator[OpenCall]:
        calls = self._open.setdefault(principal, set())
        calls.add(call)
        try:
            yield call
        finally:
            calls.discard(call)
            if not calls and self._open.get(principal) is calls:
                del self._open[principal]

    def _end_denied(self) -> None:
        """End calls of denied principals, but not the present one: an operator who revokes itself
        gets an answer."""
        for denial in self._denials.list():
            for call in tuple(self._open.get(denial.principal, ())):
                if call.task is not asyncio.current_task():
                    call.check(denial.principal, self._denials)
