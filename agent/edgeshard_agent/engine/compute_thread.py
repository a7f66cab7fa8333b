"""The compute thread of a node, its hang check, and a thread next to it for slow work.

Every torch call of every stage runs on the compute thread, never on the event loop. The thread
imports torch when it begins. This module does not: a node imports it before it joins its site.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

import structlog

from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.requests.step import StepPlan
from edgeshard.process.clock import SystemClock
from edgeshard_agent.core.hanging import CHECK_S, RunningStep, Watched, hangs, looked_at

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger()


def step_hangs() -> UnavailableError:
    return UnavailableError(
        "a step hangs in the compute thread of this node, and nothing else can compute there; "
        "restart its agent",
        reason="STAGE_HUNG",
    )


class CallOnThread:
    """Made by the compute thread when it begins the call. No other call of its kind has its
    `number`."""

    def __init__(self, number: int, now: float) -> None:
        self._number = number
        self._began = now
        self._waits_since: float | None = None
        self._clock_id = _clock_of_this_thread()
        self._cpu_before = 0.0 if self._clock_id is None else time.clock_gettime(self._clock_id)

    def waits(self, now: float) -> None:
        """The rest of the call is waiting on purpose (`Pace`); called on the compute thread."""
        self._waits_since = now

    def so_far(self, now: float) -> RunningStep:
        """Its age, and the processor time spent on it; waiting on purpose counts as such."""
        age_s = max(0.0, now - self._began)
        cpu_s = age_s  # if the system does not report it, no call counts as hanging
        if self._clock_id is not None:
            with contextlib.suppress(OSError):  # the thread has ended
                cpu_s = max(0.0, time.clock_gettime(self._clock_id) - self._cpu_before)
        waited_s = max(0.0, now - self._waits_since) if self._waits_since is not None else 0.0
        return RunningStep(self._number, age_s, cpu_s + waited_s)


class StepOnThread(CallOnThread):
    """`number` is the how manieth step of the stage it is."""

    def __init__(self, number: int, plan: StepPlan, now: float) -> None:
        super().__init__(number, now)
        self.plan = plan


def _clock_of_this_thread() -> int | None:
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.pthread_getcpuclockid(threading.get_ident())


class ComputeThread:
    """One thread, calls in order. `threads` is how many cores torch may use inside a call.

    It `hangs` from `give_up` until the call that it has returns after all. A step waits for the
    thread twice on each node, so calls go through a bare queue. The locks of an executor take ten
    times as long while the caches hold weights.
    """

    def __init__(self, threads: int, clock: Clock | None = None) -> None:
        self._threads = threads
        self._clock = clock or SystemClock()
        self._calls = 0
        self._on_thread: CallOnThread | None = None
        self.on_steps: Callable[[], None] = lambda: None
        """Called on the event loop when steps come, before the thread has them."""
        self._steps_given = 0
        self._steps_over = 0
        self._steps_ended_s = float("-inf")
        self.hangs = False
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        """Calls with what waits for them; None ends the thread."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def _put(self, call: Callable[[], object], waiting: Future[Any] | None = None) -> None:
        if self._closed:
            raise RuntimeError("the compute thread is closed")
        if self._thread is None:
            # It does not keep the process from ending: a call may take for ever.
            self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
            self._thread.start()
        self._queue.put((call, waiting))

    def _work(self) -> None:
        """Prepare the thread and run the calls, on it."""
        _carry_out(self._prepare)
        while (item := self._queue.get()) is not None:
            call, waiting = item
            del item
            if waiting is None or waiting.set_running_or_notify_cancel():
                _carry_out(call)
            # The objects that a call refers to must not stay in memory until the next call.
            del call, waiting

    def _prepare(self) -> None:
        import torch

        torch.set_num_threads(self._threads)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on the thread and wait for it. Cancelling the wait does not stop a call that
        has begun.

        Raises UnavailableError while the thread hangs.
        """
        if self.hangs:
            raise step_hangs()

        done: Future[T] = Future()

        def call() -> None:
            self._calls += 1
            self._on_thread = CallOnThread(self._calls, self._clock.now())
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                self._on_thread = None
                done.set_exception(error)
            else:
                self._on_thread = None
                done.set_result(result)

        self._put(call, done)
        return await asyncio.wrap_future(done)

    def running(self) -> RunningStep | None:
        """The call of `run` that the thread has now, such as the loading of a stage. Stages tell of
        their steps."""
        call = self._on_thread
        return None if call is None else call.so_far(self._clock.now())

    def submit(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a call on the thread and do not wait. The call itself must report its result and its
        errors."""
        self._put(partial(function, *args, **kwargs))

    def submit_steps(
        self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """`submit` for a stage's steps; on the event loop.

        Waiting for them with `run` costs two more turns of the event loop, a tenth of a millisecond
        each while the caches hold weights instead of Python.
        """

        def call() -> None:
            try:
                function(*args, **kwargs)
            finally:
                self._steps_ended_s = self._clock.now()
                self._steps_over += 1

        self.on_steps()
        self._steps_given += 1
        self._put(call)

    def without_steps_s(self) -> float:
        """Seconds since the last step ended; 0 while one waits or runs, infinite if there was no
        step."""
        if self._steps_given != self._steps_over:
            return 0.0
        return self._clock.now() - self._steps_ended_s

    def give_up(self) -> None:
        """Take the thread to hang: the call that it has does not seem to return."""
        self.hangs = True
        self._put(self._goes_on)

    def _goes_on(self) -> None:
        self.hangs = False

    def close(self) -> None:
        """End the thread after its current call; calls that wait for it are cancelled."""
        self._closed = True
        with contextlib.suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None and item[1] is not None:
                    item[1].cancel()
        self._queue.put(None)


_Call = tuple[Callable[[], object], Future[Any] | None]


def _carry_out(call: Callable[[], object]) -> None:
    """Run a call whose errors are reported nowhere else."""
    try:
        call()
    except Exception:
        log.exception("compute_call_crashed")


NICE = 5
"""On a core that a step uses too, such a thread gets a quarter. A lower priority would be worse:
the thread holds Python's lock at times, and other threads would wait for it."""


class _Stopped(Exception):
    """Raised in work whose result is no longer needed."""


class BackgroundThread:
    """A thread next to the compute thread, for slow work that must not delay a step.

    It has a low priority and one core of torch's. Cancelled work stops at its next check.
    """

    def __init__(self, worker: ComputeThread) -> None:
        self._worker = worker
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[Callable[[], None]], T]) -> T:
        """`work` gets a function that it must call now and then."""
        if self._executor is None:
            # The number of torch's threads goes over from the newest thread that set it to threads
            # that begin after.
            await self._worker.run(lambda: None)
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aside", initializer=_prepare)
        stopped = threading.Event()

        def go_on() -> None:
            if stopped.is_set():
                raise _Stopped

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, go_on)
        except asyncio.CancelledError:
            stopped.set()
            raise


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Stage(Protocol):
    """A stage as the check sees it."""

    def running(self) -> RunningStep | None:
        """The step that computes now."""

    def fail(self, error: EdgeShardError) -> None: ...


