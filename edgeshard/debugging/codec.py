"""Frozen values to JSON types and back, by their declared types.

A `Codec` is made for a type, such as a daemon's `State` or the union of its events, and walks all that the type is made
of: dataclasses, pydantic models, enums, tuples, mappings, unions, new types, errors. Two things are refused there and
then, by a TypeError that names the field: a type that has no form here, and a place where a prompt, generated text,
token ids or a secret could be. So nothing of the kind gets into a dump unless a test of the codec fails first.

A dataclass, a model or an error becomes an object with its class under "type", whose further keys are its fields.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from edgeshard.debugging.private import PRIVATE_KEYS
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError

ValueT = TypeVar("ValueT")

TAG = "type"
_PRIVATE_MODULES = frozenset({"edgeshard.domain.requests.generation"})
"""What a user asked for and was answered. No state of a daemon has any of it."""
_COUNTS = (int, float, bool)
_SCALARS = (bool, int, float, str)


class Codec(Generic[ValueT]):
    """Values of one type, which may be a union, to JSON types and back. `Codec(State)`, `Codec(Event)`."""

    def __init__(self, kind: Any) -> None:
        self._form = _Forms().of(kind, "the value")

    def encode(self, value: ValueT) -> Any:
        """What `json.dumps` takes. Raises TypeError for a value that is not of the type."""
        return self._form.encode(value)

    def decode(self, plain: Any) -> ValueT:
        """Raises InvalidArgumentError for what `encode` never makes, such as a dump of another version."""
        try:
            value: ValueT = self._form.decode(plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgumentError(
                f"this is no value that this version knows ({type(error).__name__}: {error}); read the dump with the "
                "version that wrote it",
                field="dump",
                reason="UNKNOWN_VALUE",
            ) from None
        return value


class _Form(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class _Forms:
    """The forms of the types seen so far; one that is being made stands for itself in what refers back to it."""

    def __init__(self) -> None:
        self._known: dict[Any, _Form] = {}

    def of(self, kind: Any, where: str) -> _Form:  # noqa: C901 - one line for each kind of type
        if isinstance(kind, NewType):
            return self.of(kind.__supertype__, where)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.of(arguments[0], where)
        if origin in (Union, types.UnionType):
            return self._union(arguments, where)
        if origin is tuple:
            return self._tuple(arguments, where)
        if origin is frozenset:
            return self._set(arguments[0], where)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(arguments[0], arguments[1], where)
        if origin is Literal:
            return _literal(arguments)
        if kind is Any:
            return _Form(_json, _same)
        if kind is float:
            return _Form(_float, _float_back)
        if kind in (*_SCALARS, type(None)):
            return _checked(kind)
        if kind is bytes:
            return _Form(lambda value: base64.b64encode(value).decode(), base64.b64decode)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return _Form(lambda value: kind(value).value, kind)
        if isinstance(kind, type) and issubclass(kind, EdgeShardError):
            return _Form(_error, _error_back)
        if dataclasses.is_dataclass(origin or kind) or hasattr(kind, "model_fields"):
            return self._object(kind, where)
        raise TypeError(f"{where}: {kind!r} has no form in a dump; give it one in edgeshard.debugging.codec")

    def _object(self, kind: Any, where: str) -> _Form:
        if kind in self._known:
            return self._known[kind]
        made: dict[str, _Form] = {}
        origin: Any = get_origin(kind) or kind
        name = origin.__name__

        def encode(value: Any) -> Any:
            if type(value) is not origin:
                raise TypeError(f"{value.__class__.__name__} where {name} belongs")
            return {TAG: name} | {field: form.encode(getattr(value, field)) for field, form in made.items()}

        def decode(plain: Any) -> Any:
            if plain[TAG] != name:
                raise ValueError(f"{plain[TAG]} where {name} belongs")
            return origin(**{field: form.decode(plain[field]) for field, form in made.items()})

        form = self._known[kind] = _Form(encode, decode)
        given = dict(zip(getattr(origin, "__parameters__", ()), get_args(kind), strict=True))
        hints = hints_of(origin, include_extras=True)
        for field in field_names(origin):
            hint = given.get(hints[field], hints[field])
            place = f"{where}: {name}.{field}"
            _check_public(origin, field, hint, place)
            made[field] = self.of(hint, place)
        return form

    def _union(self, members: tuple[Any, ...], where: str) -> _Form:
        union = _Union(where)
        words = [member for member in members if _words(member)]
        for member in members:
            if member not in words[1:]:
                form = _one_of(words) if member in words and len(words) > 1 else self.of(member, where)
                union.add(get_origin(member) or member, form)
        return _Form(union.encode, union.decode)

    def _tuple(self, arguments: tuple[Any, ...], where: str) -> _Form:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            item = self.of(arguments[0], where)
            return _Form(
                lambda value: [item.encode(part) for part in value],
                lambda plain: tuple(item.decode(part) for part in plain),
            )
        items = [self.of(argument, where) for argument in arguments]
        return _Form(
            lambda value: [form.encode(part) for form, part in zip(items, value, strict=True)],
            lambda plain: tuple(form.decode(part) for form, part in zip(items, plain, strict=True)),
        )

    def _set(self, member: Any, where: str) -> _Form:
        item = self.of(member, where)
        return _Form(
            # In an order of its own, so that equal sets have one form.
            lambda value: sorted((item.encode(part) for part in value), key=json.dumps),
            lambda plain: frozenset(item.decode(part) for part in plain),
        )

    def _mapping(self, key: Any, value: Any, where: str) -> _Form:
        keys, values = self.of(key, where), self.of(value, where)
        if _is_text(key):
            return _Form(
                lambda mapping: {keys.encode(k): values.encode(v) for k, v in mapping.items()},
                lambda plain: {keys.decode(k): values.decode(v) for k, v in plain.items()},
            )
        return _Form(
            lambda mapping: [[keys.encode(k), values.encode(v)] for k, v in mapping.items()],
            lambda plain: {keys.decode(k): values.decode(v) for k, v in plain},
        )


class _Union:
    """One of several classes, told by the tag; or of one type without a tag; or None; or any error."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._tagged: dict[str, _Form] = {}
        self._plain: _Form | None = None
        self._error: _Form | None = None
        self._optional = False

    def add(self, kind: Any, form: _Form) -> None:
        if kind is type(None):
            self._optional = True
        elif isinstance(kind, type) and issubclass(kind, EdgeShardError):
            self._error = form
        elif dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"):
            if kind.__name__ in self._tagged:
                raise TypeError(f"{self._where}: two classes named {kind.__name__} in one union")
            self._tagged[kind.__name__] = form
        elif self._plain is not None:
            raise TypeError(f"{self._where}: {kind!r} and another type cannot be told apart in JSON")
        else:
            self._plain = form

    def encode(self, value: Any) -> Any:
        if value is None and self._optional:
            return None
        found = self._tagged.get(type(value).__name__)
        form = self._error if isinstance(value, EdgeShardError) else found or self._plain
        if form is None:
            raise TypeError(f"{self._where}: a value of {type(value).__name__} is none of {self._tagged.keys()}")
        return form.encode(value)

    def decode(self, plain: Any) -> Any:
        if plain is None and self._optional:
            return None
        tag = str(plain.get(TAG)) if isinstance(plain, dict) else ""
        form = self._tagged.get(tag) or self._error or self._plain
        if form is None:
            raise ValueError(f"{self._where}: {tag} is none of {self._tagged.keys()}")
        return form.decode(plain)


