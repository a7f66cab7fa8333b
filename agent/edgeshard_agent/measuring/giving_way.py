"""A measurement in a process of its own yields to the steps of the stages on this node.

The process is stopped before the compute thread gets the step. It continues after a while without
steps, and drops the timing that was interrupted (`edgeshard_agent.measuring.stops`). On an
accelerator kernels that it has launched run to their end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

from edgeshard.domain.errors import UnavailableError

QUIET_S = 2.0
"""A measurement continues after this time without a step: longer than most pauses between the steps of a request."""
LONGEST_WAIT_S = 900.0
"""A measurement that was stopped for this long in total ends; the coordinator waits four times as
long for its answer.
"""


class StepThread(Protocol):
    """The compute thread, as `edgeshard_agent.engine.worker` has it."""

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
    """While entered, a process is sent SIGSTOP whenever steps come, and SIGCONT later. All of it is on the event loop.

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
