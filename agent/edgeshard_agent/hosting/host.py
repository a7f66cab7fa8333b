"""The stages this node hosts; carries out the core's actions on them, and answers operator
requests.

Operator requests are dumps of the node's state and newest events, and its packed files.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from edgeshard.debugging.dump import refusal, to_text
from edgeshard.debugging.labels import labels
from edgeshard.debugging.ring import EventRing, RingView
from edgeshard.domain.control.commands import (
    MAX_LISTED_PACKED,
    CommandResult,
    DropPacked,
    KeepStandby,
    ListPacked,
    PrepareStage,
)
from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.ids import DeploymentName, Epoch, OperationId
from edgeshard.domain.nodes.device import DeviceFacts, StagePhase, StageStatus
from edgeshard.process.logs import debug_logged
from edgeshard_agent.core import events, measuring
from edgeshard_agent.core.node_actions import (
    Action,
    CloseStage,
    LoadStage,
    OpenHead,
    ReportStarted,
    SendResults,
)
from edgeshard_agent.core.node_state import AgentState, apply, machine, reconcile, worth_keeping
from edgeshard_agent.core.standby import SetStandby, StandbySet
from edgeshard_agent.core.tracing import StartTrace, TraceEnded, no_stage
from edgeshard_agent.hosting.around import (
    HeldWeights,
    HostServices,
    LoadedModel,
    LoadProgress,
    Tools,
    model_key,
    weights_key,
)
from edgeshard_agent.hosting.standbys import Standbys
from edgeshard_agent.store.packed_units import PackedUnits

if TYPE_CHECKING:
    from edgeshard_agent.engine.pipeline_head import Head
    from edgeshard_agent.hosting.hosted_stage import HostedStage


T = TypeVar("T")

log = structlog.get_logger()

# No deployment has a name like this.
_MEASURING = "(measuring)"


@dataclass(slots=True)
class _Loading:
    prepare: PrepareStage
    progress: LoadProgress = field(default_factory=LoadProgress)

    def status(self) -> StageStatus:
        prepare, progress = self.prepare, self.progress
        return StageStatus(
            deployment=prepare.deployment,
            epoch=prepare.epoch,
            stage=prepare.stage,
            layers=prepare.placed.layers,
            phase=StagePhase.LOADING,
            fetched_bytes=progress.fetched_bytes,
            total_bytes=progress.total_bytes,
            filling=progress.filling,
        )


@dataclass(eq=False)
class Hosting:
    """Owns the agent's state: `post` folds an event in and starts what follows from it.

    Everything runs on the event loop, and `post` never waits, so one event is folded at a time.
    Before `start` it computes nothing.
    """

    around: HostServices
    send_results: Callable[[tuple[CommandResult, ...]], None]
    """Gets the answers to commands."""
    report_started: Callable[[DeviceFacts], None]
    """Gets the node's facts once it can compute."""

    def __post_init__(self) -> None:
        self._given: Tools | None = None
        self._state = AgentState()
        self._ring: EventRing[AgentState, events.Event] = EventRing()
        self._stages: dict[DeploymentName, HostedStage] = {}
        self._heads: dict[DeploymentName, Head] = {}
        """The heads of first stages: their requests outlive an epoch, and the stage itself when its
        layers change."""
        self._loading: dict[DeploymentName, _Loading] = {}
        self._standbys = Standbys(self.around.changed)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alive: set[asyncio.Task[None]] = set()

    def start(self, tools: Tools, facts: DeviceFacts) -> None:
        """Begin to compute with these tools."""
        self._given = tools
        self.post(events.Started(facts))

    @property
    def _tools(self) -> Tools:
        assert self._given is not None  # the core requests nothing that needs them before
        return self._given

    def statuses(self) -> tuple[StageStatus, ...]:
        loading = [entry.status() for entry in self._loading.values()]
        stages = [
            stage.status() for name, stage in self._stages.items() if name not in self._loading
        ]
        return (*loading, *stages, *self._standbys.statuses())

    def stages(self) -> tuple[HostedStage, ...]:
        return tuple(self._stages.values())

    def recorded(self) -> tuple[AgentState, RingView[AgentState, events.Event]]:
        """The state, and the newest events that led to it."""
        return self._state, self._ring.view(self._state)

    def post(self, event: events.Event) -> None:
        self._apply(event)
        for action in reconcile(self._state):
            self._apply(events.ActionStarted(action))
            self._start(action)
        self.around.changed()

    def _apply(self, event: events.Event) -> None:
        before, now = self._state, self.around.clock.now()
        try:
            self._state = apply(before, event)
        except Exception as error:
            self._ring.record(before, event, now, refusal(error))
            raise
        self._ring.record(before, worth_keeping(event), now)
        if debug_logged():
            _say(event)

    async def close(self) -> None:
        # Also tasks that a newer action should have ended but has not yet.
        for task in self._alive:
            task.cancel()
        await asyncio.gather(*self._alive, return_exceptions=True)
        for stage in self._stages.values():
            await stage.stop()
        for head in self._heads.values():
            await head.close()

    def _start(self, action: Action) -> None:
        match action:
            case ReportStarted():
                self.report_started(action.facts)
            case SendResults():
                self.send_results(action.results)
            case LoadStage():
                self._run(action.prepare.deployment, partial(self._load_stage, action.prepare))
            case OpenHead():
                self._run(
                    action.deployment, partial(self._open_head, action.deployment, action.epoch)
                )
            case CloseStage():
                self._run(action.deployment, partial(self._close_stage, action.deployment))
            case measuring.StartMeasuring():
                self._run(_MEASURING, partial(self._run_measuring, action.task))
            case measuring.StopMeasuring():
                self._run(_MEASURING, self._stop_measuring)
            case SetStandby():
                self._run(
                    _standby_task(action.command.deployment),
                    partial(self._set_standby, action.command),
                )
            case StartTrace():
                self._run(f"(trace) {action.command.deployment}", partial(self._trace, action))

    def _run(self, subject: str, work: Callable[[], Awaitable[events.Event]]) -> None:
        """Do one thing at a time per deployment, and for the measuring; a newer action ends an
        older one first."""
        former = self._tasks.get(subject)

        async def run() -> None:
            await _end(former)
            try:
                self.post(await work())
            except Exception:
                # No one awaits the task: an error not logged here would never be seen.
                log.exception("hosting_crashed", subject=subject)

        task = self._tasks[subject] = asyncio.create_task(run(), name=f"hosting-{subject}")
        self._alive.add(task)
        task.add_done_callback(self._alive.discard)

    async def _load_stage(self, prepare: PrepareStage) -> events.Event:
        deployment, epoch = prepare.deployment, prepare.epoch
        what = f"loading stage {prepare.stage}"
        stage = await _tried(
            lambda: self._open_stage(prepare), "stage_load_crashed", what, deployment=deployment
        )
        if isinstance(stage, EdgeShardError):
            return events.StageLoadFailed(deployment, epoch, stage)
        log.info(
            "stage_ready", deployment=deployment, epoch=epoch, layers=str(prepare.placed.layers)
        )
        return events.StageLoaded(deployment, epoch, stage.status())

    async def _open_stage(self, prepare: PrepareStage) -> HostedStage:
        deployment = prepare.deployment
        loading = self._loading[deployment] = _Loading(prepare)
        try:
            loaded = await self._keep_weights(prepare)
            if loaded is None:
                loaded = await self._load(prepare, loading)
        finally:
            del self._loading[deployment]
        # Registered before it starts: a failed start is followed by a close, which must find it.
        head = self._heads.get(deployment) if prepare.stage == 0 else None
        stage = self._stages[deployment] = self._tools.wire(
            prepare, loaded, self.around, self._broke, head
        )
        await self._keep_head(deployment, stage.head)
        stage.start()
        return stage

    async def _load(self, prepare: PrepareStage, loading: _Loading) -> LoadedModel:
        """Load the parts that this node has not in memory yet, neither in its former stage nor as a
        standby."""
        former = await self._retired(prepare)
        try:
            await _end(self._tasks.get(_standby_task(prepare.deployment)))
            held_weights = [
                item for item in (former, self._standbys.usable(prepare)) if item is not None
            ]
            return await self._tools.load(prepare, loading.progress, held_weights)
        finally:
            if former is not None:
                former.pin.release()

    async def _retired(self, prepare: PrepareStage) -> HeldWeights | None:
        """Weights of the former stage that the new one can share; the memory of all others is free
        afterwards."""
        former = self._stages.get(prepare.deployment)
        # Weights that stream are not shared.
        streams = prepare.placed.weight_budget_bytes > 0
        if former is None or former.loaded.key[0] != weights_key(prepare) or streams:
            del former  # its memory is free before new weights come
            await self._drop(prepare.deployment)
            return None
        del self._stages[prepare.deployment]
        pin = former.loaded.pin
        try:
            # To its end, though this be called off: what streams has threads that only that ends.
            retired = await asyncio.shield(
                self.around.worker.run(former.loaded.retired, prepare.placed.layers)
            )
            del former
            await self.around.worker.run(gc.collect)
        except BaseException:
            pin.release()
            raise
        return retired

    async def _set_standby(self, command: KeepStandby) -> events.Event:
        what, deployment = "loading a standby", command.deployment
        load = self._tools.load_standby
        error = await _tried(
            lambda: self._standbys.set(command, load),
            "standby_crashed",
            what,
            deployment=deployment,
        )
        return StandbySet(command, error)

    async def _open_head(self, deployment: DeploymentName, epoch: Epoch) -> events.Event:
        what = "activating the head"
        error = await _tried(
            lambda: self._stages[deployment].activate(),
            "activate_crashed",
            what,
            deployment=deployment,
        )
        return events.HeadActivated(deployment, epoch, error)

    async def _close_stage(self, deployment: DeploymentName) -> events.Event:
        await self._drop(deployment)
        await self._keep_head(deployment, None)
        log.info("stage_released", deployment=deployment)
        return events.StageClosed(deployment)

    async def _run_measuring(self, task: measuring.MeasuringTask) -> events.Event:
        held_bytes = self._held_bytes()
        error = await _tried(
            lambda: self._tools.measure(task, held_bytes), "measuring_crashed", "measuring"
        )
        return measuring.MeasuringEnded(task, error)

    def _held_bytes(self) -> int | None:
        """Memory of all stages, as planned, and of standbys; None if there are none."""
        placed = [stage.prepare.placed for stage in self._stages.values()]
        sizes = [stage.parameter_bytes + stage.kv_bytes + stage.workspace_bytes for stage in placed]
        sizes += [standby.parameter_bytes for standby in self._standbys.statuses()]
        return sum(sizes) if sizes else None

    async def _stop_measuring(self) -> events.Event:
        return measuring.MeasuringStopped()  # the measuring itself was cancelled before this began

    async def _trace(self, action: StartTrace) -> events.Event:
        command = action.command
        stage = self._stages.get(command.deployment)
        if stage is not None:
            trace = await stage.trace(command.seconds)
            if self._stages.get(command.deployment) is stage:
                return TraceEnded(action.operation_id, command.deployment, trace)
        error = no_stage(command.deployment, command.epoch)
        return TraceEnded(action.operation_id, command.deployment, error=error)

    async def _keep_weights(self, prepare: PrepareStage) -> LoadedModel | None:
        """Stop the stage of the former epoch; returns its weights, with KV emptied, when they serve
        this epoch too.

        The stage stays in `_stages`: if this is cancelled, the next action stops it again and finds
        its weights.
        """
        former = self._stages.get(prepare.deployment)
        if former is None:
            return None
        await former.stop()
        if former.loaded.key != model_key(prepare) or former.loaded.model.is_damaged:
            return None
        await self.around.worker.run(former.loaded.reset)
        return former.loaded

    async def _keep_head(self, deployment: DeploymentName, head: Head | None) -> None:
        """Have this head for the deployment from now on; a former one ends with its requests."""
        former = self._heads.pop(deployment, None)
        if head is not None:
            self._heads[deployment] = head
        if former is not None and former is not head:
            await former.close()

    async def _drop(self, deployment: DeploymentName) -> None:
        """Stop the stage, if there is one, and give its memory and its pin back."""
        stage = self._stages.get(deployment)
        if stage is None:
            return
        await stage.stop()
        del self._stages[deployment]
        stage.loaded.pin.release()
        # It runs on the compute thread, after a step that may still use the stage. Calls that have
        # not ended refer to the stage, so the garbage collector would not free its weights yet.
        self.around.worker.submit(stage.loaded.release)
        del stage
        if not self.around.worker.hangs:  # else its memory is freed when the step returns
            await self.around.worker.run(gc.collect)

    def _broke(self, deployment: DeploymentName, epoch: Epoch) -> None:
        self.post(events.StageBroke(deployment, epoch))


