"""An operator of the dashboard: the SDK's calls, and what only this coordinator can answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from edgeshard.client.connection import Connection
from edgeshard.client.deployment_calls import DeploymentCalls
from edgeshard.client.site_calls import SiteCalls
from edgeshard.domain.clock import Clock
from edgeshard.domain.identity import ApiKey
from edgeshard.domain.ids import DeploymentName
from edgeshard_coordinator.dashboard.adding import OperatorAdding


class Operator(SiteCalls, DeploymentCalls):
    """An operator's calls. `slice_of` returns the newest slice of a deployment's timeline,
    `usage_of` an API key's usage since the coordinator began, in JSON types; `adding` adds models
    at the coordinator."""

    def __init__(
        self,
        connection: Connection,
        timeout_s: float,
        clock: Clock,
        slice_of: Callable[[DeploymentName], Awaitable[Any]],
        usage_of: Callable[[ApiKey], Mapping[str, Any]],
        adding: OperatorAdding,
    ) -> None:
        super().__init__(connection, timeout_s, clock)
        self.slice_of = slice_of
        self.usage_of = usage_of
        self.list_folders = adding.models
        self.add_at_coordinator = adding.add
        self.cancel_addition = adding.cancel


Action = Callable[[Operator, Mapping[str, Any]], Coroutine[Any, Any, Any]]
"""Takes the parameters or the body of a request, and returns the answer in JSON types."""
