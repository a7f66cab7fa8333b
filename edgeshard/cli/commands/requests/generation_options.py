"""The options of generation as options of a command, by reflection on their one definition."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Annotated, Any

import typer

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import Biases, Generation, OptionField, Sampling, option_fields

UNSET = {"max_new_tokens": " Where not given, 128 or what there is room for."}
"""Options of which it matters whether they were given at all, and what their help says of that."""


def generation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` an option for each of `Generation` and `Sampling` that has a flag, in place of its `**options`.

    It gets them by the SDK's keywords; those that can be repeated and were not given are left out.
    """
    generation = [item for item in option_fields(Generation) if item.option.flag is not None]
    items = {_parameter_name(item): item for item in (*generation[:1], *option_fields(Sampling), *generation[1:])}

    @functools.wraps(command)
    def run(*arguments: Any, **named: Any) -> None:
        values = {name: named.pop(name) for name in items if name in named}
        options = {
            items[name].keyword: _biases(value) if items[name].kind == Biases else value
            for name, value in values.items()
            if value is not None
        }
        command(*arguments, **named, **options)

    own = inspect.signature(command, eval_str=True).parameters.values()
    positional = [parameter for parameter in own if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD]
    named_only = [parameter for parameter in own if parameter.kind is Parameter.KEYWORD_ONLY]
    options = [_parameter(name, item) for name, item in items.items()]
    run.__signature__ = inspect.Signature([*positional, *options, *named_only])  # type: ignore[attr-defined]
    return run


def _biases(texts: Sequence[str]) -> dict[int, float]:
    """Raises InvalidArgumentError for what is not of the form ID=BIAS."""
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


def _parameter_name(item: OptionField) -> str:
    return item.option.flag or item.keyword


def _parameter(name: str, item: OptionField) -> Parameter:
    option, kind, default = item.option, item.kind, item.default
    flags = ["--" + text.replace("_", "-") for text in (name, option.alias) if text]
    if item.keyword in UNSET:
        kind, default = kind | None, None
    if isinstance(default, tuple):
        kind, default = list[str] | None, None
    text = option.help + UNSET.get(item.keyword, "")
    about = typer.Option(*flags, min=option.low, metavar=option.metavar or None, help=text)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])
