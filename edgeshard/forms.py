"""One walk of declared types; by it values to JSON types and back, with policies for readers.

`edgeshard.wire.codec` uses the same walk for messages. For JSON a type is walked at its first use:
dataclasses, enums, tuples, sets, mappings, unions, new types, errors. One that has no form in JSON
is refused then, by a TypeError that names the field.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from inspect import signature
from itertools import repeat
from types import GenericAlias, MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from edgeshard.domain.checks import checks_of
from edgeshard.domain.errors import (
    ERROR_BY_CODE,
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
)

ValueT = TypeVar("ValueT")
FormT = TypeVar("FormT")
PlaceT = TypeVar("PlaceT")

TAG = "type"
"""The key of a class's name."""
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
_NOT_FINITE = ("inf", "-inf", "nan")
"""Texts of the numbers that JSON does not have."""


class Form(NamedTuple):
    """`write` makes JSON types of a value; `read` the value of JSON types and of its path, which a
    refusal names."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]


class Forms:
    """The forms of values that are kept on a disk or sent to another process of one's own.

    A class becomes an object of its fields, in a union of several with its name under "type".
    Fields that an earlier version did not write take their defaults, and unknown fields of a later
    one are ignored. Incoming values are checked: `Annotated[T, check]` has callables that take a
    value and its path and return the value, and a class may have a method `check()`. Both raise
    InvalidArgumentError.

    A refusal calls the whole `what`, and ends with `remedy`. `only` has the fields that are kept of
    some classes.
    """

    exact: ClassVar[bool] = False
    """Whether this same version wrote the data: each class has its name, each field is there, none
    is unknown."""

    def __init__(
        self, what: str, remedy: str, only: Mapping[type, tuple[str, ...]] = MappingProxyType({})
    ) -> None:
        self._what = what
        self._remedy = remedy
        self._only = only
        self._forms: dict[Any, Form] = {}

    def of(self, kind: Any) -> Form:
        """The form of a type. Raises TypeError for one that has none, naming the field."""
        if kind not in self._forms:
            self._forms[kind] = _Walk(self).of(kind, "the value")
        return self._forms[kind]

    def write(self, kind: Any, value: Any) -> Any:
        """What `json.dumps` takes. Raises TypeError for a value that is not of the type."""
        return self.of(kind).write(value)

    def read(self, kind: type[ValueT], plain: Any) -> ValueT:
        """The value of JSON types. Raises InvalidArgumentError naming the path at fault."""
        value: ValueT = self.of(kind).read(plain, "")
        return value

    def to_text(self, kind: Any, value: Any) -> str:
        """A value as JSON in one line. Raises as `write`."""
        return json.dumps(self.write(kind, value))

    def from_text(self, kind: type[ValueT], text: str | bytes) -> ValueT:
        """The value of a JSON text. Raises as `read`."""
        return self.read(kind, self.parse(text))

    def parse(self, text: str | bytes) -> Any:
        """The JSON types of a text. Raises InvalidArgumentError if it is not JSON."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.refused("", f"is not JSON: {error}") from None

    # What policies differ in

    def hints(self, kind: type, where: str) -> Mapping[str, Any]:
        """The types of a class's fields by their names; `where` locates the class in a
        TypeError."""
        hints = hints_of(kind, include_extras=True)
        return {name: hints[name] for name in self._only.get(kind, field_names(kind))}

    def write_any(self, value: Any) -> Any:
        """A value of no declared type, such as a model's config: JSON already."""
        return value

    def write_error(self, error: EdgeShardError) -> dict[str, Any]:
        return {
            "code": int(error.code),
            "reason": error.reason,
            "field": error.field,
            "message": error.message,
        }

    def read_error(self, plain: Mapping[str, Any]) -> EdgeShardError:
        """Raises KeyError or TypeError if it is no error."""
        message, field, reason = texts = [plain[part] for part in ("message", "field", "reason")]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
        return ERROR_BY_CODE.get(plain["code"], InternalError)(message, field=field, reason=reason)

    def refused(self, path: str, why: str) -> InvalidArgumentError:
        """The error for what cannot be read at a path, "" for the whole."""
        path = path.removeprefix(".")
        subject = f"{path} of the {self._what}" if path else f"the {self._what}"
        return InvalidArgumentError(f"{subject} {why}; {self._remedy}", field=path or self._what)


