"""Everything of a coordinator, put together on one server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from edgeshard.domain.clock import Clock
from edgeshard.domain.control.commands import Deny
from edgeshard.domain.errors import (
    DeniedError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.identity import Principal, Role
from edgeshard.domain.nodes.device import Condition
from edgeshard.metrics.exposition import Metrics
from edgeshard.metrics.families import OwnCondition
from edgeshard.proto.v1 import (
    admin_pb2_grpc,
    coordinator_pb2_grpc,
    head_pb2_grpc,
    identity_pb2_grpc,
    inference_pb2_grpc,
    store_pb2_grpc,
)
from edgeshard.rpc.server import Server
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.requests.chats import Chats
from edgeshard_coordinator.control.requests.request_front import BACKLOG_LIMIT, RequestFront
from edgeshard_coordinator.control.requests.site_models import Models
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.control.runtime.conditions import Conditions
from edgeshard_coordinator.control.runtime.drafts import Drafts
from edgeshard_coordinator.control.runtime.executor import ActionExecutor
from edgeshard_coordinator.control.runtime.head_watch import HeadWatch
from edgeshard_coordinator.control.runtime.hub import ControlHub
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.measure_calls import MeasureCalls
from edgeshard_coordinator.control.runtime.planner import Planner
from edgeshard_coordinator.control.services.admin_service import AdminServicer
from edgeshard_coordinator.control.services.auditing import CallAudit
from edgeshard_coordinator.control.services.coordinator_service import DENIALS, CoordinatorServicer
from edgeshard_coordinator.control.services.head_service import HeadServicer
from edgeshard_coordinator.control.services.identity_service import IdentityServicer, operator_name
from edgeshard_coordinator.control.services.inference_service import InferenceServicer, client_name
from edgeshard_coordinator.control.services.metrics import CoordinatorMetrics
from edgeshard_coordinator.control.services.questions import Questions
from edgeshard_coordinator.control.services.site_events import SiteEvents
from edgeshard_coordinator.core.nodes import lost_nodes
from edgeshard_coordinator.core.placement.problem import Placer
from edgeshard_coordinator.core.profiling.measuring import restored
from edgeshard_coordinator.core.values.quotas import Quota, Quotas
from edgeshard_coordinator.core.values.state import State, Timings
from edgeshard_coordinator.membership.api_keys import KeyBook
from edgeshard_coordinator.membership.membership import Membership

TRAFFIC_SAVED_EVERY_S = 15.0
EXPIRY_S = 0.1
"""Seconds between two checks of parked requests."""


class Coordinator:
    """A coordinator on a server. `await start()` serves and returns its address; `await stop()`
    ends every stream, then the server.

    `model_service` is the model store's servicer, None if a test needs none. The server's watch
    adds entries to the same `audit`, which keeps none by default. `membership` decides who belongs
    to the site, None in plaintext; `keys` decides who may connect by HTTP. `own_condition` reads
    the condition of this process's machine and `about` describes the process.
    """

    def __init__(  # noqa: PLR0913 - the parts it is put together of
        self,
        server: Server,
        store: StateStore,
        models: Models,
        model_service: store_pb2_grpc.ModelStoreServiceServicer | None,
        placer: Placer,
        clock: Clock,
        timings: Timings = Timings(),  # noqa: B008 - frozen
        backlog_limit: int = BACKLOG_LIMIT,
        quotas: Quotas = Quotas(),  # noqa: B008 - frozen
        audit: AuditLog | None = None,
        membership: Membership | None = None,
        keys: KeyBook | None = None,
        own_condition: Callable[[], Condition | None] = lambda: None,
        about: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._server = server
        self._store = store
        self._clock = clock
        self._timings = timings
        self._membership = membership
        self.keys = keys
        self.models = models
        self._chores: list[asyncio.Task[None]] = []
        self.audit = audit or AuditLog(None, clock)
        self.events = SiteEvents()
        self._hub = ControlHub()
        self._calls = MeasureCalls()
        self.conditions = Conditions(own_condition)
        self.loop = StateLoop(State(instance=""), clock, self.events.note)
        quota_of_key = _no_quota if keys is None else keys.quota_of
        self.front = RequestFront(
            self._state, TrafficBook(), clock.now, backlog_limit, quotas, quota_of_key
        )
        self.chats = Chats(self.front.served.record_of, models)
        self._planner = Planner(self._state, models, placer, self.front.traffic)
        self._executor = ActionExecutor(
            self._hub, self.front, self._calls, store, self._planner, self.loop
        )
        self.questions = Questions.over(self.loop, self._hub, self._calls, models, about)
        self.on_gone: Callable[[str], None] = _nothing
        """Hears of an operator whose certificate was revoked, or of an API key that was."""
        self._open_services(model_service)
        counts = CoordinatorMetrics(
            self._state, self.front, models, self.conditions, self._agents.suspicions, clock.now
        )
        self.metrics = Metrics(counts.collect, OwnCondition(own_condition).collect)

    def _open_services(
        self, model_service: store_pb2_grpc.ModelStoreServiceServicer | None
    ) -> None:
        """Make the services, and add them to the server."""
        loop = self.loop
        front = self.front
        hub = self._hub
        questions = self.questions
        noted = CallAudit(self.audit)
        self._agents = CoordinatorServicer(
            loop, hub, questions, self._server.denials, noted, self.conditions
        )
        self._heads = HeadWatch(loop, front.occupied, self._agents.suspicions)
        self._inference = InferenceServicer(loop, front, self.models, noted, self.chats)
        self.identities = IdentityServicer(loop, hub, self._store, self._membership, self.keys)
        drafts = Drafts(self.models, self.chats)
        self.admin = AdminServicer(
            *(
                loop,
                front,
                questions,
                self.models,
                self._planner,
                self._store,
                self.audit,
                self.events,
            ),
            self.conditions,
            drafts,
        )
        grpc = self._server.grpc
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self._agents, grpc)
        head_pb2_grpc.add_HeadServiceServicer_to_server(
            HeadServicer(loop, front, self._heads), grpc
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, grpc)
        identity_pb2_grpc.add_IdentityServiceServicer_to_server(self.identities, grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.admin, grpc)
        if model_service is not None:
            store_pb2_grpc.add_ModelStoreServiceServicer_to_server(model_service, grpc)

    async def _end_of(self, principal: Principal) -> None:
        """End all that a revoked principal has open: a node leaves the site, a client's requests
        end."""
        if principal.role is Role.AGENT:
            for node in [
                node for node in self.loop.state.nodes.values() if node.name == principal.id
            ]:
                await self.identities.expel(node)
            return
        revoked = DeniedError(
            f"the certificate of {principal} was revoked", field="certificate", reason="REVOKED"
        )
        self.front.end_of_client(client_name(principal), revoked)
        self.on_gone(operator_name(principal))

    def _end_of_key(self, identity: str) -> None:
        self.front.end_of_client(
            identity, DeniedError("the API key was revoked", field="api_key", reason="REVOKED")
        )
        self.front.meter.forget_key(identity)
        self.on_gone(identity)

    def _tell_denials(self) -> None:
        self._hub.tell_all(DENIALS, Deny(self._server.denials.list()))

    def _state(self) -> State:
        return self.loop.state

    async def start(self) -> str:
        """Restore the state, then listen. Raises what StateStore.open and Server.start raise."""
        now = self._clock.now()
        state = await self._store.open(uuid.uuid4().hex, self._timings, now)
        state = restored(
            state, {digest: manifest.config for manifest, digest in self.models.list()}, now
        )
        self.loop.state = lost_nodes.started(state, now)
        self.front.restore(state.deployments.values())
        self.front.traffic.restore(await self._store.load_traffic())
        if self._membership is not None:
            await self._membership.open(self._end_of, self._tell_denials)
        if self.keys is not None:
            await self.keys.open(self._end_of_key)
        chores = (self._keep_traffic(), self._expire(), self._heads.run())
        self._chores = [asyncio.create_task(chore) for chore in chores]
        self.audit.start()
        self.loop.start(self._executor, self.front.all_active_requests)
        try:
            return await self._server.start()
        except BaseException:
            await self._stop_state()
            await self.audit.stop()
            raise

    async def stop(self) -> None:
        """End requests with UnavailableError, then nodes' streams and the server. A second call
        changes nothing."""
        error = UnavailableError(
            "the coordinator is shutting down", reason="SHUTTING_DOWN", retry_after_s=2.0
        )
        if self._agents.closing:
            return
        self._agents.closing = True
        # First: streams that end from now on must not be taken for lost nodes, and saved as such.
        await self._stop_state()
        self.front.close(error)
        self._inference.end_listeners()
        self._calls.close(error)
        self.events.close(error)
        self._hub.close_all()
        await self.chats.close()
        await self._server.stop()
        await self.audit.stop()

    async def _keep_traffic(self) -> None:
        """Write the lengths of requests now and then, since no request waits for that. A
        coordinator that is killed forgets the newest."""
        while True:
            await asyncio.sleep(TRAFFIC_SAVED_EVERY_S)
            await self._save_traffic()

    async def _expire(self) -> None:
        while True:
            await self.front.occupied.wait()
            await asyncio.sleep(EXPIRY_S)
            self.front.expire()

    async def _save_traffic(self) -> None:
        changed = self.front.traffic.changed()
        # If the disk refuses, more important writes report it, and the next pass writes this too.
        with suppress(InternalError, ResourceExhaustedError):
            if changed:
                await self._store.save_traffic(changed)
                self.front.traffic.saved(changed)

    async def _stop_state(self) -> None:
        for chore in self._chores:
            chore.cancel()
        await self.admin.operations.stop()
        await self.loop.stop()
        await self._executor.drain()
        await self._save_traffic()
        await self._store.close()
        for book in (self._membership, self.keys):
            if book is not None:
                await book.close()


def _nothing(who: str) -> None:
    pass


def _no_quota(identity: str) -> Quota | None:
    """The limits of an identity if no API keys are kept: none of its own."""
    return None
