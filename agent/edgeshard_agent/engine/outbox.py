"""The newest steps that a stage has sent, kept for a receiver that lost its stream."""

from __future__ import annotations

from collections import deque

from edgeshard.domain.errors import InternalError
from edgeshard.wire.frames import Frame


class Outbox:
    """Frames by step, in order, never more than a window of steps; pure state.

    `put` appends a step; `take` hands out the frames to write next on the current stream; `rewind` is called with the
    step a (re)connected receiver wants next; `repeat` forwards a kept step once more.

    A step can be forgotten without an acknowledgement. The head sends step n only after the result
    of step n - window returned. So every stage has run step n - window when it receives step n.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._frames: dict[int, list[Frame]] = {}
        self._cursor = 0
        self._end = 0
        self._again: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, step: int, frames: list[Frame]) -> None:
        """Keep a step's frames for sending; steps come in order, starting at 0."""
        if step != self._end:
            raise InternalError(f"outbox received step {step}, expected {self._end}")
        self._frames[step] = frames
        self._end += 1
        forgotten = self._end - self._window - 1
        if forgotten in self._frames:
            if self._cursor <= forgotten:
                raise InternalError(f"step {forgotten} leaves the window before it was sent")
            del self._frames[forgotten]

    def take(self) -> tuple[int, list[Frame]] | None:
        """The step to write next with its frames, None when all are written."""
        while self._again:
            step = self._again.popleft()
            if step in self._frames:
                return step, self._frames[step]
        if self._cursor >= self._end:
            return None
        step = self._cursor
        self._cursor += 1
        return step, self._frames[step]

    def rewind(self, next_step: int) -> None:
        """Resend from `next_step`. Raises InternalError when it was forgotten or never existed."""
        first = min(self._frames, default=self._end)
        if not first <= next_step <= self._end:
            raise InternalError(f"the receiver requested step {next_step}; steps {first} to {self._end} are available")
        self._again.clear()
        self._cursor = next_step

    def repeat(self, step: int) -> bool:
        """Forward a step again that was sent already; False when it is not kept any more."""
        if step not in self._frames or step >= self._cursor or step in self._again:
            return False
        self._again.append(step)
        return True
