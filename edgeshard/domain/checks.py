"""Checks of values from strangers, each stated next to the value it checks.

A check of a field stands in its type: `manifest_digest: Annotated[Digest, check_digest]`. It takes
the value and the name of its field. It returns the value to use, or raises InvalidArgumentError
naming the field. A method `check` of a class checks how its fields relate. Both run where values
enter: in `edgeshard.wire.codec` for messages, in `edgeshard.forms` for files. A value that the own
process makes is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Annotated, Any, NewType, get_args, get_origin

from edgeshard.domain.errors import InvalidArgumentError

Check = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class First:
    """A check of the number of items of a field, before any of them is checked."""

    check_count: Callable[[int, str], object]

    def __call__(self, items: Sized, field: str) -> Sized:
        self.check_count(len(items), field)
        return items


def at_most(most: int, unit: str = "items") -> First:
    """A field has no more items than this."""

    def check_count(count: int, field: str) -> None:
        if count > most:
            raise InvalidArgumentError.about(field, f"it has at most {most} {unit}, not {count}")

    return First(check_count)


def one_or_more(value: int, field: str) -> int:
    """0 stands for 1: an earlier version did not send the field."""
    return max(1, value)


def checks_of(hint: Any) -> tuple[Any, tuple[Check, ...]]:
    """The type in a field's hint, beneath new names and notes, and the checks among the notes in
    their order."""
    checks: list[Check] = []
    while isinstance(hint, NewType) or get_origin(hint) is Annotated:
        hint, *notes = (hint.__supertype__,) if isinstance(hint, NewType) else get_args(hint)
        checks += filter(callable, notes)
    return hint, tuple(checks)
