"""The dashboard of a coordinator, put together."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from edgeshard.client.connection import Connection
from edgeshard.domain.identity import DashboardLink, Principal, Role
from edgeshard.gateway.access.auth import Authenticator
from edgeshard.process.clock import SystemClock
from edgeshard.rpc.access import CallFrom
from edgeshard_coordinator.additions.adder import ModelAdder
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.services.auditing import CallAudit
from edgeshard_coordinator.dashboard.adding import OperatorAdditions
from edgeshard_coordinator.dashboard.app import Dashboard
from edgeshard_coordinator.dashboard.applications import Applications
from edgeshard_coordinator.dashboard.camera import Camera
from edgeshard_coordinator.dashboard.door import LINK_TTL_S, Login
from edgeshard_coordinator.dashboard.feed import Feed
from edgeshard_coordinator.dashboard.operator import Operator
from edgeshard_coordinator.dashboard.own_calls import OwnConnection
from edgeshard_coordinator.dashboard.places import PageOrigins
from edgeshard_coordinator.dashboard.timeline import Timeline

CALL_TIMEOUT_S = 60.0


def open_dashboard(
    coordinator: Coordinator, places: PageOrigins, keys: Authenticator, site: str | None, adder: ModelAdder
) -> tuple[Dashboard, Login]:
    """`keys` checks API keys; `site` is the name in the operators' certificates, None in plaintext; `adder` adds models
    to the coordinator's store."""
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
