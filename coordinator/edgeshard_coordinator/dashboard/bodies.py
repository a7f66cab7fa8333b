"""Bodies that several actions of the dashboard have, and how all of them are read."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.forms import Forms

FORMS = Forms("body", "correct it, or reload the page if the coordinator was upgraded")


@dataclass(frozen=True, slots=True)
class Named:
    """The body of an action on one thing of the site."""

    name: str


@dataclass(frozen=True, slots=True)
class Removal:
    """The body of a removal. `typed` is the name again, as the operator typed it."""

    name: str
    typed: str

    def check(self) -> None:
        if self.typed != self.name:
            raise InvalidArgumentError(
                "typed: the typed name differs from the name of the item to remove", field="typed"
            )
