"""An operator of the dashboard: the SDK's calls, what only this coordinator can answer, and the
bodies of actions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.client.connection import Connection
from edgeshard.client.deployment_calls import DeploymentCalls
from edgeshard.client.site_calls import SiteCalls
from edgeshard.domain.audit import BEGUN, OK
from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import DeniedError, EdgeShardError, InvalidArgumentError
from edgeshard.domain.identity import ApiKey
from edgeshard.domain.ids import DeploymentName
from edgeshard.forms import Forms
from edgeshard.rpc.access import CallFrom
from edgeshard_coordinator.additions.adder import ModelAdder
from edgeshard_coordinator.additions.addition_state import Addition, Phase
from edgeshard_coordinator.additions.folders import FolderListing
from edgeshard_coordinator.control.services.auditing import CallAudit

ADD, CANCEL = "AddModel", "CancelAddModel"
CANCELLED = "CANCELLED"


class OperatorAdditions:
    """The additions of all operators."""

    def __init__(self, adder: ModelAdder, audit: CallAudit) -> None:
        self.adder = adder
        self.audit = audit
        self._sources: dict[int, CallFrom] = {}
        self._endings: set[asyncio.Task[None]] = set()
        adder.on_end = self._note_end

    def by(self, source: CallFrom, who: str, check: Callable[[], object]) -> OperatorAdding:
        """The calls of one operator; `check` raises when the right to call has ended."""
        return OperatorAdding(self, source, who, check)

    def began(self, addition: Addition, source: CallFrom) -> None:
        self._sources[addition.number] = source
        self.audit.note(source, ADD, addition.name, BEGUN)

    def end_of(self, who: str) -> None:
        """Cancel all additions of an operator who was revoked."""
        ending = asyncio.create_task(self.adder.end_of(who))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def _note_end(self, addition: Addition) -> None:
        results = {Phase.DONE: OK, Phase.CANCELLED: CANCELLED}
        result = results.get(addition.phase) or (addition.error.reason if addition.error else OK)
        self.audit.note(self._sources.pop(addition.number), ADD, addition.name, result)


@dataclass(frozen=True, slots=True)
class OperatorAdding:
    """The additions as one operator starts and cancels them. Each call checks the right to it after
    its last wait."""

    adding: OperatorAdditions
    source: CallFrom
    who: str
    check: Callable[[], object]

    async def models(self) -> tuple[FolderListing, ...]:
        """The models of the folders that the coordinator's settings name."""
        listings = await self.adding.adder.models()
        self.check()
        return tuple(listings)

    async def add(self, source: str, name: str, width: str) -> Addition:
        """Queue a model. Raises as `ModelAdder.checked` and `ModelAdder.queue` do."""
        adder = self.adding.adder
        try:
            self.check()
            where, model_name = await adder.checked(source, name, width)
            self.check()
            addition = adder.queue(where, model_name, width, self.who)
        except EdgeShardError as error:
            self._note_failure(ADD, name or source, error)
            raise
        self.adding.began(addition, self.source)
        return addition

    async def cancel(self, number: int) -> Addition:
        """End an addition. Raises NotFoundError."""
        adder = self.adding.adder
        try:
            self.check()
            addition = adder.state.get(number)
        except EdgeShardError as error:
            self._note_failure(CANCEL, str(number), error)
            raise
        self.adding.audit.note(self.source, CANCEL, addition.name)
        return await adder.cancel(number)

    def _note_failure(self, what: str, target: str, error: EdgeShardError) -> None:
        if not isinstance(error, DeniedError):
            self.adding.audit.note(self.source, what, target, error.reason)


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


FORMS = Forms("body", "correct it, or reload the page if the coordinator was upgraded")


@dataclass(frozen=True, slots=True)
class Named:
    """The body of an action on one thing of the site."""

    name: str


@dataclass(frozen=True, slots=True)
class Removal:
    """The body of a removal. `typed` is the name again, as the operator typed it."""

    name: str
    typed: str

    def check(self) -> None:
        if self.typed != self.name:
            raise InvalidArgumentError(
                "typed: the typed name differs from the name of the item to remove", field="typed"
            )
