"""Frozen values to JSON types and back for a dump, which must contain no user's text and no secret.

A `Codec` is made for a type, such as a daemon's `State` or the union of its events, and walks all
parts of the type (`edgeshard.forms`). It refuses two things at once, by a TypeError that names the
field. One is a type that has no form, the other a field that could hold a prompt, generated text,
token ids or a secret. So nothing of the kind gets into a dump unless a test of the codec fails
first.

A dataclass, a model or an error becomes an object with its class under "type", whose further keys
are its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

from edgeshard.debugging.private import PRIVATE_KEYS
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.forms import TAG, Forms

ValueT = TypeVar("ValueT")

_PRIVATE_MODULES = frozenset({"edgeshard.domain.requests.generation"})
"""Users' requests and answers. No state of a daemon has any of it."""
_COUNTS = (int, float, bool)


class Codec(Generic[ValueT]):
    """Values of one type, which may be a union, to JSON types and back. `Codec(State)`,
    `Codec(Event)`."""

    def __init__(self, kind: Any) -> None:
        self._form = _Dumped("dump", "read it with the version that wrote it").of(kind)

    def encode(self, value: ValueT) -> Any:
        """What `json.dumps` takes. Raises TypeError for a value that is not of the type."""
        return self._form.write(value)

    def decode(self, plain: Any) -> ValueT:
        """Raises InvalidArgumentError for what `encode` never makes, such as a dump of another
        version."""
        value: ValueT = self._form.read(plain, "")
        return value


class _Dumped(Forms):
    exact = True

    def hints(self, kind: type, where: str) -> Mapping[str, Any]:
        hints = super().hints(kind, where)
        for field, hint in hints.items():
            _check_public(kind, field, hint, f"{where}: {kind.__name__}.{field}")
        return hints

    def write_error(self, error: EdgeShardError) -> dict[str, Any]:
        parts = {
            name: getattr(error, name) for name in ("message", "field", "reason", "retry_after_s")
        }
        return {TAG: type(error).__name__, **parts}

    def read_error(self, plain: Mapping[str, Any]) -> EdgeShardError:
        kind = {kind.__name__: kind for kind in _error_kinds(EdgeShardError)}[plain[TAG]]
        return kind(**{name: part for name, part in plain.items() if name != TAG})

    def refused(self, path: str, why: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            super().refused(path, why).message, field="dump", reason="UNKNOWN_VALUE"
        )


def _check_public(kind: type, field: str, hint: Any, where: str) -> None:
    if kind.__module__ in _PRIVATE_MODULES:
        raise TypeError(f"{where}: {kind.__name__} is a user's, and must not be in a dump")
    if field in PRIVATE_KEYS and not _is_count(hint):
        raise TypeError(
            f"{where}: what is named {field} is a user's or secret, and must not be in a dump"
        )
    if field == TAG:
        raise TypeError(f"{where}: a field must not be named {TAG}, as the class is in a dump")


def _is_count(hint: Any) -> bool:
    """Whether it is a number, within bounds or absent though it may be."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        return all(item is type(None) or _is_count(item) for item in get_args(hint))
    return hint in _COUNTS


def _error_kinds(kind: type[EdgeShardError]) -> list[type[EdgeShardError]]:
    return [
        kind,
        *(descendant for direct in kind.__subclasses__() for descendant in _error_kinds(direct)),
    ]
