"""Options that are declared once, as a field of a dataclass with what people and programs need to
know of it.

Options of a generation are fields of `Sampling` and `Generation`, options of a deployment are
fields of `DeploymentSpec`. Command line, SDK, HTTP gateway, wire and documents follow from the
fields by reflection.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from edgeshard.domain.errors import invalid


@dataclass(frozen=True, slots=True)
class Option:
    """Properties of an option in addition to its field's name, type and default; kept in the
    field's metadata.

    `help` is for people. `low` and `high` bound a number, both included; it must be greater than
    `above`. `keyword` is its name in the SDK, if that is not the field's. `flag` is its name on the
    command line, if that is not the keyword's; None if it has none. `alias` is another name in
    both. `metavar` replaces `OptionField.metavar` in a command's help.
    """

    help: str
    metavar: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    keyword: str = ""
    flag: str | None = ""
    alias: str = ""

    @property
    def rule(self) -> str:
        """The bounds in words; empty if there are none."""
        if self.above is not None:
            return f"must be above {self.above}" + (
                "" if self.high is None else f" and at most {self.high}"
            )
        if self.low is None:
            return ""
        return (
            f"must be {self.low} or more"
            if self.high is None
            else f"must be {self.low} to {self.high}"
        )

    @property
    def constraints(self) -> dict[str, Any]:
        """The bounds by the names that pydantic's `Field` has for them."""
        bounds = {"ge": self.low, "gt": self.above, "le": self.high}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def allows(self, value: float) -> bool:
        """Whether a number is finite and within the bounds."""
        return (
            (not isinstance(value, float) or math.isfinite(value))
            and (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
        )


@dataclass(frozen=True, slots=True)
class OptionField:
    """An option of a class: the field's name, type and default (MISSING without one), and the
    rest."""

    name: str
    kind: Any
    default: Any
    option: Option

    @property
    def keyword(self) -> str:
        return self.option.keyword or self.name

    @property
    def metavar(self) -> str:
        """Its value in a command's help: N for a whole number, SECONDS by the field's unit, else as
        it was declared."""
        whole = "N" if int in (self.kind, *get_args(self.kind)) else ""
        return self.option.metavar or ("SECONDS" if self.name.endswith("_s") else whole)

    @property
    def flags(self) -> tuple[str, ...]:
        """Its names on the command line, without the unit of seconds; empty if the command line
        does not take it."""
        if self.option.flag is None:
            return ()
        names = (self.option.flag or self.keyword.removesuffix("_s"), self.option.alias)
        return tuple("--" + name.replace("_", "-") for name in names if name)


def option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option: its only description. If the default is `dict`, it makes an empty
    one.

    Pydantic, which reads `Field`'s arguments out of the metadata, holds the bounds as well.
    """
    declared = Option(help, **more)
    defaults: dict[str, Any] = (
        {"default_factory": dict} if default is dict else {"default": default}
    )
    return field(**defaults, metadata={"option": declared, **declared.constraints})


def check_bounds(value: Any, reason: str = "") -> None:
    """Raise InvalidArgumentError naming the first option of a value that is out of its bounds."""
    for item in option_fields(type(value)):
        setting = getattr(value, item.name)
        if item.option.rule and setting is not None and not item.option.allows(setting):
            raise invalid(item.name, item.option.rule, reason)


def option_fields(owner: type) -> tuple[OptionField, ...]:
    """The options among a dataclass's fields, in their order."""
    # A class is no Hashable for type checkers.
    lookup: Any = _option_fields
    return lookup(owner)  # type: ignore[no-any-return]


@cache
def _option_fields(owner: Any) -> tuple[OptionField, ...]:
    kinds = get_type_hints(owner)
    return tuple(
        OptionField(
            item.name,
            kinds[item.name],
            item.default if item.default_factory is MISSING else item.default_factory(),
            item.metadata["option"],
        )
        for item in fields(owner)
        if "option" in item.metadata
    )
