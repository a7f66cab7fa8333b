"""The stages this box hosts, and carrying out the core's actions on them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import structlog

from edgeshard.commands import CommandResult, PrepareStage
from edgeshard.device import StagePhase, StageStatus
from edgeshard.errors import EdgeShardError, InternalError
from edgeshard.ids import DeploymentName, Epoch
from edgeshard_agent.core.actions import Action, CloseStage, LoadStage, OpenHead, SendResults
from edgeshard_agent.core.events import (
    ActionStarted,
    Event,
    HeadActivated,
    StageBroke,
    StageClosed,
    StageLoaded,
    StageLoadFailed,
)
from edgeshard_agent.core.state import AgentState, apply, reconcile
from edgeshard_agent.core.survey import Inquiry, StartSurvey, StopSurvey, SurveyEnded, SurveyStopped
from edgeshard_agent.core.tracing import StartTrace, TraceEnded, no_stage
from edgeshard_agent.hosted_stage import HostedStage, LoadedModel, Surroundings, model_key

log = structlog.get_logger()

Progress = Callable[[int, int], None]
Load = Callable[[PrepareStage, Progress], Awaitable[LoadedModel]]
"""Fetches and loads a stage; the callback is told the bytes fetched and the bytes in all."""
Survey = Callable[[Inquiry], Awaitable[None]]
"""Measures and reports; cancelled, it leaves nothing in memory."""
# No deployment has a name like this.
_SURVEY = "(survey)"


@dataclass(slots=True)
class _Loading:
    prepare: PrepareStage
    fetched_bytes: int = 0
    total_bytes: int = 0

    def progress(self, fetched_bytes: int, total_bytes: int) -> None:
        self.fetched_bytes, self.total_bytes = fetched_bytes, total_bytes

    def status(self) -> StageStatus:
        prepare = self.prepare
        return StageStatus(
            deployment=prepare.deployment,
            epoch=prepare.epoch,
            stage=prepare.stage,
            layers=prepare.placed.layers,
            phase=StagePhase.LOADING,
            fetched_bytes=self.fetched_bytes,
            total_bytes=self.total_bytes,
        )


class Hosting:
    """Owns the agent's state: `post` folds an event in and starts what follows from it.

    Everything runs on the event loop, and `post` never waits, so one event is folded at a time. `send_results` gets the
    answers to commands.
    """

    def __init__(
        self,
        load: Load,
        survey: Survey,
        around: Surroundings,
        send_results: Callable[[tuple[CommandResult, ...]], None],
    ) -> None:
        self._load = load
        self._survey = survey
        self._around = around
        self._send_results = send_results
        self._state = AgentState()
        self._stages: dict[DeploymentName, HostedStage] = {}
        self._loading: dict[DeploymentName, _Loading] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alive: set[asyncio.Task[None]] = set()

    def statuses(self) -> tuple[StageStatus, ...]:
        loading = [entry.status() for entry in self._loading.values()]
        held = [stage.status() for name, stage in self._stages.items() if name not in self._loading]
        return (*loading, *held)

    def post(self, event: Event) -> None:
        self._state = apply(self._state, event)
        for action in reconcile(self._state):
            self._state = apply(self._state, ActionStarted(action))
            self._start(action)
        self._around.changed()

    async def close(self) -> None:
        # Also those that a newer action was to end, should it not have begun yet.
        for task in self._alive:
            task.cancel()
        await asyncio.gather(*self._alive, return_exceptions=True)
        for stage in self._stages.values():
            await stage.stop()

    def _start(self, action: Action) -> None:
        match action:
            case SendResults():
                self._send_results(action.results)
            case LoadStage():
                self._run(action.prepare.deployment, partial(self._load_stage, action.prepare))
            case OpenHead():
                self._run(action.deployment, partial(self._open_head, action.deployment, action.epoch))
            case CloseStage():
                self._run(action.deployment, partial(self._close_stage, action.deployment))
            case StartSurvey():
                self._run(_SURVEY, partial(self._run_survey, action.inquiry))
            case StopSurvey():
                self._run(_SURVEY, self._stop_survey)
            case StartTrace():
                self._run(f"(trace) {action.command.deployment}", partial(self._trace, action))

    def _run(self, subject: str, work: Callable[[], Awaitable[Event]]) -> None:
        """Do one thing at a time per deployment, and for the survey; a newer action ends an older one first."""
        former = self._tasks.get(subject)

        async def run() -> None:
            if former is not None and not former.done():
                former.cancel()
                await asyncio.gather(former, return_exceptions=True)
            try:
                self.post(await work())
            except Exception:
                # The task is kept and awaited by nobody: unsaid here, it would never be said.
                log.exception("hosting_crashed", subject=subject)

        task = self._tasks[subject] = asyncio.create_task(run(), name=f"hosting-{subject}")
        self._alive.add(task)
        task.add_done_callback(self._alive.discard)

    async def _load_stage(self, prepare: PrepareStage) -> Event:
        deployment, epoch = prepare.deployment, prepare.epoch
        try:
            loading = self._loading[deployment] = _Loading(prepare)
            try:
                loaded = await self._keep_weights(prepare)
                if loaded is None:
                    await self._drop(deployment)  # its memory must be free before new weights come
                    loaded = await self._load(prepare, loading.progress)
            finally:
                del self._loading[deployment]
            # Known before it starts: a start that fails is followed by a close, which must find it.
            stage = self._stages[deployment] = HostedStage(prepare, loaded, self._around, self._broke)
            stage.start()
        except EdgeShardError as error:
            return StageLoadFailed(deployment, epoch, error)
        except Exception as error:
            log.exception("stage_load_crashed", deployment=deployment)
            why = InternalError(f"loading stage {prepare.stage} crashed: {type(error).__name__}: {error}")
            return StageLoadFailed(deployment, epoch, why)
        log.info("stage_ready", deployment=deployment, epoch=epoch, layers=str(prepare.placed.layers))
        return StageLoaded(deployment, epoch, stage.status())

    async def _open_head(self, deployment: DeploymentName, epoch: Epoch) -> Event:
        try:
            await self._stages[deployment].activate()
        except EdgeShardError as error:
            return HeadActivated(deployment, epoch, error)
        except Exception as error:
            log.exception("activate_crashed", deployment=deployment)
            why = InternalError(f"activating the head crashed: {type(error).__name__}: {error}")
            return HeadActivated(deployment, epoch, why)
        return HeadActivated(deployment, epoch)

    async def _close_stage(self, deployment: DeploymentName) -> Event:
        await self._drop(deployment)
        log.info("stage_released", deployment=deployment)
        return StageClosed(deployment)

    async def _run_survey(self, inquiry: Inquiry) -> Event:
        try:
            await self._survey(inquiry)
        except EdgeShardError as error:
            return SurveyEnded(inquiry, error)
        except Exception as error:
            log.exception("survey_crashed")
            return SurveyEnded(inquiry, InternalError(f"measuring crashed: {type(error).__name__}: {error}"))
        return SurveyEnded(inquiry)

    async def _stop_survey(self) -> Event:
        return SurveyStopped()  # the survey itself was cancelled before this began

    async def _trace(self, action: StartTrace) -> Event:
        command = action.command
        stage = self._stages.get(command.deployment)
        if stage is not None:
            trace = await stage.trace(command.seconds)
            if self._stages.get(command.deployment) is stage:
                return TraceEnded(action.operation_id, command.deployment, trace)
        gone = no_stage(command.deployment, command.epoch)
        return TraceEnded(action.operation_id, command.deployment, error=gone)

    async def _keep_weights(self, prepare: PrepareStage) -> LoadedModel | None:
        """Stop the stage of the epoch before; its weights, emptied, when they serve this epoch too.

        The stage stays in `_stages`: whoever comes next when this is cancelled stops it again and finds its weights.
        """
        former = self._stages.get(prepare.deployment)
        if former is None:
            return None
        await former.stop()
        if former.loaded.key != model_key(prepare):
            return None
        await self._around.worker.run(former.loaded.model.reset)
        return former.loaded

    async def _drop(self, deployment: DeploymentName) -> None:
        """Stop the stage, if there is one, and give its memory and its pin back."""
        stage = self._stages.get(deployment)
        if stage is None:
            return
        await stage.stop()
        del self._stages[deployment]
        stage.loaded.pin.release()
        del stage
        # A stage and its parts know each other, so that without the collector its weights would stay for long. On the
        # compute thread, behind the step that may still be using them.
        await self._around.worker.run(gc.collect)

    def _broke(self, deployment: DeploymentName, epoch: Epoch) -> None:
        self.post(StageBroke(deployment, epoch))
