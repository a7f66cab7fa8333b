"""What every call of an operator works with."""

from __future__ import annotations

import asyncio

from edgeshard.proto.v1 import admin_pb2_grpc
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.control.persistence.operations import Operations
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.requests.models import Models
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.runtime.calls import MeasureCalls
from edgeshard_coordinator.control.runtime.conditions import Conditions
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.planner import Planner
from edgeshard_coordinator.control.services.questions import Questions
from edgeshard_coordinator.control.services.replan import Replans
from edgeshard_coordinator.control.services.site_events import SiteEvents


class AdminCalls(admin_pb2_grpc.AdminServiceServicer):
    """Base of the calls by subject, which `AdminServicer` has all of."""

    def __init__(  # noqa: PLR0913 - an operator asks for everything
        self,
        loop: StateLoop,
        front: RequestFront,
        calls: MeasureCalls,
        questions: Questions,
        models: Models,
        planner: Planner,
        store: StateStore,
        audit: AuditLog,
        events: SiteEvents,
        conditions: Conditions,
    ) -> None:
        self._loop = loop
        self._front = front
        self._traffic = front.traffic
        self._calls = calls
        self._questions = questions
        self._models = models
        self._planner = planner
        self._store = store
        self._audit = audit
        self._events = events
        self._conditions = conditions
        self._replans = Replans(loop, planner, store)
        self.operations = Operations(store)
        # Between looking a model up and deploying it, it must not be deleted.
        self._model_lock = asyncio.Lock()
