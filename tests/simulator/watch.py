"""The invariants of every event, and the counts of phases, triggers and messages that happened."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from edgeshard_agent.core.node_actions import Action as NodeAction
from edgeshard_agent.core.node_actions import CloseStage
from edgeshard_agent.hosting.host import Hosting
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
from edgeshard_coordinator.core.machine.apply import apply as apply_event
from edgeshard_coordinator.core.placement.ruled import conditions_of
from edgeshard_coordinator.core.values.actions import Action, SendCommand
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    CommandAnswered,
    DeleteRequested,
    DeploymentForgotten,
    DeploymentSaved,
    DeployRequested,
    Event,
    HeadAttached,
    HeadDetached,
    LinkReported,
    NodeDisconnected,
    Replanned,
    ReplanRequested,
    SaveFailed,
    StandbyPlanned,
)
from edgeshard_coordinator.core.values.state import DeploymentRecord, State, validate_state

from edgeshard.domain.control.commands import CommandKey, PrepareStage
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.rules import broken
from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.ids import COUNTED_EPOCHS, DeploymentName, Epoch, NodeId, RequestId
from edgeshard.domain.requests.generation import Finished, GenerationEvent, Started, Token
from edgeshard.domain.requests.head import HeadEvent
from tests.simulator.disk import Disk
from tests.simulator.liar import LIAR, NOBODY, without_liar
from tests.simulator.model import Answer
from tests.support.checker import Reference, check
from tests.support.load import Stream

STANDING = (Phase.LOADING, Phase.ACTIVATING, Phase.READY, Phase.WAITING)


def concerned(state: State, event: Event) -> Iterable[DeploymentRecord]:
    """The deployments that an event is about; one of a node is about all of them."""
    records = state.deployments
    match event:
        case CommandAnswered(_, result):
            key = CommandKey.parse(result.operation_id)
            return [record for record in records.values() if record.uid == key.uid]
        case LinkReported(_, suspected):
            name = suspected.deployment
        case (
            DeleteRequested(name)
            | HeadAttached(_, name)
            | HeadDetached(name)
            | DeploymentSaved(name)
        ):
            pass
        case SaveFailed(name) | DeploymentForgotten(name) | Replanned(name) | ReplanRequested(name):
            pass
        case ActionIssued() | DeployRequested() | StandbyPlanned():
            return ()
        case _:
            return records.values()
    return [records[name]] if name in records else ()


def _is_a_refusal(error: Exception) -> bool:
    return isinstance(error, EdgeShardError) and not isinstance(error, InternalError)


def _fate(record: DeploymentRecord | None) -> object:
    """The part of a deployment that a lie might change. The liar may answer its own commands."""
    if record is None:
        return None
    standbys = [entry for entry in record.standbys if entry.node_id != LIAR]
    commands = record.prepared, record.activated, record.released, standbys
    return (
        record.uid,
        record.epoch,
        record.phase,
        record.placement,
        record.attachment,
        commands,
        record.deadline,
    )


def _is_same(record: DeploymentRecord, other: DeploymentRecord | None, above_floor: int) -> bool:
    """Whether two records differ in nothing that a lie might change, but in an epoch just above the
    floor."""
    if other is not None and above_floor in (record.epoch, other.epoch):
        record = replace(record, epoch=other.epoch)
    return _fate(record) == _fate(other)


class Watch:
    """Hears of everything that happens. The first violation ends the run."""

    def __init__(self, disk: Disk, now: Callable[[], float]) -> None:
        self.violations: list[str] = []
        self.disk = disk
        """The right one, whatever the coordinator runs on."""
        self.met: Counter[tuple[str, str, str]] = Counter()
        self.now = now
        self.coordinator: Coordinator | None = None
        self.hostings: dict[NodeId, Hosting] = {}
        self.answers: dict[RequestId, Answer] = {}
        self.clients: dict[RequestId, int] = {}
        """Tokens that each request's client has."""
        self.ends: Counter[RequestId] = Counter()
        self.ready: dict[DeploymentName, list[tuple[float, Phase]]] = {}
        self.on_phase: Callable[[DeploymentName, Phase], None] = lambda name, phase: None
        self.tokens = 0
        """Taken by the coordinator, of all requests."""
        self.on_token: Callable[[int], None] = lambda count: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self._prepared: dict[tuple[DeploymentName, Epoch], tuple[str, str]] = {}

    def violate(self, what: str) -> None:
        self.violations.append(what)

    def hold(self, condition: bool, what: str) -> None:
        if not condition:
            self.violate(what)

    # The coordinator

    def coordinator_starts(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        loop = coordinator.loop
        executor = coordinator._executor
        reports = coordinator.front.reports
        apply = loop._apply
        perform = executor.perform
        on_token = reports._on_token

        def watched_apply(event: Event) -> None:
            before, honest = loop.state, without_liar(event)
            if honest is None:
                for record in concerned(before, event):
                    self.met["event", str(record.phase), type(event).__name__] = 1
            try:
                apply(event)
            except Exception as error:
                self.hold(_is_a_refusal(error), f"{type(event).__name__} ended with {error!r}")
                raise
            self.on_event(event)
            self._state_changed(before, loop.state)
            if honest is not None:
                self._lied(before, loop.state, honest)

        def watched_perform(action: Action) -> None:
            if isinstance(action, SendCommand) and isinstance(action.command, PrepareStage):
                self._prepares(action.command, loop.state)
            perform(action)

        def watched_token(attachment: Attachment, request: RunningRequest, token: Token) -> bool:
            taken = on_token(attachment, request, token)
            if taken:
                asyncio.get_running_loop().call_soon(self._ends_with_its_token, request)
                self._token_counts(request)
                self.tokens += 1
                self.on_token(self.tokens)
            return taken

        spawn = executor._spawn

        def watched_spawn(work: Any) -> None:
            former = set(executor._tasks)
            spawn(work)
            for task in executor._tasks - former:
                task.add_done_callback(self._action_ended)

        executor._spawn = watched_spawn  # type: ignore[method-assign]
        loop._apply = watched_apply  # type: ignore[method-assign]
        executor.perform = watched_perform  # type: ignore[method-assign]
        reports._on_token = watched_token  # type: ignore[method-assign]

    def _action_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self.hold(error is None, f"an action ended with {error!r}")

    def _lied(self, before: State, after: State, honest: Event) -> None:
        """A node that lies changes no deployment: each is as it would be without the message. A
        claim to an epoch may move the next one above the floor, and a later message may take the
        claim back."""
        silent = apply_event(before, honest)
        settled = apply_event(silent, NodeDisconnected(NOBODY, 0, honest.now))
        for name, record in after.deployments.items():
            others = [state.deployments.get(name) for state in (silent, settled)]
            is_same = any(_is_same(record, other, after.epoch_floor + 1) for other in others)
            self.hold(is_same, f"a lie changed {name}: {record.phase} at epoch {record.epoch}")
            self.hold(record.epoch < COUNTED_EPOCHS, f"a lie became epoch {record.epoch} of {name}")

    def coordinator_ends(self) -> None:
        self.coordinator = None

    def _state_changed(self, before: State, after: State) -> None:
        try:
            validate_state(after)
        except InternalError as error:
            self.violate(error.message)
        if before.deployments is after.deployments:
            return
        for name, record in after.deployments.items():
            former = before.deployments.get(name)
            if former is record:
                continue
            if former is None or former.phase is not record.phase:
                self.ready.setdefault(name, []).append((self.now(), record.phase))
                self.on_phase(name, record.phase)
            if former is not None and former.uid == record.uid:
                self.hold(
                    record.epoch >= former.epoch, f"the epoch of {name} fell from {former.epoch}"
                )

    def _prepares(self, command: PrepareStage, state: State) -> None:
        used = [stage.node_name for stage in command.placement.stages]
        against = broken(conditions_of(command.spec, state.candidates()), used)
        self.hold(not against, f"{command.spec.name} is placed on {used} against {against}")
        key = command.deployment, command.epoch
        record = state.deployments[command.deployment]
        mine = record.uid, state.instance
        self.hold(
            self._prepared.setdefault(key, mine) == mine,
            f"epoch {command.epoch} of {command.deployment} was given out twice",
        )
        if state.instance not in self.strangers:
            saved = self.disk.deployments.get(command.deployment)
            self.hold(
                saved is not None and saved.epoch >= command.epoch,
                f"epoch {command.epoch} of {command.deployment} is prepared before it is on disk",
            )

    strangers: frozenset[str] = frozenset()
    """Coordinators that run on another disk."""

    def _token_counts(self, request: RunningRequest) -> None:
        attachment, request_id = request.attachment, request.request_id
        assert self.coordinator is not None and attachment is not None
        wanted = self.answers.get(request_id)
        if wanted is None:
            return
        emitted = tuple(request.emitted)
        self.hold(
            emitted == wanted.tokens[: len(emitted)],
            f"the coordinator took a wrong token of {request_id}",
        )
        hosting = self.hostings.get(attachment.node_id)
        head = None if hosting is None else hosting._heads.get(attachment.deployment)
        entry = None if head is None else head._journal.find(request_id)
        if entry is not None and entry.accepted is not None:
            self.hold(
                len(entry.tokens) >= len(emitted),
                f"the coordinator has more of {request_id} than its head",
            )

    def _ends_with_its_token(self, request: RunningRequest) -> None:
        """A client with the last token of a request has its end."""
        wanted = self.answers.get(request.request_id)
        is_last = wanted is not None and len(request.emitted) == len(wanted.tokens)
        runs = (
            self.coordinator is not None
            and self.coordinator.front._requests.get(request.request_id) is request
        )
        self.hold(
            not (is_last and runs), f"the last token of {request.request_id} came without its end"
        )

    # Nodes

    def node_starts(self, node_id: NodeId, hosting: Hosting) -> None:
        self.hostings[node_id] = hosting
        apply, start = hosting._apply, hosting._start

        def watched_apply(event: Any) -> None:
            before = hosting._state.slots
            apply(event)
            for name, slot in hosting._state.slots.items():
                former = before.get(name)
                self.hold(
                    former is None or slot.epoch >= former.epoch,
                    f"the epoch of {name} fell on a node",
                )

        def watched_start(action: NodeAction) -> None:
            slot = (
                hosting._state.slots.get(action.deployment)
                if isinstance(action, CloseStage)
                else None
            )
            # else its load failed
            if isinstance(action, CloseStage) and slot is not None and slot.releases:
                self._releases(node_id, action.deployment, slot.epoch)
            start(action)

        hosting._apply = watched_apply  # type: ignore[method-assign]
        hosting._start = watched_start  # type: ignore[method-assign]

    def node_ends(self, node_id: NodeId) -> None:
        self.hostings.pop(node_id, None)

    def _releases(self, node_id: NodeId, name: DeploymentName, epoch: Epoch) -> None:
        """A node releases a stage: no coordinator or head may depend on it."""
        saved = self.disk.deployments.get(name)
        if saved is None or saved.phase not in STANDING or saved.epoch > epoch:
            return
        if self._is_over(self._live(name), node_id):
            return
        stands = any(stage.node_id == node_id for stage in saved.placement.stages)
        self.hold(
            not stands,
            f"a stage of {name} is released and {name} stands on the disk at epoch {saved.epoch}",
        )

    def _live(self, name: DeploymentName) -> DeploymentRecord | None:
        return (
            None if self.coordinator is None else self.coordinator.loop.state.deployments.get(name)
        )

    @staticmethod
    def _is_over(record: DeploymentRecord | None, node_id: NodeId) -> bool:
        """The coordinator has decided, and the disk is about to get it."""
        if record is None:
            return False
        return record.phase not in STANDING or all(
            stage.node_id != node_id for stage in record.placement.stages
        )

    def emits(self, hosting: Hosting, name: DeploymentName, said: HeadEvent) -> None:
        """A head hands an event to its stream: it must have it."""
        head = hosting._heads.get(name)
        entry = None if head is None else head._journal.find(said.request_id)
        if entry is not None and isinstance(said.event, Token):
            self.hold(
                said.event in entry.tokens,
                f"a token of {said.request_id} is sent before the head has it",
            )

    # Clients

    def heard(self, request_id: RequestId, stream: Stream, event: GenerationEvent) -> None:
        self.hold(not self.ends[request_id], f"{request_id} goes on behind its end")
        match event:
            case Started():
                self.hold(request_id not in self.clients, f"{request_id} started twice")
                self.clients[request_id] = 0
            case Token():
                count, texts = len(stream.tokens), self.answers[request_id].texts
                self.clients[request_id] = count
                said = texts[count] if count < len(texts) else ""
                text = "".join(token.text for token in stream.tokens)
                self.hold(text == said, f"{request_id} has another text behind {count} tokens")
                self._client_counts(request_id, count)
            case Finished():
                self.ends[request_id] += 1

    def left(self, request_id: RequestId, stream: Stream) -> None:
        """Compare a stream at its end, or when its client leaves, with the undisturbed answer."""
        wanted, events = self.answers[request_id], stream.events
        if events and isinstance(events[-1], Finished) and events[-1].reason == "cancelled":
            events = events[:-1]
        whole = bool(events) and isinstance(events[-1], Finished)
        text, logprobs = wanted.texts[-1] + wanted.final_text, (0.0,) * len(wanted.tokens)
        reference = Reference(wanted.prompt, wanted.tokens, text, wanted.reason, logprobs)
        for problem in check(events, reference, whole=whole, slack=math.inf).problems:
            self.violate(f"{request_id}: {problem}")

    def _client_counts(self, request_id: RequestId, count: int) -> None:
        running = (
            None if self.coordinator is None else self.coordinator.front._requests.get(request_id)
        )
        if running is not None:
            self.hold(
                len(running.emitted) >= count,
                f"the client has more of {request_id} than the coordinator",
            )

    def failed(self, request_id: RequestId, error: EdgeShardError) -> None:
        self.hold(not self.ends[request_id], f"{request_id} failed behind its end")
        self.ends[request_id] += 1
