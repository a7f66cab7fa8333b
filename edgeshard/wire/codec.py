"""Values to messages and back, by their declared types.

A pair of functions is made for a class and a message whose fields have the same names, on its first
use:

    node_to_wire, node_from_wire = pair(Node, pb.Node)

Nested classes are found in the same way, each by its field's type and the message's descriptor. So
a new field is written in two places: the class and the .proto file. Tables at the end
have names that differ, and enumerations in which an unknown number has a meaning. A class that has
another form than its message registers its own functions here (`by_hand`). The checks at the fields
refuse invalid values from strangers (`edgeshard.domain.checks`).

An absent optional field is None or, if its class sets one, has its default. Raises TypeError on
first use for a field that has no form.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from edgeshard.domain.checks import Check, First, checks_of
from edgeshard.domain.control.commands import MeasureCompute, Term
from edgeshard.domain.control.site import BlobHeader, BlobRange, MissingBlob, NodeProgress, Site
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import LengthsFrom, Speculation
from edgeshard.domain.errors import (
    ERROR_BY_CODE,
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    invalid,
)
from edgeshard.domain.identity import Principal, principal_from_uri
from edgeshard.domain.ids import MAX_ID_LENGTH
from edgeshard.domain.models.packed_units import PackedOn
from edgeshard.domain.nodes.device import StagePhase, Support, WeightLoadingWork
from edgeshard.domain.nodes.profile import Effort, LinkSample, MeasuredLink
from edgeshard.domain.requests.conversation import ToolFormat
from edgeshard.domain.requests.generation import FinishReason, Prompt
from edgeshard.forms import TypeWalk
from edgeshard.proto.v1 import common_pb2 as pb

MAX_RETRY_AFTER_S = 86_400.0


def to_failure(error: EdgeShardError) -> pb.Failure:
    return pb.Failure(
        code=int(error.code),
        reason=error.reason,
        field=error.field,
        # A path in it may hold bytes that are no text, which a message cannot.
        message=error.message.encode("utf-8", "replace").decode(),
        retry_after_s=error.retry_after_s or 0.0,
    )


def from_failure(failure: pb.Failure) -> EdgeShardError:
    """The error of a message. Errors cut long messages and fields themselves. A wait that is none
    is left out, and one of more than a day is a day."""
    retry_after_s = failure.retry_after_s
    is_wait = math.isfinite(retry_after_s) and retry_after_s > 0
    kind = ERROR_BY_CODE.get(failure.code, InternalError)
    return kind(
        failure.message,
        field=failure.field,
        reason=failure.reason[:MAX_ID_LENGTH],
        retry_after_s=min(retry_after_s, MAX_RETRY_AFTER_S) if is_wait else None,
    )


ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)
EnumT = TypeVar("EnumT", bound=Enum)
_ABSENT = object()


class MessageForm(NamedTuple):
    """`write` returns the argument of a message's constructor; `read` takes the message's value,
    and the field's name."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]


class _Field(NamedTuple):
    name: str
    wire: str
    form: MessageForm | None
    """None if it is the same in both."""
    checks: tuple[Check, ...]
    absent: Any
    """Its value if the message has none and that can be detected; else `_ABSENT`."""


_FORMS: dict[tuple[Any, str], MessageForm] = {}
"""By class and full name of a message."""


def by_hand(
    kind: type[ValueT],
    message: type[MessageT],
    to_wire: Callable[[ValueT], MessageT],
    from_wire: Callable[[MessageT], ValueT],
) -> None:
    """The functions for a class and a message of another form, wherever they are nested within
    others."""
    _FORMS[kind, message.DESCRIPTOR.full_name] = _given((to_wire, from_wire))


def pair(
    kind: type[ValueT], message: type[MessageT]
) -> tuple[Callable[[ValueT], MessageT], Callable[[MessageT], ValueT]]:
    """The functions to a message and back; the second raises InvalidArgumentError naming the field
    at fault."""
    return _functions(kind, cache(lambda: _form_of(kind, message.DESCRIPTOR)))


def by_fields(
    kind: type[ValueT], message: type[MessageT]
) -> tuple[Callable[[ValueT], MessageT], Callable[[MessageT], ValueT]]:
    """As `pair`, of a class that is converted by hand (`by_hand`): what its functions have in
    common with others."""
    return _functions(kind, cache(lambda: _object(kind, message.DESCRIPTOR)))


