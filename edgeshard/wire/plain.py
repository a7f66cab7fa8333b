"""Values and messages whose fields have the same names: only the fields that are converted are spelled out."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

AnyMessage = TypeVar("AnyMessage", bound=Message)
Value = TypeVar("Value")


def message_of(value: Any, kind: type[AnyMessage], /, **converted: Any) -> AnyMessage:
    """A message of `kind` with the fields of a dataclass."""
    names: tuple[str, ...] = value.__match_args__
    return kind(**{name: getattr(value, name) for name in names if name not in converted}, **converted)


def value_of(message: Message, kind: type[Value], /, **converted: Any) -> Value:
    """A value of `kind`, a dataclass, with the fields of a message."""
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    return kind(**{name: getattr(message, name) for name in names if name not in converted}, **converted)
