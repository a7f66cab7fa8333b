"""The calls of one server that are open, by who called: those of a principal that is revoked end at once, and its
streams are counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from edgeshard.domain.errors import DeniedError, ResourceExhaustedError
from edgeshard.domain.identity import Principal
from edgeshard.rpc.denials import Denials

MOST_STREAMS = 512
"""Of one principal and method, at one server: processes may share a certificate, and each listens once."""


class OpenCall:
    """`error` is why it must end, None where it need not."""

    __slots__ = ("_context", "error", "is_sending", "task")

    def __init__(self, context: Any, task: asyncio.Task[Any] | None) -> None:
        self._context = context
        self.task = task
        self.error: DeniedError | None = None
        self.is_sending = False
        """It hands a message to gRPC, whose task must not be cancelled then: nobody would send the status."""

    def check(self, principal: Principal, denials: Denials) -> None:
        """End it if the certificate that it was opened with is refused now."""
        if self.task is not None and self.task.done():
            return  # It is over, and its context is not to be asked any more; its generator was not closed yet.
        try:
            denials.check(self._context, principal)
        except DeniedError as error:
            if self.error is None:
                self.error = error
                if self.task is not None and not self.is_sending:
                    self.task.cancel()

    def caught(self) -> DeniedError | None:
        """Asked by who caught a cancellation: why it came, if it came from here; then it is over."""
        if self.error is not None and self.task is not None:
            self.task.uncancel()
        return self.error


class OpenCalls:
    """From the event loop's thread alone."""

    def __init__(self, denials: Denials) -> None:
        self._denials = denials
        self._open: dict[Principal, set[OpenCall]] = {}
        self._streams: Counter[tuple[Principal, str]] = Counter()
        denials.follow(self._end_denied)

    @contextmanager
    def entered(self, principal: Principal | None, context: Any, stream: str = "") -> Iterator[OpenCall]:
        """In the task that serves a call, which was checked in the same turn of the loop; None in plaintext.

        `stream` is the method of a stream that counts. Raises ResourceExhaustedError, with reason STREAMS, for one more
        than a principal may have.
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
                f"{whose[0]} has {MOST_STREAMS} streams of {whose[1].rpartition('/')[2]} open already: end one first",
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
        """All but the call that does it: an operator who revokes itself is told that it was done."""
        for denial in self._denials.list():
            for call in tuple(self._open.get(denial.principal, ())):
                if call.task is not asyncio.current_task():
                    call.check(denial.principal, self._denials)
