"""An operator's calls to this very coordinator, without a connection: the SDK's, as the dashboard makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.errors import CancelledRequestError, DeadlineError, EdgeShardError
from edgeshard.rpc.access import CallFrom
from edgeshard_coordinator.control.services.auditing import CallAudit

_PACKAGE = "edgeshard.proto.v1"
_LEFT = CancelledRequestError("the caller left before the answer", reason="CALLER_LEFT")


@dataclass(frozen=True, slots=True)
class OwnContext:
    """The context of a call without a connection: its caller, as gRPC names the peer of a connection."""

    source: CallFrom

    def auth_context(self) -> Mapping[str, list[bytes]]:
        principal = self.source.principal
        if principal is None:
            return {}
        return {"transport_security_type": [b"ssl"], "peer_uri": [principal.uri.encode()]}

    def peer(self) -> str:
        return self.source.address


@dataclass(frozen=True, slots=True)
class OwnConnection:
    """A connection like the SDK's to the services of this process, by their names. `audit` receives
    each call like those that arrive by gRPC; `source` is their caller. `check` raises once the
    right to call has ended. Each call begins with it, since an action may wait between two
    calls."""

    services: Mapping[str, Any]
    audit: CallAudit
    source: CallFrom
    check: Callable[[], object]
    target: str = "this coordinator"

    async def call(self, stub: type[Any], method: str, request: Any, timeout_s: float) -> Any:
        """The answer of a method. Raises its typed errors, and DeadlineError."""
        service = stub.__name__.removesuffix("Stub")
        name, answer = f"/{_PACKAGE}.{service}/{method}", None
        end: EdgeShardError | None = _LEFT
        try:
            self.check()
            async with asyncio.timeout(timeout_s):
                context = OwnContext(self.source)
                answer = await getattr(self.services[service], method)(request, context)
            end = None
        except EdgeShardError as error:
            end = error
            raise
        except TimeoutError:
            end = DeadlineError(f"{method} took more than {timeout_s:g} s")
            raise end from None
        finally:
            self.audit.ended(name, self.source, request, answer, end)
        return answer

    async def stream(self, method: str, request: Any, timeout_s: float | None = None) -> AsyncIterator[Any]:
        """The answers of a method of the admin service, one by one."""
        name = f"/{_PACKAGE}.AdminService/{method}"
        end: EdgeShardError | None = _LEFT
        self.audit.began(name, self.source, request)
        try:
            self.check()
            async with aclosing(
                getattr(self.services["AdminService"], method)(request, OwnContext(self.source))
            ) as answers:
                async for answer in answers:
                    yield answer
            end = None
        except EdgeShardError as error:
            end = error
            raise
        finally:
            self.audit.ended(name, self.source, request, None, end)