async def _tried(
    work: Callable[[], Awaitable[T]], event: str, what: str, **about: str
) -> T | EdgeShardError:
    """The result of the work, or the error that it raised. An error without a type is logged as
    this event."""
    try:
        return await work()
    except EdgeShardError as error:
        return error
    except Exception as error:
        log.exception(event, **about)
        return InternalError(f"{what} crashed: {type(error).__name__}: {error}")


async def _end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task, if there is one that runs, and wait for its end."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _standby_task(deployment: DeploymentName) -> str:
    return f"(standby) {deployment}"


def _say(event: events.Event) -> None:
    if isinstance(event, events.ActionStarted):
        log.debug("action_issued", **labels(event.action))
    else:
        log.debug("event_applied", **labels(event))


Answer = Callable[[tuple[CommandResult, ...]], None]


@dataclass(eq=False)
class _Requests:
    """Requests that are answered by a task each."""

    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(eq=False)
class DumpRequests(_Requests):
    """Takes dumps of the state and the newest events."""

    hosting: Hosting
    about: Callable[[], dict[str, Any]]
    """A description of this process."""
    send: Callable[[OperationId, bytes], None]
    """Gets a dump as JSON text."""
    refuse: Answer
    """Gets the reason why there is none."""

    def take(self, operation_id: OperationId) -> None:
        """Begin, and return at once."""
        self._begin(self._take(operation_id), "dump")

    async def _take(self, operation_id: OperationId) -> None:
        try:
            about, (state, ring) = self.about(), self.hosting.recorded()
            # The values are frozen, so they can be turned into text outside the event loop.
            text = await asyncio.to_thread(lambda: to_text(about | machine().document(state, ring)))
        except Exception:
            log.exception("dump_crashed")
            self.refuse(
                (
                    CommandResult(
                        operation_id, InternalError("the dump crashed; see the node's log")
                    ),
                )
            )
        else:
            self.send(operation_id, text)


@dataclass(eq=False)
class PackedRequests(_Requests):
    """Lists packed files, and removes some. The agent's state depends on neither."""

    packed: PackedUnits
    answer: Answer

    def take(self, operation_id: OperationId, command: ListPacked | DropPacked) -> None:
        """Begin, and return at once."""
        self._begin(self._take(operation_id, command), "packed")

    async def _take(self, operation_id: OperationId, command: ListPacked | DropPacked) -> None:
        try:
            if isinstance(command, ListPacked):
                units = await asyncio.to_thread(self.packed.units)
            else:
                units = await asyncio.to_thread(self.packed.drop_units, command.ids)
        except EdgeShardError as error:
            result = CommandResult(operation_id, error)
        except Exception as error:
            log.exception("packed_request_crashed")
            failure = InternalError(
                f"the packed files could not be reached ({type(error).__name__}); see the node's "
                "log"
            )
            result = CommandResult(operation_id, failure)
        else:
            result = CommandResult(operation_id, packed=units[:MAX_LISTED_PACKED])
        self.answer((result,))
