"""Messages with any value in any field, built from their descriptors and from the bounds of the
values' types."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from edgeshard.domain.checks import First, checks_of
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import MAX_ID_LENGTH, MAX_TEXT
from edgeshard.domain.requests.generation import PROMPT_LOGPROBS_POSITIONS
from edgeshard.proto.v1 import coordinator_pb2, head_pb2
from edgeshard.rpc.channel import MESSAGE_LIMIT_BYTES
from edgeshard.wire import codec
from edgeshard.wire.control import agent_message_from_wire, registration_from_wire, report_from_wire
from edgeshard.wire.generation import MAX_TIMINGS, MAX_TOP
from edgeshard.wire.head_stream import head_message_from_wire

MessageT = TypeVar("MessageT", bound=Message)
Known = Callable[[str], Sequence[Any]]
"""Values that the receiver knows, by the name of a field."""

MOST_LENGTHS = 1 << 22
"""No list or text is longer."""
_WHOLE = {
    FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_FIXED32: 32,
    FieldDescriptor.TYPE_UINT64: 64, FieldDescriptor.TYPE_FIXED64: 64,
    FieldDescriptor.TYPE_INT32: -31, FieldDescriptor.TYPE_SINT32: -31,
    FieldDescriptor.TYPE_INT64: -63, FieldDescriptor.TYPE_SINT64: -63,
    FieldDescriptor.TYPE_SFIXED32: -31, FieldDescriptor.TYPE_SFIXED64: -63,
}  # fmt: skip
"""The bits of a whole number, negative for one with a sign."""
_FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    math.nan,
    math.inf,
    -math.inf,
    5e-324,
    -5e-324,
    1e-9,
    1e9,
    1e30,
    -1e30,
)
_DOUBLES = (*_FLOATS, 1.7e308, -1.7e308)
_TEXTS = (
    *(
        "",
        "x",
        "\x00",
        "\x1b[2J",
        "\u202e",
        "\ufffe",
        "a/b",
        "u/1/prepare/0",
        "../..",
        "{}",
        '"',
        "\n",
        "\r\n",
        "%s",
    ),
    *(
        "é\U0001f600",
        "-1",
        "NaN",
        "1e999",
        "127.0.0.1:1",
        "[::1]:70000",
        "__proto__",
        "<script>",
        "edgeshard://node/a",
    ),
)
_BYTES = (b"", b"\x00", b"{", b"{}", b'{"a":', b"[[[[[[[[", b"\xff\xfe")
_LENGTHS = (MAX_ID_LENGTH, MAX_TEXT, 1024, 1 << 16, 1 << 20)


_READERS: tuple[tuple[Callable[[Any], Any], type[Message]], ...] = (
    (registration_from_wire, coordinator_pb2.RegisterRequest),
    (report_from_wire, coordinator_pb2.ReportProfileRequest),
    (agent_message_from_wire, coordinator_pb2.ControlRequest),
    (head_message_from_wire, head_pb2.AttachRequest),
)


class MessageBuilder:
    """Builds messages by the rolls of `dice`.

    No list has more than `most_items`, and no message much more than `most_bytes`. A fraction
    `many` of the lists and texts has about as many items as a bound permits. A fraction `likely` of
    the fields has a value that the receiver knows.
    """

    def __init__(
        self,
        dice: random.Random,
        known: Known,
        most_items: int = MOST_LENGTHS,
        most_bytes: int = MESSAGE_LIMIT_BYTES,
        many: float = 0.15,
        likely: float = 0.7,
    ) -> None:
        self._dice = dice
        self._known = known
        self._most_items = most_items
        self._most_bytes = most_bytes
        self._many = many
        self._likely = likely
        self._left = 0

    def build(self, kind: type[MessageT]) -> MessageT:
        """A message of this class."""
        self._left = self._most_bytes
        return self._message(kind, 0)

    def _message(self, kind: type[MessageT], depth: int) -> MessageT:
        message, descriptor = kind(), kind.DESCRIPTOR
        oneofs: list[Any] = list(descriptor.oneofs)
        chosen = {self._dice.choice(oneof.fields).name for oneof in oneofs}
        absent = self._dice.choice((0.0, 0.2, 0.6))
        fields: list[Any] = list(descriptor.fields)
        for field in fields:
            is_one_of = (
                field.containing_oneof is not None
                and not field.containing_oneof.name.startswith("_")
            )
            rate = (0.02 if field.name in chosen else 1.0) if is_one_of else absent
            if self._dice.random() < rate or self._left <= 0 or depth > 8:
                continue
            self._set(message, field, depth)
        return message

    def _set(self, message: Message, field: Any, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            entry = field.message_type.fields_by_name
            for _ in range(min(self._count(field), 2000)):
                if entry["value"].message_type is None:
                    entries[self._value(entry["key"], depth)] = self._value(entry["value"], depth)
        elif field.is_repeated:
            count = self._count(field)
            distinct = [
                self._value(field, depth) for _ in range(min(count, self._dice.choice((1, 2, 12))))
            ]
            items = distinct * (count // len(distinct)) if distinct else []
            getattr(message, field.name).extend(items[: max(1, self._left // self._size(distinct))])
            self._left -= len(items) * self._size(distinct)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self._value(field, depth))
        else:
            setattr(message, field.name, self._value(field, depth))

    @staticmethod
    def _size(items: Sequence[Any]) -> int:
        """Bytes of the largest of these items on the wire, nearly."""
        sizes = [
            item.ByteSize() + 3
            if isinstance(item, Message)
            else len(item) + 3
            if isinstance(item, str | bytes)
            else 4
            for item in items
        ]
        return max(sizes, default=1)

    def _count(self, field: Any) -> int:
        """A few items, or about the number that a bound permits."""
        dice = self._dice
        if dice.random() >= self._many:
            return dice.choice((0, 1, 1, 2, 3, 7))
        own = bounds().get((field.containing_type.full_name, field.name))
        bound = (
            own
            if own is not None and dice.random() < 0.7
            else dice.choice(sorted(set(bounds().values())))
        )
        many = dice.choice((bound - 1, bound, bound + 1, 2 * bound, 200_000))
        return max(0, min(many, self._most_items))

    def _value(self, field: Any, depth: int) -> Any:
        dice = self._dice
        if field.message_type is not None:
            return self._message(GetMessageClass(field.message_type), depth + 1)
        known = self._known(field.name)
        if known and dice.random() < self._likely:
            return dice.choice(known)
        if field.enum_type is not None:
            return dice.choice([*(value.number for value in field.enum_type.values), 77, -1])
        if field.type in _WHOLE:
            return self._whole(_WHOLE[field.type])
        if field.type == FieldDescriptor.TYPE_BOOL:
            return dice.random() < 0.5
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._long(dice.choice(_TEXTS))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._long(dice.choice(_BYTES))
        return dice.choice(_FLOATS if field.type == FieldDescriptor.TYPE_FLOAT else _DOUBLES)

    def _whole(self, bits: int) -> int:
        dice = self._dice
        near = dice.choice((0, 0, 1, 1, 2, 3, 7, 255, 1 << 16, 1 << 20))
        far = dice.choice(((1 << abs(bits)) - 1, 1 << (abs(bits) - 1), 1 << 31, (1 << 31) - 1))
        number = near if dice.random() < 0.7 else far
        number = min(number, (1 << abs(bits)) - 1)
        return -number if bits < 0 and dice.random() < 0.3 else number

    def _long(self, piece: Any) -> Any:
        """The piece, or rarely it again and again, to a length near a bound."""
        if not piece or self._dice.random() >= self._many:
            return piece
        length = self._dice.choice(_LENGTHS) + self._dice.choice((-1, 0, 1))
        length = min(length, self._most_items * 4, max(1, self._left))
        self._left -= length
        return (piece * (1 + length // len(piece)))[:length]


@cache
def bounds() -> Mapping[tuple[str, str], int]:
    """The most items of each list in an agent's messages, by the message's full name and the
    field's."""
    for from_wire, kind_of_message in _READERS:
        for message in _each_kind(kind_of_message):
            with suppress(InvalidArgumentError):  # It is empty, but now its forms are known.
                from_wire(message)
    found = {
        ("edgeshard.proto.v1.HeadToken", "top"): MAX_TOP,
        ("edgeshard.proto.v1.HeadToken", "timings"): MAX_TIMINGS,
        ("edgeshard.proto.v1.HeadTokens", "timings"): MAX_TIMINGS,
        ("edgeshard.proto.v1.PromptLogprobs", "logprobs"): PROMPT_LOGPROBS_POSITIONS,
    }
    for kind, name in list(codec._FORMS):
        if not hasattr(kind, "__dataclass_fields__"):
            continue
        for field, hint in get_type_hints(kind, include_extras=True).items():
            _, checks = checks_of(hint)
            for check in checks:
                if isinstance(check, First):
                    found[name, codec.NAMES.get((kind, field), field)] = _most(check)
    return found


def _each_kind(kind: type[Message]) -> Iterator[Any]:
    """An empty message; for a choice of several kinds, one of each."""
    descriptor = kind.DESCRIPTOR
    fields = [
        field
        for oneof in descriptor.oneofs
        if not oneof.name.startswith("_")
        for field in oneof.fields
    ]
    for field in fields:
        yield kind(**{field.name: {}})
    if not fields:
        yield kind()


def _most(check: First) -> int:
    """The most items that a check permits."""
    low, high = 0, MOST_LENGTHS
    while low < high:
        middle = (low + high + 1) // 2
        try:
            check.check_count(middle, "items")
            low = middle
        except InvalidArgumentError:
            high = middle - 1
    return low
