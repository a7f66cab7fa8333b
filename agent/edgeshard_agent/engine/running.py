"""The call that the compute thread has now, as other threads see it."""

from __future__ import annotations

import contextlib
import threading
import time

from edgeshard.domain.requests.step import StepPlan
from edgeshard_agent.core.hanging import RunningStep


class CallOnThread:
    """Made by the compute thread when it begins the call. No other call of its kind has its `number`."""

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
        cpu_s = age_s  # where the system does not tell, no call is taken to hang
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