class HangCheck:
    """Watches the compute thread: if its call hangs, the node's stages fail, and their site
    continues without the node.

    `run` looks at the stages of the node, on the event loop. They share one thread: when a step
    hangs, all fail.
    """

    def __init__(
        self, stages: Callable[[], Sequence[Stage]], worker: ComputeThread, clock: Clock
    ) -> None:
        self._stages = stages
        self._worker = worker
        self._clock = clock
        self._watched: dict[Stage | ComputeThread, Watched] = {}
        self.found_well = 0
        """Looks so far at which the thread was idle or got on."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.look()

    def look(self) -> None:
        now, stages = self._clock.now(), self._stages()
        watched: tuple[Stage | ComputeThread, ...] = (*stages, self._worker)
        running = [(one, step) for one in watched if (step := one.running()) is not None]
        self._watched = {one: looked_at(self._watched.get(one), step, now) for one, step in running}
        hanging = [step for one, step in running if hangs(self._watched[one], step)]
        if hanging and not self._worker.hangs:
            log.error(
                "step_stalled", age_s=round(hanging[0].age_s), cpu_s=round(hanging[0].cpu_s, 3)
            )
            self._worker.give_up()
            for stage in stages:
                stage.fail(step_hangs())
        if not self._worker.hangs:
            self.found_well += 1
