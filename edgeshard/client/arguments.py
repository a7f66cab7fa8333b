"""Checks of the SDK's arguments by their types. Python does not check them, and the errors of the
libraries below would be no help."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.chat import Conversation
from edgeshard.domain.requests.generation import Biases

_LARGEST_TOKEN = 2**32 - 1
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "True or False", type(None): "None"}

Message = Mapping[str, Any]
"""As OpenAI's chat completions have it, such as `{"role": "user", "content": "Hello"}`."""
Tool = Mapping[str, Any]
"""As in OpenAI's API: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""


def checked(name: str, value: Any, kind: Any) -> Any:
    """The value if it is of this kind, with a whole number for a float taken as one and lists as tuples.

    Raises InvalidArgumentError naming the argument.
    """
    if get_origin(kind) in (Union, UnionType):
        if not any(_is_of(value, choice) for choice in get_args(kind)):
            raise wrong_type(name, value, " or ".join(map(_words, get_args(kind))))
        return value
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not all(_is_of(i, item) for i in value):
            raise wrong_type(name, value, f"a sequence, each item {_words(item)}")
        return tuple(value)
    if not _is_of(value, kind):
        raise wrong_type(name, value, _words(kind))
    return float(value) if kind is float else value


def checked_tokens(name: str, value: Any) -> tuple[int, ...]:
    """Token ids. Raises InvalidArgumentError naming the argument."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not all(_is_of(i, int) for i in value):
        raise wrong_type(name, value, "a sequence of token ids")
    if any(not 0 <= token <= _LARGEST_TOKEN for token in value):
        raise InvalidArgumentError(f"{name} holds a token id that is not from 0 to {_LARGEST_TOKEN}", field=name)
    return tuple(value)


def checked_biases(name: str, value: Any) -> Biases:
    """Token ids with their biases. Raises InvalidArgumentError naming the argument."""
    if not isinstance(value, Mapping) or not all(_is_of(bias, float) for bias in value.values()):
        raise wrong_type(name, value, "a mapping of token ids to numbers")
    return tuple((token, float(value[token])) for token in sorted(checked_tokens(name, list(value))))


def conversation_of(
    messages: str | Sequence[Message], tools: Sequence[Tool] | None, variables: Mapping[str, Any] | None
) -> Conversation:
    """The conversation in the arguments of `chat`; a text is one message of the user's. The coordinator checks more.

    Raises InvalidArgumentError naming the argument.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for name, value in (("messages", messages), ("tools", () if tools is None else tools)):
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise wrong_type(name, value, "a sequence of objects")
        for place, item in enumerate(value):
            checked(f"{name}[{place}]", item, Mapping)
    return Conversation(
        _as_json("messages", [dict(message) for message in messages]),
        _as_json("tools", [dict(tool) for tool in tools]) if tools else "",
        _as_json("variables", dict(checked("variables", variables, Mapping))) if variables else "",
    )


def wrong_type(name: str, value: Any, expected_type: str) -> InvalidArgumentError:
    """Not the value: it could be a prompt."""
    return InvalidArgumentError(
        f"{name} must be {expected_type}, not {type(value).__name__}", field=name, reason="WRONG_TYPE"
    )


def _as_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{name} cannot be written as JSON: {error}", field=name, reason="WRONG_TYPE"
        ) from None


def _is_of(value: Any, kind: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)


def _words(kind: Any) -> str:
    return _WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")
