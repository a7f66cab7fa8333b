"""The dashboard of a coordinator, put together, and its calls to this very coordinator, without a
connection."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from edgeshard.client.connection import Connection
from edgeshard.domain.errors import CancelledRequestError, DeadlineError, EdgeShardError
from edgeshard.domain.identity import DashboardLink, Principal, Role
from edgeshard.gateway.access.auth import Authenticator
from edgeshard.process.clock import SystemClock
from edgeshard.rpc.access import CallFrom
from edgeshard_coordinator.additions.adder import ModelAdder
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.services.auditing import CallAudit
from edgeshard_coordinator.dashboard.app import Dashboard
from edgeshard_coordinator.dashboard.applications import Applications
from edgeshard_coordinator.dashboard.camera import Camera
from edgeshard_coordinator.dashboard.door import LINK_TTL_S, Login
from edgeshard_coordinator.dashboard.feed import Feed
from edgeshard_coordinator.dashboard.operator import Operator, OperatorAdditions
from edgeshard_coordinator.dashboard.places import PageOrigins
from edgeshard_coordinator.dashboard.timeline import Timeline

_PACKAGE = "edgeshard.proto.v1"
_LEFT = CancelledRequestError("the caller left before the answer", reason="CALLER_LEFT")


@dataclass(frozen=True, slots=True)
class OwnContext:
    """The context of a call without a connection: its caller, as gRPC names the peer of a
    connection."""

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

    async def stream(
        self, method: str, request: Any, timeout_s: float | None = None
    ) -> AsyncIterator[Any]:
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


CALL_TIMEOUT_S = 60.0


def open_dashboard(
    coordinator: Coordinator,
    places: PageOrigins,
    keys: Authenticator,
    site: str | None,
    adder: ModelAdder,
) -> tuple[Dashboard, Login]:
    """`keys` checks API keys; `site` is the name in the operators' certificates, None in plaintext;
    `adder` adds models to the coordinator's store."""
    clock, door = SystemClock(), Login(partial(secrets.token_urlsafe, 32))
    audit = CallAudit(coordinator.audit)
    timeline = Timeline(coordinator.questions.traces, audit, clock.now)
    adding = OperatorAdditions(adder, audit)
    applications = Applications(coordinator)
    services = {"AdminService": coordinator.admin, "IdentityService": coordinator.identities}

    def operator(who: str, address: str, check: Callable[[], object]) -> Operator:
        role, _, name = who.partition("/")
        principal = None if site is None else Principal(site, Role(role), name)
        source = CallFrom(address, principal, is_named=True)
        # Only `call` and `stream` of a connection are needed.
        connection = cast(Connection, OwnConnection(services, audit, source, check))
        look, own_adding = partial(timeline.look, source), adding.by(source, who, check)
        return Operator(connection, CALL_TIMEOUT_S, clock, look, applications.usage_of, own_adding)

    feed = Feed(Camera(coordinator, site, time.time(), adder).take)
    dashboard = Dashboard(door, places, feed, operator, keys, applications.feed, clock.now)

    def end_of(who: str) -> None:
        dashboard.end_of(who)
        adding.end_of(who)

    coordinator.on_gone = end_of
    return dashboard, door


def link(door: Login, url: str, who: str) -> DashboardLink:
    """The page at `url`, for an operator."""
    return DashboardLink(f"{url}/#open={door.link(who, SystemClock().now())}", LINK_TTL_S)
