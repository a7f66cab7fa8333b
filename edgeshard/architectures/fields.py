"""Typed reading of a config.json: a value that is missing or wrong raises UnsupportedModelError
naming its field."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeshard.architectures.limits import MAX_SIZE
from edgeshard.domain.errors import UnsupportedModelError

_LONGEST_NAME = 120
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 40
_SHORT.maxlevel = 3


def shown(value: object) -> str:
    """A value of a config.json, shortened for a message: it may be a megabyte long or a thousand
    levels deep."""
    return _SHORT.repr(value)


def refuse(field: str, why: str) -> UnsupportedModelError:
    """The error for `field`; `why` states the fault and the remedy."""
    field = field[:_LONGEST_NAME]
    return UnsupportedModelError(f"config.json: {field} {why}", field=field)


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The part of a config.json that describes the decoder. `prefix` is put before a field's name
    in errors.

    `family` is the architecture's name, for messages. `defaults` are its values for keys that are
    missing or null; a text as the default of a size names the key whose value it takes.
    """

    values: Mapping[str, Any]
    prefix: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    family: str = "this architecture"

    def name(self, key: str) -> str:
        return self.prefix + key

    def refuse(self, key: str, why: str) -> UnsupportedModelError:
        return refuse(self.name(key), why)

    def given(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def _value(self, key: str, default: object) -> Any:
        """The value of a key; if it is missing or null, the family's default, or else this one."""
        value = self.values.get(key)
        return self.defaults.get(key, default) if value is None else value

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A positive integer up to `most`. Null counts as missing, which is an error without a
        default."""
        value = self._value(key, default)
        if isinstance(value, str) and not self.given(key):
            return self.size(value, most=most)
        if value is None:
            raise self.refuse(key, "is missing; use the complete config.json of the checkpoint")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"is {shown(value)}; it must be a positive integer")
        if not 0 < value <= most:
            raise self.refuse(
                key,
                f"is {shown(value)}; it must be between 1 and {most}, the most that EdgeShard runs",
            )
        return value

    def count(self, key: str, default: int = 0, most: int = MAX_SIZE) -> int:
        """An integer up to `most` that may be 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.refuse(key, f"is {shown(value)}; it must be an integer between 0 and {most}")
        return value

    def number(self, key: str, default: float = 1.0) -> float:
        """A positive finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, f"is {shown(value)}; it must be a positive number")
        if not 0 < value <= sys.float_info.max:  # a whole number may be larger than any float
            raise self.refuse(key, f"is {shown(value)}; it must be a positive finite number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive finite number, or None if the key is null, or missing without a default."""
        value = self.values[key] if key in self.values else self.defaults.get(key)
        return None if value is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {shown(value)}; it must be true or false")
        return value

    def choice(self, key: str, choices: Collection[str]) -> str:
        """One of `choices`; the family's default must have one for the key."""
        value = self._value(key, None)
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(
                key, f"is {shown(value)}; EdgeShard runs {', '.join(sorted(choices))}"
            )
        return value

    def layer_list(self, key: str, layer_count: int) -> tuple[int, ...]:
        """A list of distinct block indices, empty when missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        valid = isinstance(value, list | tuple) and all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < layer_count
            for item in value
        )
        if not valid:
            raise self.refuse(
                key, f"is {shown(value)}; it must be a list of layers below {layer_count}"
            )
        return tuple(value)
