"""The executor of actions, which posts their outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any, assert_never

import structlog

from edgeshard.domain.control import commands
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.ids import NodeId
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.runtime.hub import ControlHub
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.measure_calls import MeasureCalls
from edgeshard_coordinator.control.runtime.planner import Planner
from edgeshard_coordinator.core.values import actions, events
from edgeshard_coordinator.core.values.state import DeploymentRecord, StandbyChoice

log = structlog.get_logger()

SAVE_RETRY_S = 1.0
UNKNOWN_STAGES_NAMED = 10
"""Deployments of one line of the log; a node may hold stages of thousands."""


@dataclass(eq=False)
class ActionExecutor:
    """Performs actions on the newest state of `loop`, and posts their outcomes there."""

    _hub: ControlHub
    _front: RequestFront
    _calls: MeasureCalls
    _store: StateStore
    _planner: Planner
    _loop: StateLoop
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def drain(self) -> None:
        """Wait until every write under way is done."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def perform(self, action: actions.Action) -> None:  # noqa: C901 - one case for each action
        match action:
            case actions.SendCommand():
                log.info("command_sent", node_id=action.node_id, **_described(action.command))
                self._hub.send(
                    action.node_id, action.connection, action.operation_id, action.command
                )
            case actions.ReleaseOrphans():
                log.info("orphans_released", node_id=action.node_id, stages=len(action.stages))
                for each in action.commands:
                    self._hub.send(each.node_id, each.connection, each.operation_id, each.command)
            case actions.TellUnknownStages():
                named = ", ".join(
                    sorted({deployment for deployment, _ in action.stages})[:UNKNOWN_STAGES_NAMED]
                )
                log.warning(
                    "unknown_stages_ignored",
                    node=action.node_name,
                    stages=len(action.stages),
                    deployments=named,
                )
            case actions.SaveDeployment():
                self._spawn(self._save(action.records))
            case actions.ForgetDeployment():
                self._spawn(self._forget(action.record))
            case actions.SaveNode():
                write = self._store.save_node(action.node)
                self._spawn(self._save_of_node(action.node.node_id, write, "node_not_saved"))
            case actions.SaveMeasurements():
                write = self._store.save_measurements(
                    action.node_id, action.measurements, self._loop.now()
                )
                self._spawn(self._save_of_node(action.node_id, write, "measurements_not_saved"))
            case actions.TellMeasured():
                self._calls.finished(action.measured)
            case actions.EndService():
                log.warning(
                    "service_ended",
                    deployment=action.deployment,
                    epoch=action.epoch,
                    reason=action.failure.reason,
                )
                self._front.end_service(
                    action.deployment, action.epoch, action.failure, final=action.final
                )
            case actions.Replan():
                self._spawn(self._replan(action))
            case actions.PlanStandby():
                self._spawn(self._plan_standby(action))
            case actions.DropConnection():
                log.warning("node_silent", node_id=action.node_id)
                self._hub.close(action.node_id, action.connection)
            case _:
                assert_never(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # Each coroutine hands its write to the store's thread before it first waits, and tasks
        # begin in the order they were made: writes keep the order of the actions.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save(self, records: tuple[DeploymentRecord, ...]) -> None:
        failure = await _failure_of(self._store.save(*records))
        if failure is not None:
            for record in records:
                self._save_failed(record, failure)
            return
        for record in records:
            there = record.on_disk
            log.info(
                "deployment_saved", deployment=record.name, phase=there.phase, epoch=there.epoch
            )
            self._loop.post(
                events.DeploymentSaved(
                    record.name, record.uid, record.revision, there.epoch, self._loop.now()
                )
            )

    async def _replan(self, action: actions.Replan) -> None:
        state = self._loop.state
        record = state.deployments.get(action.deployment)
        if record is None or record.uid != action.uid:
            return
        outcome: Placement | EdgeShardError
        try:
            outcome = await self._planner.repair(state, record)
        except EdgeShardError as error:
            log.warning(
                "replan_failed", deployment=record.name, reason=error.reason, why=error.message
            )
            outcome = error
        except Exception as error:
            log.exception("replan_crashed", deployment=record.name)
            outcome = InternalError(f"planning failed: {type(error).__name__}")
        else:
            stages = ",".join(f"{stage.node_name}={stage.layers}" for stage in outcome.stages)
            log.info("replanned", deployment=record.name, epoch=record.epoch, layers=stages)
        self._loop.post(
            events.Replanned(record.name, record.uid, state.version, outcome, self._loop.now())
        )

    async def _plan_standby(self, action: actions.PlanStandby) -> None:
        state = self._loop.state
        record = state.deployments.get(action.deployment)
        if record is None or record.uid != action.uid:
            return
        choices: tuple[StandbyChoice, ...] = ()
        try:
            choices = await self._planner.standbys(state, record)
        except EdgeShardError as error:
            log.warning(
                "standby_not_planned",
                deployment=record.name,
                reason=error.reason,
                why=error.message,
            )
        except Exception:
            log.exception("standby_plan_crashed", deployment=record.name)
        else:
            layers = ",".join(f"{choice.node_name}={choice.layers}" for choice in choices)
            if {(entry.node_id, entry.layers) for entry in record.standbys} != {
                (c.node_id, c.layers) for c in choices
            }:
                log.info(
                    "standby_planned", deployment=record.name, epoch=record.epoch, layers=layers
                )
        self._loop.post(
            events.StandbyPlanned(record.name, record.uid, state.version, choices, self._loop.now())
        )

    async def _forget(self, record: DeploymentRecord) -> None:
        failure = await _failure_of(self._store.forget(record))
        if failure is not None:
            self._save_failed(record, failure)
        else:
            log.info("deployment_removed", deployment=record.name)
            self._loop.post(events.DeploymentForgotten(record.name, record.uid, self._loop.now()))

    async def _save_of_node(self, node_id: NodeId, write: Awaitable[None], refused: str) -> None:
        """Wait for a write that may fail; `refused` is the log's event if it does."""
        failure = await _failure_of(write)
        if failure is not None:
            # Nothing is missing before a restart. After it the node registers again, and is
            # measured again.
            log.error(refused, node_id=node_id, error=failure.message)

    def _save_failed(self, record: DeploymentRecord, error: EdgeShardError) -> None:
        log.error("deployment_not_saved", deployment=record.name, error=error.message)
        self._loop.post(
            events.SaveFailed(
                record.name, record.uid, record.revision, error, SAVE_RETRY_S, self._loop.now()
            )
        )


async def _failure_of(write: Awaitable[None]) -> EdgeShardError | None:
    """The error of a write, of whatever kind, since the state waits for an answer; None if the disk
    has it."""
    try:
        await write
    except EdgeShardError as error:
        return error
    except Exception as error:
        log.exception("write_crashed")
        return InternalError(f"the write failed unexpectedly: {type(error).__name__}")
    return None


def _described(command: commands.Command) -> dict[str, Any]:
    """A command for the log."""
    kind = type(command).__name__
    match command:
        case commands.MeasureCompute():
            return {"kind": kind, "dtype": command.dtype}
        case commands.ProbeLinks():
            return {"kind": kind, "peers": [peer.name for peer in command.peers]}
        case _:
            return {"kind": kind, "deployment": command.deployment, "epoch": command.epoch}