def _functions(
    kind: Any, form: Callable[[], MessageForm]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    def to_wire(value: Any) -> Any:
        return form().write(value)

    def from_wire(wire_message: Any) -> Any:
        return form().read(wire_message, "")

    to_wire.__annotations__ = {"value": kind}
    return to_wire, from_wire


def choice(
    message: type[MessageT], **members: Any
) -> tuple[Callable[[Any], MessageT], Callable[[MessageT], Any | None]]:
    """The functions for a message that is one of several values, by the name of each one's field.

    The second returns None if this version does not know the message's kind.
    """
    fields = message.DESCRIPTOR.fields_by_name
    (oneof,) = message.DESCRIPTOR.oneofs
    names = {kind: name for name, kind in members.items()}

    def to_wire(value: Any) -> MessageT:
        name = names[type(value)]
        return message(**{name: _form_of(type(value), fields[name].message_type).write(value)})

    def from_wire(wire_message: MessageT) -> Any | None:
        name = wire_message.WhichOneof(oneof.name)
        if name not in members:
            return None
        return _form_of(members[name], fields[name].message_type).read(
            getattr(wire_message, name), name
        )

    to_wire.__annotations__ = {"value": Union[tuple(names)]}  # noqa: UP007 (of types in a variable)
    return to_wire, from_wire


def numbers(
    kind: type[EnumT], wire_enum: Any, field: str
) -> tuple[Callable[[EnumT], Any], Callable[..., EnumT]]:
    """The functions for an enumeration whose number is in no value of its own, by default in
    `field`.

    `wire_enum` is the messages' enumeration, such as `pb.DataType`. The second raises
    InvalidArgumentError naming the field.
    """
    form = cache(lambda: _enum_form(kind, wire_enum.DESCRIPTOR))

    def to_wire(value: EnumT) -> Any:
        return form().write(value)

    def from_wire(number: int, field: str = field) -> EnumT:
        member: EnumT = form().read(number, field)
        return member

    to_wire.__annotations__ = {"value": kind}
    return to_wire, from_wire


def _form_of(kind: Any, message: Any) -> MessageForm:
    key = kind, message.full_name
    form = _FORMS.get(key)
    if form is None:
        form = _FORMS[key] = _given(BY_HAND[kind]) if kind in BY_HAND else _object(kind, message)
    return form


def _given(functions: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> MessageForm:
    to_wire, from_wire = functions
    return MessageForm(to_wire, lambda wire_message, _: from_wire(wire_message))


def _object(kind: Any, message: Any) -> MessageForm:
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        _field(kind, name, hints[name], default, message)
        for name, default in _defaults(kind).items()
    ]
    return MessageForm(_writer(fields, GetMessageClass(message)), _reader(fields, kind))


def _writer(fields: list[_Field], make: Callable[..., Message]) -> Callable[[Any], Message]:
    values = _getter([field.name for field in fields])
    wires = [field.wire for field in fields]
    converted = [(field.wire, field.form.write) for field in fields if field.form is not None]

    def write(value: Any) -> Message:
        items = dict(zip(wires, values(value), strict=True))
        for name, to_wire in converted:
            if items[name] is not None:
                items[name] = to_wire(items[name])
        return make(**items)

    return write


def _reader(fields: list[_Field], kind: Any) -> Callable[[Message, str], Any]:
    check = getattr(kind, "check", None)
    names = [field.name for field in fields]
    make_of = MAKERS.get(kind)
    make = kind if make_of is None else lambda *items: make_of(dict(zip(names, items, strict=True)))
    values = _getter([field.wire for field in fields])
    # Split, as most fields are the same in both or have only a form, and a heartbeat has many of
    # them.
    formed = [
        (index, field.form.read, field.wire)
        for index, field in enumerate(fields)
        if field.form is not None and not field.checks and field.absent is _ABSENT
    ]
    others = [
        (index, _field_reader(field))
        for index, field in enumerate(fields)
        if field.checks or field.absent is not _ABSENT
    ]

    def read(wire_message: Message, _: str) -> Any:
        items = list(values(wire_message))
        for index, from_wire, name in formed:
            items[index] = from_wire(items[index], name)
        for index, convert in others:
            items[index] = convert(wire_message, items[index])
        value = make(*items)
        if check is not None:
            check(value)
        return value

    return read


def _getter(names: list[str]) -> Callable[[Any], Iterable[Any]]:
    """What gets these attributes of a thing."""
    if len(names) < 2:
        return lambda thing: [getattr(thing, name) for name in names]
    return attrgetter(*names)


def _field_reader(field: _Field) -> Callable[[Message, Any], Any]:
    """A field's value, of the message and what it has there."""
    _, name, form, checks, absent = field
    before: list[Check] = [check for check in checks if isinstance(check, First)]
    after: list[Check] = [check for check in checks if not isinstance(check, First)]
    convert = _same if form is None else form.read
    if absent is _ABSENT and form is None and len(checks) == len(after) == 1:
        (check,) = after
        return lambda _, item: check(item, name)

    def read(message: Message, item: Any) -> Any:
        if absent is not _ABSENT and not message.HasField(name):
            return absent
        for check in before:
            check(item, name)
        value = convert(item, name)
        for check in after:
            value = None if value is None else check(value, name)
        return value

    return read


def _defaults(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass, with the value of each if it is not given."""
    return {
        item.name: item.default
        if item.default_factory is dataclasses.MISSING
        else item.default_factory()
        for item in dataclasses.fields(kind)
    }


def _field(kind: Any, name: str, hint: Any, default: Any, message: Descriptor) -> _Field:
    wire = NAMES.get((kind, name), name)
    wire_field = message.fields_by_name.get(wire)
    where = f"{kind.__name__}.{name}"
    if wire_field is None:
        raise TypeError(
            f"{where}: {message.full_name} has no field {wire}; give it one, or its name in NAMES"
        )
    inner, checks = checks_of(hint)
    inner, optional = _without_none(inner)
    inner, more = checks_of(inner)
    form = _WALK.of(inner, _Place(wire_field, where, optional))
    absent = _ABSENT
    if wire_field.has_presence:
        # A message that is absent, of a class that cannot be: each of its fields is as it is in an
        # empty one.
        has_default = default is not dataclasses.MISSING and wire_field.message_type is None
        absent = None if optional else default if has_default else _ABSENT
    elif optional:
        form = _empty_is_none(form, wire_field)
    return _Field(name, wire, form, (*checks, *more), absent)


def _without_none(hint: Any) -> tuple[Any, bool]:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    rest = tuple(member for member in members if member is not type(None))
    kind = rest[0] if len(rest) == 1 else Union[rest]  # noqa: UP007 (of types in a variable)
    return kind, len(rest) < len(members)


def _empty_is_none(form: MessageForm | None, field: FieldDescriptor) -> MessageForm:
    read = form.read if form is not None else _same
    return MessageForm(
        form.write if form is not None else lambda value: value,
        lambda item, name: read(item, name) if item else None,
    )


def _same(item: Any, _: str) -> Any:
    return item


class _Place(NamedTuple):
    """The field of a message at which a type is converted."""

    field: FieldDescriptor
    where: str
    optional: bool = False
    is_item: bool = False
    """Whether it is one of the values of the field, not all."""


class _MessageWalk(TypeWalk[MessageForm | None, _Place]):
    """The forms of a field's value: of one thing, of several, or of a mapping.

    None if it is the same in both.
    """

    def of(self, kind: Any, place: _Place) -> MessageForm | None:
        if place.is_item or get_origin(kind) not in (tuple, Mapping, dict):
            kind, _ = checks_of(kind)
            if kind in BY_HAND:
                return _given(BY_HAND[kind])
            message: Any = place.field.message_type
            if message is not None and (kind, message.full_name) in _FORMS:
                return self.object_form(kind, place)
        return self.unchecked(kind, place)

    def no_form(self, kind: Any, place: _Place) -> MessageForm | None:
        raise TypeError(
            f"{place.where}: {kind!r} has no form in a message; give it one by `by_hand`"
        )

    def scalar_form(self, kind: Any, place: _Place) -> MessageForm | None:
        return self.no_form(kind, place) if kind is types.NoneType else None

    def literal_form(
        self, kind: Any, arguments: tuple[Any, ...], place: _Place
    ) -> MessageForm | None:
        return None

    def enum_form(self, kind: type[Enum], place: _Place) -> MessageForm | None:
        return _enum_form(kind, place.field.enum_type)

    def object_form(self, kind: Any, place: _Place) -> MessageForm | None:
        if place.field.message_type is None:
            return self.no_form(kind, place)
        form = _form_of(kind, place.field.message_type)
        return MessageForm(form.write, _within(form.read))

    def mapping_form(
        self, kind: Any, arguments: tuple[Any, ...], place: _Place
    ) -> MessageForm | None:
        return (
            _json_form()
            if place.field.type == FieldDescriptor.TYPE_BYTES
            else MessageForm(dict, lambda items, _: dict(items))
        )

    def tuple_form(
        self, kind: Any, arguments: tuple[Any, ...], place: _Place
    ) -> MessageForm | None:
        field, where, optional, is_item = place
        message: Any = field.message_type
        if is_item:
            return self.no_form(kind, place) if message is None else _tuple_form(message)
        if message is not None and message.GetOptions().map_entry:
            return MessageForm(dict, lambda items, _: tuple(sorted(items.items())))
        if not field.is_repeated:
            # A message around a list, so that it can be absent.
            (within,), wrapper = message.fields, GetMessageClass(message)
            items = self.of(kind, _Place(within, where, optional))
            assert items is not None
            return MessageForm(
                lambda value: (
                    wrapper(**{within.name: items.write(value)}) if value or optional else None
                ),
                lambda wire_message, name: items.read(getattr(wire_message, within.name), name),
            )
        one = self.of(arguments[0], _Place(field, where, is_item=True))
        if one is None:
            return MessageForm(lambda value: value, lambda items, _: tuple(items))
        return MessageForm(
            lambda value: [one.write(item) for item in value],
            lambda items, name: tuple([one.read(item, name) for item in items]),
        )


_WALK = _MessageWalk()


def _tuple_form(message: Descriptor) -> MessageForm:
    """For several different values: the message's fields, in their order."""
    message_class, names = GetMessageClass(message), [item.name for item in message.fields]
    values = attrgetter(*names)
    return MessageForm(
        lambda value: message_class(**dict(zip(names, value, strict=True))),
        lambda wire_message, _: values(wire_message),
    )


def _within(from_wire: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """As `from_wire`, with an error that names the way to its field."""

    def read(wire_message: Any, name: str) -> Any:
        try:
            return from_wire(wire_message, name)
        except InvalidArgumentError as error:
            raise error.within(name) from None

    return read


def _enum_form(kind: type[Enum], numbers: EnumDescriptor | None) -> MessageForm:
    """By the member's name if the message has an enumeration, such as STAGE_PHASE_READY; else by
    its text."""
    if numbers is None:
        member_by_value: dict[Any, Any] = {member.value: member for member in kind}
    else:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", numbers.name).upper() + "_"
        by_name = {value.name.removeprefix(prefix): value.number for value in numbers.values}
        member_by_value = {
            by_name[member.name]: member for member in kind if member.name in by_name
        }
        nothing = UNSPECIFIED.get(kind)
        member_by_value |= {0: nothing} if nothing is not None else {}
    back = {member: written for written, member in member_by_value.items()}
    missing = [member for member in kind if member not in back]
    if missing:
        raise TypeError(f"{kind.__name__}: the message has no number for {missing}")
    parse = getattr(kind, "parse", None)
    if numbers is None and parse is not None:
        return MessageForm(back.__getitem__, parse)
    unknown = UNKNOWN.get(kind)

    def read(item: Any, name: str) -> Any:
        member = member_by_value.get(item, unknown)
        if member is None:
            raise _unknown(kind, name, item)
        return member

    return MessageForm(back.__getitem__, read)


def _unknown(kind: type[Enum], field: str, item: Any) -> InvalidArgumentError:
    text = repr(item[:80]) if isinstance(item, str) else item
    why = f"is {text}, a {kind.__name__} that this version does not know: upgrade it"
    return invalid(field, why, f"UNKNOWN_{kind.__name__.upper()}")


def _json_form() -> MessageForm:
    def read(text: bytes, name: str) -> dict[str, Any]:
        try:
            values = json.loads(text or b"{}")
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise InvalidArgumentError(f"{name} is not a JSON object", field=name)
        return values

    return MessageForm(lambda values: json.dumps(dict(values)).encode() if values else b"", read)


NAMES: Mapping[tuple[type, str], str] = {
    (BlobHeader, "digest"): "sha256",
    (BlobRange, "digest"): "sha256",
    (LinkSample, "size_bytes"): "bytes",
    (MeasureCompute, "config"): "config_json",
    (MeasuredLink, "receiver"): "receiver_id",
    (MeasuredLink, "sender"): "sender_id",
    (MissingBlob, "digest"): "sha256",
    (MissingBlob, "received"): "offset",
    (NodeProgress, "missed"): "missed_nodes",
    (PackedOn, "ids"): "units",
    (Site, "config"): "config_json",
    (Term, "number"): "term",
}
"""A field's name in the message, if it has another."""

UNKNOWN: Mapping[type[Enum], Enum] = {
    FinishReason: FinishReason.CANCELLED,
    LengthsFrom: LengthsFrom.DEFAULT,
    Speculation: Speculation.OFF,
    StagePhase: StagePhase.FAILED,
    Support: Support.UNKNOWN,
    ToolFormat: ToolFormat.NONE,
    WeightLoadingWork: WeightLoadingWork.CONVERTING,
}
"""The value for a member that this version does not know. Other enumerations refuse unknown
members."""

UNSPECIFIED: Mapping[type[Enum], Enum] = {Effort: Effort.FULL, ToolFormat: ToolFormat.NONE}
"""The member that a message does not name: number 0."""

MAKERS: Mapping[type, Callable[[Mapping[str, Any]], Any]] = {DeploymentSpec: parse_spec}
"""Classes whose values are made, and checked, by a function of their fields by name."""

BY_HAND: Mapping[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    EdgeShardError: (to_failure, from_failure),
    Principal: (attrgetter("uri"), principal_from_uri),
    Prompt: (lambda prompt: prompt if isinstance(prompt, str) else "", lambda text: text),
}
"""Classes of another form than their message, with the functions to it and back."""
