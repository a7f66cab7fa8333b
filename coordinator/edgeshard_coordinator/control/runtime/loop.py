"""The only task that owns the state: inbox -> apply -> reconcile -> executor, whose results return
as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from edgeshard.debugging.dump import refusal
from edgeshard.debugging.labels import labels
from edgeshard.debugging.ring import EventRing, RingView
from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import EdgeShardError, InternalError, UnavailableError
from edgeshard.process.logs import debug_logged
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.values.actions import Action
from edgeshard_coordinator.core.values.events import ActionIssued, Event, HeartbeatsReceived, Ticked
from edgeshard_coordinator.core.values.state import State

log = structlog.get_logger()

TICK_S = 0.5
SOON_TICK_S = 0.1
"""Seconds between ticks while a link is suspect: a silence has consequences after a time, maybe
without any event."""
_PASSES = 20


class Executor(Protocol):
    def perform(self, action: Action) -> None:
        """Begin the action and return at once; its outcome is posted as an event. Must not
        raise."""


class StateLoop:
    """`post` and `ask` put events in the inbox from the event loop's thread; `state` is the newest
    state.

    `on_change` receives every state, with the one before it.
    """

    def __init__(
        self, state: State, clock: Clock, on_change: Callable[[State, State], None]
    ) -> None:
        self.state = state
        self._clock = clock
        self._on_change = on_change
        self._ring: EventRing[State, Event] = EventRing(routine=(HeartbeatsReceived, Ticked))
        self._inbox: asyncio.Queue[tuple[Event, asyncio.Future[None] | None]] = asyncio.Queue()
        self._waiting: list[tuple[Callable[[State], bool], asyncio.Future[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self.turns = 0
        """Events handled so far; ticks occur even when nothing else does."""
        self._rested: State | None = None
        """The newest state in which nothing was due."""

    def now(self) -> float:
        """Monotonic seconds, for the events callers make."""
        return self._clock.now()

    def recorded(self) -> RingView[State, Event]:
        """The newest events, from a state of some minutes ago to `state`."""
        return self._ring.view(self.state)

    def start(self, executor: Executor, active_requests: Callable[[], int]) -> None:
        """Begin with the events of the inbox. `executor` gets the actions that the state calls for,
        and each tick has the number of active requests."""
        self._tasks = [
            asyncio.create_task(self._run(executor)),
            asyncio.create_task(self._tick(active_requests)),
        ]

    async def stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        error = _shutting_down()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(error)
        while not self._inbox.empty():
            _, answer = self._inbox.get_nowait()
            if answer is not None and not answer.done():
                answer.set_exception(error)

    def post(self, event: Event) -> None:
        """Put an event in the inbox. An event that the state refuses is logged and dropped."""
        self._inbox.put_nowait((event, None))

    async def ask(self, event: Event) -> None:
        """Put a request in the inbox; returns once it is part of the state, raises the error that
        refused it."""
        if self._stopped:
            raise _shutting_down()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait((event, answer))
        await answer

    async def until(self, condition: Callable[[State], bool]) -> None:
        """Wait until the state meets `condition`."""
        if condition(self.state):
            return
        if self._stopped:
            raise _shutting_down()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, future)
        self._waiting.append(entry)
        try:
            await future
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    async def _tick(self, active_requests: Callable[[], int]) -> None:
        while True:
            await asyncio.sleep(SOON_TICK_S if self.state.suspects else TICK_S)
            self.post(Ticked(self.now(), active_requests()))

    async def _run(self, executor: Executor) -> None:
        while True:
            event, answer = await self._inbox.get()
            try:
                self._apply(event)
                self._act(executor)
                refused = None
            except EdgeShardError as error:
                refused = error
            except Exception:
                log.exception("event_failed", kind=type(event).__name__)
                refused = InternalError(
                    "the coordinator failed unexpectedly; its log has the details"
                )
            self._answer(event, answer, refused)
            for condition, future in self._waiting:
                if not future.done() and condition(self.state):
                    future.set_result(None)
            self.turns += 1

    def _apply(self, event: Event) -> None:
        before = self.state
        try:
            self.state = apply(before, event)
        except Exception as error:
            self._ring.record(before, event, event.now, refusal(error))
            raise
        self._ring.record(before, event, event.now)
        if self.state is not before:
            self._on_change(before, self.state)
        if debug_logged():
            _say(event)

    def _answer(
        self, event: Event, answer: asyncio.Future[None] | None, refused: EdgeShardError | None
    ) -> None:
        if answer is None:
            if refused is not None:
                log.warning(
                    "event_refused",
                    kind=type(event).__name__,
                    reason=refused.reason,
                    error=refused.message,
                )
        elif not answer.done():
            if refused is None:
                answer.set_result(None)
            else:
                answer.set_exception(refused)

    def _act(self, executor: Executor) -> None:
        """Issue actions until none is due; an issued action may make another one due."""
        for _ in range(_PASSES):
            actions = reconcile(self.state, self.now(), self._rested)
            if not actions:
                self._rested = self.state
                return
            for action in actions:
                self._apply(ActionIssued(action, self.now()))
                executor.perform(action)
        raise InternalError("reconcile does not converge", reason="INVARIANT")


def _say(event: Event) -> None:
    if isinstance(event, ActionIssued):
        log.debug("action_issued", **labels(event.action))
    else:
        log.debug("event_applied", **labels(event))


def _shutting_down() -> UnavailableError:
    return UnavailableError(
        "the coordinator is shutting down", reason="SHUTTING_DOWN", retry_after_s=1.0
    )
