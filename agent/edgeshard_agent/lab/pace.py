"""The pace of a stage on the lab's emulated device."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgeshard.domain.clock import Clock
from edgeshard.domain.requests.step import StepPlan
from edgeshard_agent.engine.worker import CallOnThread


class EmulatedPace:
    """Waits after each step until the emulated device would have finished; `step_s` gives its seconds."""

    def __init__(self, step_s: Callable[[StepPlan], float], clock: Clock) -> None:
        self._step_s = step_s
        self._clock = clock
        self._free_at = 0.0

    def hold(self, plan: StepPlan, arrived_s: float, on_thread: CallOnThread | None) -> None:
        # From the time the device could have begun, so that this machine's own overhead is not added.
        could_begin = max(arrived_s, self._free_at)
        self._free_at = max(self._clock.now(), could_begin + self._step_s(plan))
        if on_thread is not None:
            on_thread.waits(self._clock.now())
        time.sleep(max(0.0, self._free_at - self._clock.now()))
