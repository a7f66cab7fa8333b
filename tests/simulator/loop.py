"""An event loop of virtual time: it never sleeps, one callback runs at a time, and equal seeds give
equal runs.

Every callback belongs to the simulated process whose context it was made in. A crashed process runs
nothing more, not even a `finally`. A stalled process runs everything later. Each process has a
clock of its own.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

CURRENT: ContextVar[Process] = ContextVar("process")


class Process:
    """A simulated process. `ahead_s` is the lead of its monotonic clock over the simulator's."""

    def __init__(self, loop: VirtualLoop, name: str, ahead_s: float = 0.0) -> None:
        self.loop = loop
        self.name = name
        self.ahead_s = ahead_s
        self.dead = False
        self.frozen = False
        self.backlog: list[asyncio.Handle] = []
        self.context: Context = copy_context()
        self.context.run(CURRENT.set, self)
        self._kept: list[object] = []
        """Tasks that a crash cut off. It must not be finalised while the run continues."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work, context=self.context.copy())
        self._kept.append(task)
        return task

    def call_later(
        self, delay_s: float, function: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        return self.loop.call_global(self.loop.now + delay_s, function, *args, context=self.context)

    def keep(self, thing: object) -> None:
        self._kept.append(thing)

    def crash(self) -> None:
        self.dead = True
        self._kept += self.backlog
        self.backlog.clear()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        self.loop.go_on(backlog)

    def jump(self, seconds: float) -> None:
        """Its clock jumps by `seconds`, as after a machine was suspended: its waits are due."""
        self.ahead_s += seconds
        self.loop.bring_forward(self, seconds)


class SimTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in each run."""

    count = 0

    def __init__(self, coro: Any, **options: Any) -> None:
        SimTask.count += 1
        self._number = SimTask.count
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class SimFuture(asyncio.Future[Any]):
    count = 0

    def __init__(self, **options: Any) -> None:
        SimFuture.count += 1
        self._number = SimFuture.count
        super().__init__(**options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(base_events.BaseEventLoop):
    """`step` runs one callback; `now` is the simulator's own time in seconds."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.now = 0.0
        self.dice = dice
        self.steps = 0
        self._offset = 0.0
        self._queue: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._last = 0
        self.set_exception_handler(lambda loop, context: None)

    # asyncio's interface of a loop

    def time(self) -> float:
        return self.now + self._offset

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_global(when - self._offset, callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_global(self.now + delay, callback, *args, context=context)

    def call_global(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """At a time of the simulator's clock."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._last += 1
        heapq.heappush(self._timers, (when, self._last, handle))
        return handle

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> SimTask:
        return SimTask(coro, loop=self, name=name, context=context)

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., Any], *args: Any
    ) -> SimFuture:
        """A thread that takes a moment."""
        future = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                result = function(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self.dice.uniform(0.0001, 0.003), run)
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def get_debug(self) -> bool:
        return False

    # The simulator's interface

    def step(self, until: float) -> bool:
        """Run the next callback; Run the next callback and return True; False if none is due by
        `until`, which is then the time.
        """
        while True:
            if not self._queue:
                timers = self._timers
                while timers and timers[0][2].cancelled():
                    heapq.heappop(timers)
                if not timers or timers[0][0] > until:
                    self.now = max(self.now, until)
                    return False
                when, _, timer = heapq.heappop(timers)
                self.now = max(self.now, when)
                self._queue.append(timer)
            handle = self._queue.popleft()
            if handle.cancelled():
                continue
            process = handle._context.get(CURRENT)  # type: ignore[attr-defined]
            if process is None:
                self._offset = 0.0
            elif process.dead:
                process.keep(handle)
                continue
            elif process.frozen:
                process.backlog.append(handle)
                continue
            else:
                self._offset = process.ahead_s
            self.steps += 1
            handle._run()
            self._offset = 0.0
            return True

    def go_on(self, handles: list[asyncio.Handle]) -> None:
        self._queue.extend(handles)

    def bring_forward(self, process: Process, seconds: float) -> None:
        self._timers = [
            (when - seconds if timer._context.get(CURRENT) is process else when, number, timer)  # type: ignore[attr-defined]
            for when, number, timer in self._timers
        ]
        heapq.heapify(self._timers)


class SimClock:
    """A process's monotonic clock, as `edgeshard.domain.clock.Clock`."""

    def __init__(self, loop: VirtualLoop, process: Process) -> None:
        self._loop = loop
        self._process = process

    def now(self) -> float:
        return self._loop.now + self._process.ahead_s
