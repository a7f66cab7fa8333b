"""The request for the keyword arguments of `generate` and `complete`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from edgeshard.client.arguments import checked, checked_biases, checked_tokens
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.options import OptionField, option_fields
from edgeshard.domain.requests.generation import Biases, GenerateOptions, Generation, Sampling


def generation_of(prompt: str | Sequence[int], options: GenerateOptions) -> Generation:
    """The request with these options. Raises InvalidArgumentError naming the first field that is wrong."""
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
    """Raise InvalidArgumentError for an unknown option, and for an invalid request_id or timeout_s."""
    # Python does not check the keys of a TypedDict; an option misspelt must not be an option ignored.
    for name in options:
        if name not in GenerateOptions.__annotations__:
            names = ", ".join(GenerateOptions.__annotations__)
            raise InvalidArgumentError(f"{name} is not an option; the options are {names}", field=name)
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
    return {item.name: _value(item, values[item.keyword]) for item in option_fields(owner) if item.keyword in values}


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
        # A lone surrogate, which Python makes of bytes that are not UTF-8, as in arguments and file names.
        raise InvalidArgumentError(
            f"{field} is not text: character {error.start} stands for a byte that is not UTF-8", field=field
        ) from None
