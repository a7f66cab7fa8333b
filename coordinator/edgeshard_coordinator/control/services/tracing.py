"""Traces of a deployment's steps: requested from all its nodes at once, and gathered.

The state does not depend on traces, so they bypass it: commands go straight to the control streams,
and the wait for their answers ends with the call.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, NamedTuple

from edgeshard.domain.control.commands import CommandKey, CommandKind, CommandResult, TraceSteps
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.deployments.placement import PlacedStage
from edgeshard.domain.errors import (
    AbortedError,
    DeadlineError,
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
)
from edgeshard.domain.ids import DeploymentName, NodeId, OperationId
from edgeshard.domain.requests.trace import StageTrace, check_seconds
from edgeshard_coordinator.control.runtime.hub import ControlHub
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.core.deployments.deployments import at_node
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

ANSWER_LIMIT_S = 15.0
"""Seconds after the traced time by which every node must have answered."""


class _Asked(NamedTuple):
    deployment: DeploymentName
    stage: PlacedStage
    answer: asyncio.Future[StageTrace]


class Traces:
    """`take` traces; `answered` receives every answer to a command."""

    def __init__(
        self, loop: StateLoop, hub: ControlHub, answer_limit_s: float = ANSWER_LIMIT_S
    ) -> None:
        self._loop = loop
        self._hub = hub
        self._answer_limit_s = answer_limit_s
        self._asked: dict[OperationId, _Asked] = {}

    @property
    def waiting(self) -> int:
        """Answers that a call waits for."""
        return len(self._asked)

    def under_way(self, name: DeploymentName) -> bool:
        """Whether a caller waits for a trace of this deployment, which another would displace."""
        return any(query.deployment == name for query in self._asked.values())

    async def take(self, name: DeploymentName, seconds: float) -> tuple[StageTrace, ...]:
        """The trace of every stage over the next `seconds`, in the order of the stages.

        Raises InvalidArgumentError naming `seconds`, NotFoundError for an unknown deployment, and
        FailedPreconditionError if it is not ready. Raises AbortedError if it stops running
        meanwhile or a newer trace replaces this one, DeadlineError, and a node's error.
        """
        check_seconds(seconds)
        record = _ready(self._loop.state, name)
        queries = self._ask(record, seconds)
        answers = asyncio.gather(*(item.answer for item in queries.values()))
        ended = asyncio.create_task(self._loop.until(lambda state: not still_runs(state, record)))
        either: set[asyncio.Future[Any]] = {answers, ended}
        limit_s = seconds + self._answer_limit_s
        try:
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                return tuple(answers.result())
            if ended.done():
                ended.result()
                raise _stopped(self._loop.state, record)
            silent = ", ".join(
                item.stage.node_name for item in queries.values() if not item.answer.done()
            )
            raise DeadlineError(
                f"no trace arrived from {silent} within {limit_s:g} s", reason="NO_ANSWER"
            )
        finally:
            for operation_id in queries:
                del self._asked[operation_id]
            answers.cancel()
            ended.cancel()
            await asyncio.gather(answers, ended, return_exceptions=True)

    def answered(self, node_id: NodeId, result: CommandResult) -> bool:
        """Take the answer if it is one to a trace."""
        query = self._asked.get(result.operation_id)
        if query is None or query.stage.node_id != node_id:
            return False
        stage, answer = query.stage, query.answer
        if answer.done():
            return True
        if result.failure is not None:
            answer.set_exception(at_node(result.failure, stage.node_name))
        elif result.trace is None or result.trace.stage != stage.index:
            answer.set_exception(
                InternalError(f"node {stage.node_name} answered without a trace of its stage")
            )
        else:
            answer.set_result(result.trace)
        return True

    def _ask(self, record: DeploymentRecord, seconds: float) -> dict[OperationId, _Asked]:
        """Command every node of a deployment that is ready, so that all of them are connected."""
        uid, future = uuid.uuid4().hex, asyncio.get_running_loop().create_future
        stages = record.placement.stages
        keys = [CommandKey(uid, record.epoch, CommandKind.TRACE, stage.index) for stage in stages]
        queries = {
            key.operation_id: _Asked(record.name, stage, future())
            for key, stage in zip(keys, stages, strict=True)
        }
        self._asked |= queries
        command = TraceSteps(record.name, record.epoch, seconds)
        for operation_id, item in queries.items():
            connection = self._loop.state.nodes[item.stage.node_id].connection
            self._hub.send(item.stage.node_id, connection, operation_id, command)
        return queries


def _ready(state: State, name: DeploymentName) -> DeploymentRecord:
    record = state.one_deployment(name, field="deployment")
    if record.phase is not DeploymentPhase.READY:
        raise FailedPreconditionError(
            f"deployment: {name} is {record.phase}, not ready; see `edgectl describe deployment "
            f"{name}`",
            field="deployment",
            reason="DEPLOYMENT_NOT_READY",
        )
    return record


def still_runs(state: State, record: DeploymentRecord) -> bool:
    """Whether the deployment is still at the epoch it was traced at."""
    now = state.deployments.get(record.name)
    if now is None:
        return False
    return (now.uid, now.epoch, now.phase) == (record.uid, record.epoch, DeploymentPhase.READY)


def _stopped(state: State, record: DeploymentRecord) -> EdgeShardError:
    now = state.deployments.get(record.name)
    why = f": {now.failure.message}" if now is not None and now.failure is not None else ""
    return AbortedError(
        f"deployment: {record.name} stopped while it was traced{why}",
        field="deployment",
        reason="DEPLOYMENT_STOPPED",
    )
