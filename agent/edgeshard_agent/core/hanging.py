"""Whether a step hangs: the compute thread has it for long, and spends no processor time on it.
Pure.

A slow step is none: a thread that computes, or that waits in place of an emulated device, makes
progress. Neither does a step of a node that was stopped for a while and continues.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CHECK_S = 1.0
"""How often steps are looked at."""
STILL_S = 30.0
"""A step without progress for this many seconds hangs, if it also takes far longer than it
should."""
TIMES_PREDICTED = 20.0
"""The allowed multiple of a step's predicted time, if the placement predicts one."""
PROGRESS_S = 0.001
"""Processor time that counts as progress. A thread that waits for ever may wake up to look now and
then."""
LONGEST_GAP_S = 5.0
"""When a look comes later than this after the one before, the process stood still: the time between
shows nothing."""


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The step that the compute thread has now, by a number that no other step of the stage has.

    It began `age_s` ago; `cpu_s` is the processor time spent on it; `predicted_s` the predicted
    time, 0 if unknown.
    """

    number: int
    age_s: float
    cpu_s: float
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A step as the looks at it saw it: still for `still_s` by the look at `seen_at`, since it had
    used `cpu_s`."""

    number: int
    cpu_s: float
    still_s: float
    seen_at: float


def looked_at(before: Watched | None, step: RunningStep, now: float) -> Watched:
    """The record of a step after another look at `now` (monotonic seconds)."""
    if before is None or before.number != step.number or step.cpu_s - before.cpu_s >= PROGRESS_S:
        return Watched(step.number, step.cpu_s, 0.0, now)
    gap_s = now - before.seen_at
    return replace(
        before, still_s=before.still_s + (gap_s if gap_s <= LONGEST_GAP_S else 0.0), seen_at=now
    )


def hangs(watched: Watched, step: RunningStep) -> bool:
    return watched.still_s >= STILL_S and step.age_s > TIMES_PREDICTED * step.predicted_s
