"""The place and time at which a process of the site ends, halts, waits, or loses a call.

A failpoint is armed by a file that its process reads, so that it can be set while the process runs.
Before it acts, the process appends a line to the file of marks and syncs it: a run whose failpoint
left no mark proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from edgeshard.domain.requests.step import Span


class Place(StrEnum):
    """All in an agent, except the last three."""

    BEFORE_COMPUTE = "before_compute"
    AFTER_COMPUTE = "after_compute"
    """The step is run, and the event loop does not know yet."""
    AFTER_SEND = "after_send"
    """The step's last frame was handed to the link."""
    BEFORE_RETURN = "before_return"
    """The head has a step's result and has not looked at it."""
    AFTER_RETURN = "after_return"
    """The head took the result and formed the next step; its tokens are not on their way yet."""
    BEFORE_LOAD = "before_load"
    DURING_LOAD = "during_load"
    """The weights are on the node's disk, but not in memory."""
    AFTER_LOAD = "after_load"
    BEFORE_ATTACH = "before_attach"
    """The head is about to open its request stream."""
    BEFORE_SAY = "before_say"
    """The head is about to send an output; its stream breaks if the action is to lose something."""
    BEFORE_SAVE = "before_save"
    """The coordinator decided on a change, and nothing of it is on disk."""
    AFTER_SAVE = "after_save"
    """It is on disk, and the coordinator has not acted on it."""
    CALL = "call"
    """A call came to the coordinator."""


OF_STEPS = frozenset(
    {
        Place.BEFORE_COMPUTE,
        Place.AFTER_COMPUTE,
        Place.AFTER_SEND,
        Place.BEFORE_RETURN,
        Place.AFTER_RETURN,
    }
)
OF_LOADS = frozenset({Place.BEFORE_LOAD, Place.DURING_LOAD, Place.AFTER_LOAD})
OF_SAVES = frozenset({Place.BEFORE_SAVE, Place.AFTER_SAVE})


class Action(StrEnum):
    KILL = "kill"
    HALT = "halt"
    """SIGSTOP: the process stands still, its sockets stay open."""
    SLEEP = "sleep"
    """The thread that came by waits for `seconds`."""
    COMPUTE = "compute"
    """It computes for a fixed time of its processor."""
    LOSE_REQUEST = "lose_request"
    """Lose a call: the caller gets the error that the coordinator is away, and nothing was done."""
    LOSE_REPLY = "lose_reply"
    """The same, though all was done."""
    TWICE = "twice"
    """The call comes a second time while the first is being served."""


OF_CALLS = frozenset({Action.LOSE_REQUEST, Action.LOSE_REPLY, Action.TWICE})


@dataclass(frozen=True, slots=True)
class Moment:
    """A process passes a place.

    It does so with a step of these spans, a change of a deployment such as ready->waiting, another
    write of the coordinator by its name (`hooks.WRITES`), or a call of this method.
    """

    place: Place
    step: int = -1
    spans: tuple[Span, ...] = ()
    what: str = ""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """Acts when its process passes `place` for the `time`th time with matching values.

    `step` is a step's number in its epoch. `position` matches a step that runs this position of a
    request. In the step that makes token n it is the prompt's length + n - 1, in a chunk of the
    prompt a position in it. Steps without spans do not count; with `guesses` only those do that
    have guessed tokens. `what` is a change of a deployment, another write, or a call's method. `id`
    is its name in the marks.
    """

    id: str
    place: Place
    step: int | None = None
    position: int | None = None
    what: str = ""
    time: int = 1
    action: Action = Action.KILL
    seconds: float = 0.0
    guesses: bool = False

    def matches(self, moment: Moment) -> bool:
        """Whether this is one of the times that it counts."""
        if moment.place is not self.place or (self.place in OF_STEPS and not moment.spans):
            return False
        if self.guesses and not any(span.guesses for span in moment.spans):
            return False
        if self.step is not None and moment.step != self.step:
            return False
        if self.what and moment.what != self.what:
            return False
        return self.position is None or any(
            span.first_position <= self.position < span.end_position for span in moment.spans
        )

    @classmethod
    def of(cls, values: dict[str, Any]) -> Failpoint:
        return cls(
            **{**values, "place": Place(values["place"]), "action": Action(values["action"])}
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """A failpoint acted: in process `pid`, at `at` seconds of the wall clock, with this step (-1:
    none)."""

    id: str
    pid: int
    at: float
    step: int = -1


def arm(directory: Path, process: str, failpoints: Sequence[Failpoint]) -> None:
    """Set the failpoints of a process in place of those it has. It sees all of them or none."""
    path = _armed(directory, process)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([asdict(point) for point in failpoints]))
    draft.replace(path)


def disarm(directory: Path, process: str) -> None:
    _armed(directory, process).unlink(missing_ok=True)


def marks(directory: Path) -> dict[str, Mark]:
    """The failpoints that acted, by their id."""
    path = _marks(directory)
    if not path.exists():
        return {}
    read = [Mark(**json.loads(line)) for line in path.read_text().splitlines()]
    return {mark.id: mark for mark in read}


class Trap:
    """The failpoints of this process; its hooks call `hit` from any thread."""

    def __init__(self, directory: Path, process: str) -> None:
        self._path = _armed(directory, process)
        self._marks = _marks(directory)
        self._seen: tuple[int, int] | None = None
        self._waiting: dict[str, tuple[Failpoint, int]] = {}
        """By id: the failpoint, and how many times it has to come by."""

    def hit(self, moment: Moment) -> list[Action]:
        """The process is at this place now: perform the due actions, and return the ones that the
        caller must do itself.
        """
        self._read()
        left_to_caller = []
        for point, left in list(self._waiting.values()):
            if point.matches(moment):
                if left > 1:
                    self._waiting[point.id] = point, left - 1
                    continue
                del self._waiting[point.id]
                self._mark(point, moment)
                if point.action in OF_CALLS:
                    left_to_caller.append(point.action)
                else:
                    _act(point)
        return left_to_caller

    def _read(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._seen, self._waiting = None, {}
            return
        if self._seen == (seen := (status.st_mtime_ns, status.st_ino)):
            return
        self._seen = seen
        points = [Failpoint.of(values) for values in json.loads(self._path.read_text())]
        # a process that was started again finds the one that ended it
        done = marks(self._path.parent)
        self._waiting = {point.id: (point, point.time) for point in points if point.id not in done}

    def _mark(self, point: Failpoint, moment: Moment) -> None:
        line = json.dumps(asdict(Mark(point.id, os.getpid(), time.time(), moment.step))) + "\n"
        file = os.open(self._marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)


def _act(point: Failpoint) -> None:
    match point.action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.HALT:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.SLEEP:
            time.sleep(point.seconds)
        case Action.COMPUTE:
            until = time.thread_time() + point.seconds
            while time.thread_time() < until:
                # like a kernel, without the interpreter's lock
                hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)


def _armed(directory: Path, process: str) -> Path:
    return directory / f"{process}.armed"


def _marks(directory: Path) -> Path:
    return directory / "marks"
