"""The parts that an operator's calls work with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from edgeshard.proto.v1 import admin_pb2_grpc
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.control.persistence.operations import Operations
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.site_models import Models
from edgeshard_coordinator.control.runtime.conditions import Conditions
from edgeshard_coordinator.control.runtime.drafts import Drafts
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.planner import Planner
from edgeshard_coordinator.control.services.admin_replans import Replans
from edgeshard_coordinator.control.services.questions import Questions
from edgeshard_coordinator.control.services.site_events import SiteEvents


@dataclass(eq=False)
class AdminCalls(admin_pb2_grpc.AdminServiceServicer):
    """Base of the calls by subject, all of which `AdminServicer` has."""

    _loop: StateLoop
    _front: RequestFront
    _questions: Questions
    _models: Models
    _planner: Planner
    _store: StateStore
    _audit: AuditLog
    _events: SiteEvents
    _conditions: Conditions
    _drafts: Drafts

    def __post_init__(self) -> None:
        self._traffic = self._front.traffic
        self._replans = Replans(self._loop, self._planner, self._store)
        self.operations = Operations(self._store)
        # Between looking a model up and deploying it, it must not be deleted.
        self._model_lock = asyncio.Lock()