OWN = Forms("message", "both ends must be of one version")
"""The forms of messages between EdgeShard's processes on one machine, and of files that they leave
for each other."""


class TypeWalk(Generic[FormT, PlaceT]):
    """A walk of declared types: each kind of type has a method, which makes its form.

    `place` is what the walk carries along, such as the text that locates a type in a TypeError. A
    kind of type whose method is not overridden has no form.
    """

    def unchecked(self, kind: Any, place: PlaceT) -> FormT:
        """The form of a type without its checks. Raises TypeError for one that has none."""
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if arguments and (make := _METHODS.get(origin)) is not None:
            form: FormT = getattr(self, make)(kind, arguments, place)
            return form
        if kind is Any:
            return self.any_form(place)
        if kind in _SCALARS or kind is bytes:
            return self.scalar_form(kind, place)
        if is_object(kind):
            return self.object_form(kind, place)
        if isinstance(origin, type) and issubclass(origin, Enum):
            return self.enum_form(origin, place)
        if isinstance(origin, type) and issubclass(origin, EdgeShardError):
            return self.error_form(kind, place)
        return self.no_form(kind, place)

    def no_form(self, kind: Any, place: PlaceT) -> FormT:
        """Raises the TypeError for a type that has no form."""
        raise NotImplementedError

    def any_form(self, place: PlaceT) -> FormT:
        return self.no_form(Any, place)

    def scalar_form(self, kind: Any, place: PlaceT) -> FormT:
        return self.no_form(kind, place)

    def object_form(self, kind: Any, place: PlaceT) -> FormT:
        return self.no_form(kind, place)

    def enum_form(self, kind: type[Enum], place: PlaceT) -> FormT:
        return self.no_form(kind, place)

    def error_form(self, kind: Any, place: PlaceT) -> FormT:
        return self.no_form(kind, place)

    def literal_form(self, kind: Any, arguments: tuple[Any, ...], place: PlaceT) -> FormT:
        return self.no_form(kind, place)

    def union_form(self, kind: Any, arguments: tuple[Any, ...], place: PlaceT) -> FormT:
        return self.no_form(kind, place)

    def tuple_form(self, kind: Any, arguments: tuple[Any, ...], place: PlaceT) -> FormT:
        return self.no_form(kind, place)

    def set_form(self, kind: Any, arguments: tuple[Any, ...], place: PlaceT) -> FormT:
        return self.no_form(kind, place)

    def mapping_form(self, kind: Any, arguments: tuple[Any, ...], place: PlaceT) -> FormT:
        return self.no_form(kind, place)


_METHODS = {
    Union: TypeWalk.union_form.__name__,
    UnionType: TypeWalk.union_form.__name__,
    Literal: TypeWalk.literal_form.__name__,
    tuple: TypeWalk.tuple_form.__name__,
    frozenset: TypeWalk.set_form.__name__,
    Mapping: TypeWalk.mapping_form.__name__,
    dict: TypeWalk.mapping_form.__name__,
}
"""The method of a type with arguments, by its origin."""


