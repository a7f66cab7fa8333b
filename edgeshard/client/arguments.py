"""The request for the keyword arguments of `generate` and `complete`, checked by their types.

Python does not check arguments, and the errors of the libraries below would be no help.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.options import OptionField, option_fields
from edgeshard.domain.requests.conversation import Conversation
from edgeshard.domain.requests.generation import Biases, GenerateOptions, Generation, Sampling

_LARGEST_TOKEN = 2**32 - 1
_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "None",
}

Message = Mapping[str, Any]
"""As OpenAI's chat completions have it, such as `{"role": "user", "content": "Hello"}`."""
Tool = Mapping[str, Any]
"""As in OpenAI's API: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""


def checked(name: str, value: Any, kind: Any) -> Any:
    """The value if it is of this kind, with a whole number for a float taken as one and lists as
    tuples.

    Raises InvalidArgumentError naming the argument.
    """
    if get_origin(kind) in (Union, UnionType):
        if not any(_is_of(value, choice) for choice in get_args(kind)):
            raise wrong_type(name, value, " or ".join(map(_words, get_args(kind))))
        return value
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if (
            isinstance(value, str | bytes)
            or not isinstance(value, Sequence)
            or not all(_is_of(i, item) for i in value)
        ):
            raise wrong_type(name, value, f"a sequence, each item {_words(item)}")
        return tuple(value)
    if not _is_of(value, kind):
        raise wrong_type(name, value, _words(kind))
    return float(value) if kind is float else value


def checked_tokens(name: str, value: Any) -> tuple[int, ...]:
    """Token ids. Raises InvalidArgumentError naming the argument."""
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Sequence)
        or not all(_is_of(i, int) for i in value)
    ):
        raise wrong_type(name, value, "a sequence of token ids")
    if any(not 0 <= token <= _LARGEST_TOKEN for token in value):
        raise InvalidArgumentError(
            f"{name} holds a token id that is not from 0 to {_LARGEST_TOKEN}", field=name
        )
    return tuple(value)


def checked_biases(name: str, value: Any) -> Biases:
    """Token ids with their biases. Raises InvalidArgumentError naming the argument."""
    if not isinstance(value, Mapping) or not all(_is_of(bias, float) for bias in value.values()):
        raise wrong_type(name, value, "a mapping of token ids to numbers")
    return tuple(
        (token, float(value[token])) for token in sorted(checked_tokens(name, list(value)))
    )


def conversation_of(
    messages: str | Sequence[Message],
    tools: Sequence[Tool] | None,
    variables: Mapping[str, Any] | None,
) -> Conversation:
    """The conversation in the arguments of `chat`; a text is one message of the user's. The
    coordinator checks more.

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
        f"{name} must be {expected_type}, not {type(value).__name__}",
        field=name,
        reason="WRONG_TYPE",
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


def generation_of(prompt: str | Sequence[int], options: GenerateOptions) -> Generation:
    """The request with these options. Raises InvalidArgumentError naming the first field that is
    wrong."""
    options = _by_keyword(options)
    check_options(options)
    sampling = _given(Sampling, options)
    # Asking for the best tokens implies asking for the chosen one.
    if sampling.get("top_logprobs", 0) > 0:
        sampling["logprobs"] = True
    generation = Generation(
        prompt=prompt if isinstance(prompt, str) else checked_tokens("prompt", prompt),
        sampling=Sampling(**sampling),
        **_given(Generation, options),
    )
    generation.validate()
    for field, texts in (("prompt", (generation.prompt,)), ("stop", generation.stop_strings)):
        for text in texts:
            if isinstance(text, str):
                _check_text(text, field)
    return generation


def check_options(options: GenerateOptions) -> None:
    """Raise InvalidArgumentError for an unknown option, and for an invalid request_id or
    timeout_s."""
    # Python does not check the keys of a TypedDict; an option misspelt must not be an option
    # ignored.
    for name in options:
        if name not in GenerateOptions.__annotations__:
            names = ", ".join(GenerateOptions.__annotations__)
            raise InvalidArgumentError(
                f"{name} is not an option; the options are {names}", field=name
            )
    checked("request_id", options.get("request_id", ""), str)
    checked("timeout_s", options.get("timeout_s"), float | None)


_KEYWORDS = {
    item.option.alias: item.keyword
    for item in (*option_fields(Generation), *option_fields(Sampling))
    if item.option.alias
}


def _by_keyword(options: GenerateOptions) -> GenerateOptions:
    """The options with their own names in place of aliases."""
    named: dict[str, Any] = {}
    for name, value in options.items():
        keyword = _KEYWORDS.get(name, name)
        if keyword in named:
            raise InvalidArgumentError(f"{name} is given twice: also as {keyword}", field=keyword)
        named[keyword] = value
    return cast("GenerateOptions", named)


def _given(owner: type[Sampling] | type[Generation], options: GenerateOptions) -> dict[str, Any]:
    """The options that are given, by their fields' names."""
    values: dict[str, Any] = dict(options)
    return {
        item.name: _value(item, values[item.keyword])
        for item in option_fields(owner)
        if item.keyword in values
    }


def _value(item: OptionField, value: Any) -> Any:
    if isinstance(item.default, tuple) and isinstance(value, str):
        value = (value,)
    if item.kind == Biases:
        return checked_biases(item.keyword, value)
    if item.kind == tuple[int, ...]:
        return checked_tokens(item.keyword, value)
    return checked(item.keyword, value, item.kind)


def _check_text(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # A lone surrogate, which Python makes of bytes that are not UTF-8, as in arguments and file
        # names.
        raise InvalidArgumentError(
            f"{field} is not text: character {error.start} stands for a byte that is not UTF-8",
            field=field,
        ) from None
