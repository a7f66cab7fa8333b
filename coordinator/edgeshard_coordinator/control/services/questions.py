"""The questions to nodes that the state does not depend on, such as those about packed units."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from edgeshard.domain.control.commands import CommandResult, DropPacked, ListPacked
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import NodeId, OperationId
from edgeshard.domain.models.packed_units import PackedUnit
from edgeshard_coordinator.control.requests.site_models import Models
from edgeshard_coordinator.control.runtime.hub import ControlHub, NodeRequests
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.measure_calls import MeasureCalls
from edgeshard_coordinator.control.services.dumping import Dumps
from edgeshard_coordinator.control.services.tracing import Traces
from edgeshard_coordinator.core.deployments.deployments import at_node

ANSWER_LIMIT_S = 10.0


class _Asked(NamedTuple):
    node_id: NodeId
    answer: asyncio.Future[tuple[PackedUnit, ...]]


class Packed:
    """`list` and `drop` send a query to a node; `answered` receives every answer to a command."""

    def __init__(
        self,
        loop: StateLoop,
        hub: ControlHub,
        models: Models,
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self._loop = loop
        self._models = models
        self._node_requests = NodeRequests(loop, hub, answer_limit_s, "answer about packed units")
        self._asked: dict[OperationId, _Asked] = {}

    @property
    def waiting(self) -> int:
        """Answers that a call waits for."""
        return len(self._asked)

    async def list(self, node: str) -> tuple[PackedUnit, ...]:
        """The packed units of a node, which is given by its name or id. Raises NotFoundError,
        UnavailableError, DeadlineError, and the node's error."""
        return await self._ask(node, ListPacked())

    async def drop(self, node: str, ids: Sequence[str]) -> tuple[PackedUnit, ...]:
        """Remove these units, or all that are not in use if `ids` is empty; those in use stay.
        Raises as `list` does."""
        return await self._ask(node, DropPacked(tuple(ids)))

    def answered(self, node_id: NodeId, result: CommandResult) -> bool:
        """Take the answer if it is one to a question of this class."""
        query = self._asked.get(result.operation_id)
        if query is None or query.node_id != node_id:
            return False
        if query.answer.done():
            return True
        if result.failure is not None:
            query.answer.set_exception(result.failure)
        else:
            query.answer.set_result(result.packed)
        return True

    async def _ask(self, node: str, command: ListPacked | DropPacked) -> tuple[PackedUnit, ...]:
        target = self._loop.state.node_named(node)
        operation_id = OperationId(f"{uuid.uuid4().hex}/packed")
        answer = asyncio.get_running_loop().create_future()
        self._asked[operation_id] = _Asked(target.node_id, answer)
        try:
            units = await self._node_requests.answer(target, operation_id, command, answer)
        except EdgeShardError as error:
            raise at_node(error, target.name) from None
        finally:
            del self._asked[operation_id]
        names = {digest[:12]: manifest.name for manifest, digest in self._models.list()}
        return tuple(replace(unit, model_name=names.get(unit.model, "")) for unit in units)


@dataclass(slots=True)
class Questions:
    """The questions that may wait for nodes' answers, by their subject."""

    calls: MeasureCalls
    traces: Traces
    dumps: Dumps
    packed: Packed

    @classmethod
    def over(
        cls,
        loop: StateLoop,
        hub: ControlHub,
        calls: MeasureCalls,
        models: Models,
        about: Callable[[], dict[str, Any]],
    ) -> Questions:
        """Questions over the control streams of `hub`; `about` describes this process."""
        return cls(calls, Traces(loop, hub), Dumps(loop, hub, about), Packed(loop, hub, models))

    def answered(self, node_id: NodeId, result: CommandResult) -> bool:
        """Whether a node's answer to a command belonged to one of these questions, which has it
        then."""
        takers = (self.traces.answered, self.dumps.refused, self.packed.answered)
        return any(took(node_id, result) for took in takers)
