"""The options of generation as options of a command, by reflection on their one definition."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter
from typing import Annotated, Any

from edgeshard.cli.commands.options import OptionGroup, declared, named_only
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.options import OptionField, option_fields
from edgeshard.domain.requests.generation import Biases, Generation, Sampling

UNSET = {"max_new_tokens": " By default 128, or for a chat all that the context has left."}
"""Options for which it matters whether they were given at all, and the text that their help adds."""


def _options() -> dict[str, OptionField]:
    """The fields that have a flag, by their names as parameters: the first ones of `Generation`, then sampling."""
    first, *others = (item for item in option_fields(Generation) if item.flags)
    return {item.option.flag or item.keyword: item for item in (first, *option_fields(Sampling), *others)}


OPTIONS = _options()


def generation_option(name: str, help: str = "", **more: Any) -> Any:
    """One of them for a command's own parameter, in `Annotated`."""
    return declared(OPTIONS[name], help, **more)


def _value_of(given: dict[str, Any]) -> dict[str, Any]:
    """The values by the SDK's keywords, without those that can be repeated and were not given."""
    return {
        OPTIONS[name].keyword: _biases(value) if OPTIONS[name].kind == Biases else value
        for name, value in given.items()
        if value is not None
    }


def _biases(texts: Sequence[str]) -> dict[int, float]:
    """Raises InvalidArgumentError if a text has not the form ID=BIAS."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise InvalidArgumentError(
                f"logit_bias: {text!r} is not of the form ID=BIAS, such as 42=-100", field="logit_bias"
            ) from None
    return biases


def _parameter(name: str, item: OptionField) -> Parameter:
    kind, default = item.kind, item.default
    if item.keyword in UNSET:
        kind, default = kind | None, None
    if isinstance(default, tuple):
        kind, default = list[str] | None, None
    about = declared(item, item.option.help + UNSET.get(item.keyword, ""), min=item.option.low)
    return named_only(name, Annotated[kind, about], default)


GENERATION = OptionGroup([_parameter(name, item) for name, item in OPTIONS.items()], _value_of)
"""All of them; a command gets their values by the SDK's keywords."""