def _words(kind: Any) -> tuple[str, ...]:
    """The texts of a type that has a few: of a Literal or of an enumeration."""
    if get_origin(kind) is Literal:
        return tuple(word for word in get_args(kind) if isinstance(word, str))
    return tuple(member.value for member in kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else ()


def _one_of(kinds: list[Any]) -> _Form:
    """Of types of different words, which a text tells apart."""

    def decode(plain: Any) -> Any:
        for kind in kinds:
            if plain in _words(kind):
                return plain if get_origin(kind) is Literal else kind(plain)
        raise ValueError(f"{plain!r} is none of {[word for kind in kinds for word in _words(kind)]}")

    return _Form(lambda value: str(decode(str(value))), decode)


def field_names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass or a pydantic model; none of another type."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(getattr(kind, "model_fields", ()))


def _check_public(kind: Any, field: str, hint: Any, where: str) -> None:
    if kind.__module__ in _PRIVATE_MODULES:
        raise TypeError(f"{where}: {kind.__name__} is a user's, and must not be in a dump")
    if field in PRIVATE_KEYS and not _is_count(hint):
        raise TypeError(f"{where}: what is named {field} is a user's or secret, and must not be in a dump")
    if field == TAG:
        raise TypeError(f"{where}: a field must not be named {TAG}, as the class is in a dump")


def _is_count(hint: Any) -> bool:
    """Whether it is a number, within bounds or absent though it may be."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        return all(item is type(None) or _is_count(item) for item in get_args(hint))
    return hint in _COUNTS


def _is_text(kind: Any) -> bool:
    while isinstance(kind, NewType):
        kind = kind.__supertype__
    return isinstance(kind, type) and issubclass(kind, str)


def _literal(allowed: tuple[Any, ...]) -> _Form:
    plain = {value: value.value if isinstance(value, Enum) else value for value in allowed}
    return _Form(plain.__getitem__, {written: value for value, written in plain.items()}.__getitem__)


def _checked(kind: type) -> _Form:
    def same(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
        return value

    return _Form(same, same)


def _same(value: Any) -> Any:
    return value


def _json(value: Any) -> Any:
    """A value of no declared type, such as a model's config: JSON already."""
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if value is None or isinstance(value, _SCALARS):
        return value
    raise TypeError(f"{type(value).__name__} is not JSON")


def _float(value: float) -> float | str:
    # JSON has no infinity.
    return value if math.isfinite(value) else str(value)


def _float_back(plain: float | str) -> float:
    return float(plain) if isinstance(plain, str) else plain


def _error(error: EdgeShardError) -> dict[str, Any]:
    parts = {name: getattr(error, name) for name in ("message", "field", "reason", "retry_after_s")}
    return {TAG: type(error).__name__, **parts}


def _error_back(plain: dict[str, Any]) -> EdgeShardError:
    kind = {kind.__name__: kind for kind in _error_kinds(EdgeShardError)}[plain[TAG]]
    return kind(plain["message"], field=plain["field"], reason=plain["reason"], retry_after_s=plain["retry_after_s"])


def _error_kinds(kind: type[EdgeShardError]) -> list[type[EdgeShardError]]:
    return [kind, *(found for direct in kind.__subclasses__() for found in _error_kinds(direct))]
