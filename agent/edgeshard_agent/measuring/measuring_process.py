"""The agent's end of a measurement in a process of its own, which yields to the steps of the node's
stages.

A process of its own can be ended at any moment, gives all its memory back, and does not keep the
daemon's interpreter or compute thread busy. The process is stopped before the compute thread gets
the step. It continues after a while without steps, and drops the timing that was interrupted
(`edgeshard_agent.measuring.stops`). On an accelerator kernels that it has launched run to their
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

from edgeshard.domain.errors import (
    EdgeShardError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.nodes.profile import ComputeProfile
from edgeshard.forms import OWN
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.measuring.measuring_worker import MeasuringJob, Told

QUIET_S = 2.0
"""A measurement continues after this time without a step: longer than most pauses between the steps
of a request."""
LONGEST_WAIT_S = 900.0
"""A measurement that was stopped for this long in total ends; the coordinator waits four times as
long for its answer.
"""


class StepThread(Protocol):
    """The compute thread, as `edgeshard_agent.engine.compute_thread` has it."""

    on_steps: Callable[[], None]

    def without_steps_s(self) -> float: ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """The event loop."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer: ...


@dataclass(eq=False)
class GivingWay:
    """While entered, a process is sent SIGSTOP whenever steps come, and SIGCONT later. All of it is
    on the event loop.

    `listener` is called with True when it is stopped and with False when it continues.
    """

    worker: StepThread
    timers: Timers
    send: Callable[[signal.Signals], None]
    listener: Callable[[bool], None]
    gave_up: bool = field(default=False, init=False)
    """Whether it was stopped for too long, and killed."""

    def __post_init__(self) -> None:
        self._stopped_at: float | None = None
        self._waited_s = 0.0
        self._timer: Timer | None = None

    def __enter__(self) -> Self:
        self.worker.on_steps = self._stop
        if (without_s := self.worker.without_steps_s()) < QUIET_S:
            self._stop(QUIET_S - without_s)
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.on_steps = _nothing
        if self._timer is not None:
            self._timer.cancel()

    def _stop(self, look_in_s: float = QUIET_S) -> None:
        if self._stopped_at is None:
            self.send(signal.SIGSTOP)
            self._stopped_at = self.timers.time()
            self._timer = self.timers.call_later(look_in_s, self._look)
            self.listener(True)

    def _look(self) -> None:
        """Go on, give up, or look again when the quiet time could be over."""
        assert self._stopped_at is not None
        waited_s, without_s = self.timers.time() - self._stopped_at, self.worker.without_steps_s()
        if without_s >= QUIET_S:
            self._waited_s += waited_s
            self._stopped_at = None
            self.send(signal.SIGCONT)
            self.listener(False)
        elif self._waited_s + waited_s >= LONGEST_WAIT_S:
            self.gave_up = True
            self.send(signal.SIGKILL)
        else:
            self._timer = self.timers.call_later(QUIET_S - without_s, self._look)


def requests_ran() -> UnavailableError:
    """The answer to a measurement that gave up."""
    return UnavailableError(
        f"the node was never idle for {QUIET_S:.0f} s within {LONGEST_WAIT_S / 60:.0f} minutes; "
        "measure it when fewer requests run, or wait: the coordinator measures again when the site "
        "is idle",
        reason="REQUESTS_RAN",
    )


def _nothing() -> None:
    pass


_LONGEST_LINE = 16 << 20

Tell = Callable[[int, int, str], None]
"""Figures done, figures in total, and the current one."""


async def measure_apart(job: MeasuringJob, tell: Tell, worker: ComputeThread) -> ComputeProfile:
    """Measure in a process that yields to the steps of this compute thread.

    Raises the profiler's typed errors, UnavailableError when it waited for too long. Cancelling
    ends the process before this returns.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "edgeshard_agent.measuring.measuring_worker", str(os.getpid()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LONGEST_LINE,
        # a Ctrl-C at the agent's terminal is for the agent, which ends this process
        start_new_session=True,
    )  # fmt: skip
    last_progress = 0, 1, "start"

    def tell_and_keep(*progress: *tuple[int, int, str]) -> None:
        nonlocal last_progress
        last_progress = progress
        tell(*progress)

    def tell_stopped(stopped: bool) -> None:
        done, total, what = last_progress
        tell(done, total, "waits while requests run" if stopped else what)

    def send(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, number)

    way = GivingWay(worker, asyncio.get_running_loop(), send, tell_stopped)
    try:
        assert process.stdin is not None
        line = OWN.to_text(MeasuringJob, job).encode() + b"\n"
        process.stdin.write(line)  # stays open: its end would end the process
        with way:
            outcome = await _outcome(process, tell_and_keep)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    if way.gave_up:
        raise requests_ran()
    if isinstance(outcome, ComputeProfile):
        return outcome
    raise outcome


async def _outcome(
    process: asyncio.subprocess.Process, tell: Tell
) -> ComputeProfile | EdgeShardError:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        message = OWN.from_text(Told, line)
        if message.progress is not None:
            tell(*message.progress)
        if (outcome := message.profile or message.error) is not None:
            return outcome
    code = await process.wait()
    if code == -signal.SIGKILL:
        return ResourceExhaustedError(
            "the measurement was killed, most likely because memory ran out; free memory, or give "
            "the "
            "agent less --memory",
            field="memory",
            reason="MEASUREMENT_KILLED",
        )
    return InternalError(f"the measurement ended with exit code {code}; see the node's log")
