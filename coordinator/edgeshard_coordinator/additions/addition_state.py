"""The state of running and ended additions of models. Pure.

An addition waits in a queue, is converted and then stored, one at a time. It ends once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from edgeshard.domain.errors import (
    AlreadyExistsError,
    EdgeShardError,
    NotFoundError,
    ResourceExhaustedError,
)

MAX_QUEUED = 16
"""Additions that wait or run."""
MAX_ENDED = 8
"""Ended additions that are retained, the newest."""


class Phase(StrEnum):
    QUEUED = "queued"
    CONVERTING = "converting"
    STORING = "storing"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.CONVERTING, Phase.CANCELLED}),
    Phase.CONVERTING: frozenset({Phase.STORING, Phase.FAILED, Phase.CANCELLED}),
    Phase.STORING: frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED}),
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}
"""The phases that may follow each phase."""


@dataclass(frozen=True, slots=True)
class Addition:
    """The addition of one model. `source` is a path or OWNER/NAME, `name` the model's name in the
    store. `width` is for weights that cannot be kept exactly. `who` is the operator.

    `work` names the current step (downloading, converting, hashing), of which `done_bytes` of
    `total_bytes` are done; `total_bytes` is 0 if it is not known. `error` is the reason of a
    failure.
    """

    number: int
    source: str
    name: str
    width: str
    who: str
    phase: Phase = Phase.QUEUED
    work: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    notes: tuple[str, ...] = ()
    error: EdgeShardError | None = None

    @property
    def has_ended(self) -> bool:
        return not TRANSITIONS[self.phase]


@dataclass(frozen=True, slots=True)
class Additions:
    """All additions by number, the oldest first; `last` is the newest number."""

    by_number: Mapping[int, Addition]
    last: int = 0

    @property
    def waiting(self) -> Addition | None:
        """The addition whose turn is next; None if none waits."""
        queued = (
            addition for addition in self.by_number.values() if addition.phase is Phase.QUEUED
        )
        return next(queued, None)

    def open_of(self, who: str) -> list[Addition]:
        """The additions of an operator that have not ended."""
        return [one for one in self.by_number.values() if one.who == who and not one.has_ended]

    def get(self, number: int) -> Addition:
        """Raises NotFoundError for a number that is not there."""
        addition = self.by_number.get(number)
        if addition is None:
            raise NotFoundError(f"number: addition {number} is not here any more", field="number")
        return addition

    def queued(self, source: str, name: str, width: str, who: str) -> Additions:
        """With one more addition, whose number is `last`.

        Raises AlreadyExistsError if one of this name has not ended, ResourceExhaustedError if too
        many have not.
        """
        open_additions = [
            addition for addition in self.by_number.values() if not addition.has_ended
        ]
        if any(addition.name == name for addition in open_additions):
            raise AlreadyExistsError(
                f"name: model {name} is being added: wait for its end, cancel it, or choose "
                "another name",
                field="name",
                reason="BEING_ADDED",
            )
        if len(open_additions) >= MAX_QUEUED:
            raise ResourceExhaustedError(
                f"{MAX_QUEUED} models wait to be added: wait until one is done, or cancel one",
                field="name",
                reason="TOO_MANY_ADDITIONS",
            )
        number = self.last + 1
        addition = Addition(number, source, name, width, who)
        return Additions({**self.by_number, number: addition}, number)

    def moved(self, number: int, phase: Phase, **changes: Any) -> Additions:
        """With an addition in another phase, and other `changes` of its fields. Of ended ones the
        oldest are forgotten.

        Raises ValueError for a phase that may not follow.
        """
        addition = self.get(number)
        if phase not in TRANSITIONS[addition.phase]:
            raise ValueError(f"an addition that is {addition.phase} cannot become {phase}")
        changed = replace(addition, phase=phase, **changes)
        by_number = {**self.by_number, number: changed}
        ended = [one.number for one in by_number.values() if one.has_ended]
        for old in ended[:-MAX_ENDED]:
            del by_number[old]
        return replace(self, by_number=by_number)

    def progressed(self, number: int, work: str, done_bytes: int, total_bytes: int) -> Additions:
        """With the progress of an addition that is running; the same for any other."""
        addition = self.by_number.get(number)
        if addition is None or addition.phase not in (Phase.CONVERTING, Phase.STORING):
            return self
        changed = replace(addition, work=work, done_bytes=done_bytes, total_bytes=total_bytes)
        return replace(self, by_number={**self.by_number, number: changed})


NO_ADDITIONS = Additions({})
