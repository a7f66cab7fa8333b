"""Typed reading of a decoded TOML table: a missing or wrong key raises InvalidArgumentError naming
its place."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, overload

from edgeshard.domain.errors import invalid

_LARGEST_COUNT = 2**31 - 1


def check_number(value: object, field: str, least: float, above: bool = False) -> float:
    """`value` as a finite number >= `least` (> `least` with `above`)."""
    requirement = f"it must be a finite number {'above' if above else 'of at least'} {least:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(field, f"is {value!r}; {requirement}")
    if not least <= value <= sys.float_info.max or (above and value == least):
        raise invalid(field, f"is {value}; {requirement}")
    return float(value)


def check_count(value: object, field: str) -> int:
    """`value` as a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_COUNT:
        raise invalid(field, f"is {value!r}; it must be a positive integer")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """One table. `path` is put before a key's name in errors. A default of `...` makes a key
    required."""

    values: Mapping[str, Any]
    path: str

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def given(self, key: str) -> bool:
        return key in self.values

    def only(self, *keys: str) -> None:
        """Raise for a key that is not one of these."""
        for key in self.values:
            if key not in keys:
                raise invalid(
                    self.name(key),
                    f"is not a known key; known are {', '.join(keys)}",
                    "UNKNOWN_KEY",
                )

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: None) -> str | None: ...
    def text(self, key: str, default: EllipsisType | None = ...) -> str | None:
        value = self._value(key, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise invalid(self.name(key), f"is {value!r}; it must be a text")
        return value

    @overload
    def count(self, key: str, default: int) -> int: ...
    @overload
    def count(self, key: str, default: None) -> int | None: ...
    def count(self, key: str, default: int | None) -> int | None:
        value = self._value(key, default)
        return None if value is None else check_count(value, self.name(key))

    @overload
    def positive(self, key: str, default: float | EllipsisType) -> float: ...
    @overload
    def positive(self, key: str, default: None) -> float | None: ...
    def positive(self, key: str, default: float | EllipsisType | None) -> float | None:
        value = self._value(key, default)
        return None if value is None else check_number(value, self.name(key), 0.0, above=True)

    def not_negative(self, key: str, default: float) -> float:
        return check_number(self._value(key, default), self.name(key), 0.0)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise invalid(self.name(key), f"is {value!r}; it must be true or false")
        return value

    def table(self, key: str) -> Fields:
        """A table, empty when missing."""
        value = self.values.get(key, {})
        if not isinstance(value, Mapping):
            raise invalid(self.name(key), f"is {value!r}; it must be a table")
        return Fields(value, self.name(key))

    def tables(self, key: str) -> Sequence[Fields]:
        """An array of tables, empty when missing."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise invalid(self.name(key), f"must be an array of tables, [[{key}]]")
        return [
            Fields(item, f"{self.name(key)}[{position}]") for position, item in enumerate(value)
        ]

    def _value(self, key: str, default: Any) -> Any:
        if key in self.values:
            return self.values[key]
        if default is ...:
            raise invalid(self.name(key), "is missing")
        return default