class _Walk(TypeWalk[Form, str]):
    """The forms of all parts of one type; a class in the making stands for itself in references to
    it."""

    def __init__(self, policy: Forms) -> None:
        self._policy = policy
        self._objects: dict[Any, Form] = {}

    def of(self, kind: Any, where: str) -> Form:
        kind, checks = checks_of(kind)
        form = self.unchecked(kind, where)

        def read(plain: Any, path: str) -> Any:
            value = form.read(plain, path)
            for check in checks:
                value = check(value, path.removeprefix("."))
            return value

        return Form(form.write, read) if checks and not self._policy.exact else form

    def no_form(self, kind: Any, place: str) -> Form:
        raise TypeError(f"{place}: {kind!r} has no form in JSON; give it one in edgeshard.forms")

    def any_form(self, place: str) -> Form:
        return Form(self._policy.write_any, lambda plain, path: plain)

    def scalar_form(self, kind: Any, place: str) -> Form:
        if kind is bytes:
            return self._form(
                "base64",
                lambda value: b64encode(value).decode(),
                lambda plain, path: b64decode(plain),
            )
        return self._form(
            f"a valid {_SCALARS[kind]}", partial(_written, kind), partial(_taken, kind)
        )

    def object_form(self, kind: Any, place: str) -> Form:
        return self._object(kind, place, self._policy.exact)

    def enum_form(self, kind: type[Enum], place: str) -> Form:
        # If an enumeration knows the values of earlier versions, its `_missing_` converts them.
        return self._one_of(tuple(kind), kind)

    def error_form(self, kind: Any, place: str) -> Form:
        return self._form(
            "an error", self._policy.write_error, lambda plain, path: self._policy.read_error(plain)
        )

    def literal_form(self, kind: Any, arguments: tuple[Any, ...], place: str) -> Form:
        return self._one_of(arguments)

    def _form(
        self, what: str, write: Callable[[Any], Any], read: Callable[[Any, str], Any]
    ) -> Form:
        """A form whose `read` may raise Python's own errors if JSON types are not `what`."""

        def refusing(plain: Any, path: str) -> Any:
            try:
                return read(plain, path)
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
                why = f"should be {what}" + (f": {error}" if str(error) else "")
                raise self._policy.refused(path, why) from None

        return Form(write, refusing)

    def _one_of(self, values: tuple[Any, ...], read: Callable[[Any], Any] | None = None) -> Form:
        written = {value: value.value if isinstance(value, Enum) else value for value in values}
        choices = {plain: value for value, plain in written.items()}
        what = f"one of {', '.join(map(str, choices))}"
        return self._form(
            what,
            written.__getitem__,
            lambda plain, path: choices[plain] if read is None else read(plain),
        )

    def tuple_form(self, kind: Any, arguments: tuple[Any, ...], place: str) -> Form:
        return self._items(arguments, place)

    def _items(self, arguments: tuple[Any, ...], where: str) -> Form:
        is_many = arguments[-1] is Ellipsis
        forms = [self.of(item, where) for item in arguments if item is not Ellipsis]

        def paired(values: Collection[Any]) -> Iterable[tuple[Form, Any]]:
            return zip(repeat(forms[0]), values) if is_many else zip(forms, values, strict=True)

        def read(plain: Any, path: str) -> tuple[Any, ...]:
            if not isinstance(plain, list):
                raise TypeError
            return tuple(
                form.read(item, f"{path}[{place}]")
                for place, (form, item) in enumerate(paired(plain))
            )

        return self._form(
            "a valid array", lambda value: [form.write(item) for form, item in paired(value)], read
        )

    def set_form(self, kind: Any, arguments: tuple[Any, ...], place: str) -> Form:
        write, read = self._items((*arguments, ...), place)
        # In an order of its own, so that equal sets have one form.
        return Form(
            lambda value: sorted(write(value), key=json.dumps),
            lambda *plain: frozenset(read(*plain)),
        )

    def mapping_form(self, kind: Any, arguments: tuple[Any, ...], place: str) -> Form:
        """An object; if keys are no texts, a list of pairs."""
        if not issubclass(checks_of(arguments[0])[0], str):
            write, read = self._items((GenericAlias(tuple, arguments), ...), place)
            return Form(
                lambda mapping: write(mapping.items()), lambda plain, path: dict(read(plain, path))
            )
        keys, values = (self.of(item, place) for item in arguments)

        def read_object(plain: Any, path: str) -> dict[Any, Any]:
            return {
                keys.read(k, f"{path}.{k}"): values.read(v, f"{path}.{k}") for k, v in plain.items()
            }

        def write_object(mapping: Mapping[Any, Any]) -> dict[str, Any]:
            return {keys.write(k): values.write(v) for k, v in mapping.items()}

        return self._form("an object", write_object, read_object)

    def _object(self, kind: Any, where: str, has_tag: bool) -> Form:
        if (kind, has_tag) in self._objects:
            return self._objects[kind, has_tag]
        origin: Any = get_origin(kind) or kind
        name = origin.__name__
        policy = self._policy
        parts = dict[str, Form]()
        parameters = signature(origin).parameters.values()
        needed = [part.name for part in parameters if part.default is part.empty]

        def write(value: Any) -> dict[str, Any]:
            if type(value) is not origin:
                raise TypeError(f"{type(value).__name__} where {name} belongs")
            tag = {TAG: name} if has_tag else {}
            return tag | {part: form.write(getattr(value, part)) for part, form in parts.items()}

        def read(plain: Any, path: str) -> Any:
            if not isinstance(plain, dict) or (has_tag and plain.get(TAG) != name):
                raise TypeError
            values = {
                part: form.read(plain[part], f"{path}.{part}")
                for part, form in parts.items()
                if part in plain
            }
            if missing := [
                part for part in (parts if policy.exact else needed) if part not in values
            ]:
                raise policy.refused(f"{path}.{missing[0]}", "is missing")
            if policy.exact and (unknown := plain.keys() - {TAG, *parts}):
                raise policy.refused(f"{path}.{min(unknown)}", "is not known")
            value = origin(**values)
            if not policy.exact and hasattr(value, "check"):
                self._check(value, path)
            return value

        what = f"an object of type {name}" if has_tag else "an object"
        form = self._objects[kind, has_tag] = self._form(what, write, read)
        type_arguments = dict(
            zip(getattr(origin, "__parameters__", ()), get_args(kind), strict=False)
        )
        for field, hint in policy.hints(origin, where).items():
            parts[field] = self.of(type_arguments.get(hint, hint), f"{where}: {name}.{field}")
        return form

    def _check(self, value: Any, path: str) -> None:
        try:
            value.check()
        except InvalidArgumentError as error:
            if not error.message.startswith(error.field):
                raise  # it describes the whole already
            why = error.message.removeprefix(error.field).lstrip(": ")
            raise self._policy.refused(f"{path}.{error.field}", why) from None

    def union_form(self, kind: Any, arguments: tuple[Any, ...], place: str) -> Form:
        return self._union(arguments, place)

    def _union(self, members: tuple[Any, ...], where: str) -> Form:
        """One of several classes, distinguished by their names, None, or one other type, such as an
        error of any class."""
        classes = [kind for kind in members if is_object(kind)]
        has_tag = self._policy.exact or len(classes) + (EdgeShardError in members) > 1
        forms = _Told()
        for kind in members:
            is_told = kind is NoneType or (has_tag and kind in classes)
            name = (get_origin(kind) or kind).__name__ if is_told else ""
            if name in forms:
                raise TypeError(
                    f"{where}: {kind} and another type of the union have the same form in JSON"
                )
            forms[name] = (
                self._object(kind, where, has_tag) if kind in classes else self.of(kind, where)
            )

        def read(plain: Any, path: str) -> Any:
            name = str(plain.get(TAG)) if isinstance(plain, dict) else type(plain).__name__
            return forms[name].read(plain, path)

        return self._form(
            f"one of {', '.join(forms)}",
            lambda value: forms[type(value).__name__].write(value),
            read,
        )


class _Told(dict[str, Form]):
    """The forms of a union by the names of their classes; that under "" is for all other values."""

    def __missing__(self, name: str) -> Form:
        if "" not in self:
            raise TypeError(f"{name} is none of {', '.join(self)}")
        return self[""]


def field_names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass; none of another type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def is_object(kind: Any) -> bool:
    """Whether a type is a dataclass."""
    return is_dataclass(get_origin(kind) or kind)


def _written(kind: Any, value: Any) -> Any:
    if not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
    return str(value) if kind is float and not math.isfinite(value) else value


def _taken(kind: Any, plain: Any, path: str) -> Any:
    if kind is float and (type(plain) is int or plain in _NOT_FINITE):
        return float(plain)
    if type(plain) is not kind:
        raise TypeError
    if kind is str:
        plain.encode()  # JSON may spell half of a surrogate pair, which nothing else takes
    return plain
