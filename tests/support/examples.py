"""Values of any type with every field away from its default, made by reflection on dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain, product
from types import UnionType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from edgeshard.domain.errors import DeadlineError, EdgeShardError

MISSING = dataclasses.MISSING


class Examples:
    """Makes examples; no two numbers or texts of one are the same, so that fields that changed
    places are seen.

    `made` gives examples of types that need their own; `fields` values of fields that bounds or
    other fields restrict, by (class, name). With `bare`, fields that have a default keep it.
    """

    def __init__(
        self,
        made: Mapping[Any, Callable[[Examples], Any]],
        fields: Mapping[tuple[type, str], Any],
        *,
        bare: bool = False,
    ) -> None:
        self._made = made
        self._fields = fields
        self._bare = bare
        self._last = 1

    def number(self) -> int:
        self._last += 1
        return self._last

    def of(self, kind: Any, default: Any = MISSING) -> list[Any]:
        """Examples of a type, one for each member of a union; all differ from `default`."""
        if kind in self._made:
            return [self._made[kind](self)]
        origin, arguments = get_origin(kind), get_args(kind)
        if isinstance(kind, NewType):
            return self.of(kind.__supertype__, default)
        if origin is Annotated:
            return self.of(arguments[0], default)
        if origin in (Union, UnionType):
            return list(
                chain.from_iterable(
                    self.of(item, default) for item in arguments if item is not type(None)
                )
            )
        if origin is Literal:
            return [next(item for item in arguments if item != default)]
        if origin is tuple and arguments[-1] is not Ellipsis:
            return list(product(*(self.of(item) for item in arguments)))
        if origin in (tuple, list) or origin is Iterable:
            # Two of the first kind, and one of each other kind.
            pair = tuple(self.of(arguments[0])[0] for _ in range(2))
            return [pair, *((item,) for item in self.of(arguments[0])[1:])]
        if origin is frozenset:
            return [frozenset(self.of(arguments[0])[0] for _ in range(2))]
        if origin in (dict, Mapping):
            key, value = (
                self.number() if argument is Any else self.of(argument)[0] for argument in arguments
            )
            return [{key: value}]
        return list(self._of_fields(kind)) if origin is not None else self._of_class(kind, default)

    def _of_class(self, kind: Any, default: Any) -> list[Any]:
        if issubclass(kind, Enum):
            return [next(item for item in reversed(kind) if item is not default)]
        if issubclass(kind, EdgeShardError):
            words = f"what {self.number()}", f"f{self.number()}", f"R{self.number()}"
            return [
                DeadlineError(
                    words[0], field=words[1], reason=words[2], retry_after_s=self.number() + 0.5
                )
            ]
        if kind is bool:
            return [default is not True]
        if kind is int:
            return [self.number()]
        if kind is float:
            return [self.number() + 0.5]
        if kind is str:
            return [f"n{self.number()}"]
        if kind is bytes:
            return [b"%d" % self.number()]
        return list(self._of_fields(kind))

    def _of_fields(self, kind: Any) -> Iterator[Any]:
        """One with the first example of every field, and one more for each further example of a
        field."""
        chosen: dict[str, list[Any]] = {}
        for name, annotation, default in fields_of(kind):
            if self._bare and default is not MISSING:
                continue
            chosen[name] = (
                [self._fields[kind, name]]
                if (kind, name) in self._fields
                else self.of(annotation, default)
            )
            assert (
                default is MISSING or default not in chosen[name] or (kind, name) in self._fields
            ), (kind, name)
        first = {name: values[0] for name, values in chosen.items()}
        make = get_origin(kind) or kind
        yield make(**first)
        for name, values in chosen.items():
            for value in values[1:]:
                yield make(**{**first, name: value})


def fields_of(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, type, default or MISSING) of each field of a dataclass."""
    given = dict(zip(getattr(get_origin(kind), "__parameters__", ()), get_args(kind), strict=True))
    kind = get_origin(kind) or kind
    hints = {name: given.get(hint, hint) for name, hint in get_type_hints(kind).items()}
    for item in dataclasses.fields(kind):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        yield item.name, hints[item.name], default


def comparable(value: Any) -> Any:
    """A value in which errors, which compare by identity, are their parts, and every sequence is a
    tuple."""
    if isinstance(value, EdgeShardError):
        return type(value), value.message, value.field, value.reason, value.retry_after_s
    if isinstance(value, Message):
        return value
    if dataclasses.is_dataclass(value):
        parts = [comparable(getattr(value, item.name)) for item in dataclasses.fields(value)]
        return type(value), tuple(parts)
    if isinstance(value, tuple | list):
        return tuple(comparable(item) for item in value)
    return value
