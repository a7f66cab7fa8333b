"""An option of generation is declared once: what repeats its name or follows from it is held to the declaration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, get_type_hints

import pytest

from edgeshard.cli.generate import generate
from edgeshard.client.options import generation_of
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.generation import GenerateOptions, Generation, OptionField, Sampling, option_fields

OF_THE_CALL = {"request_id": str, "timeout_s": float | None}
OPTIONS = [*option_fields(Sampling), *option_fields(Generation)]
# A caller may give any sequence, and one string for the strings.
SEQUENCES: dict[Any, Any] = {tuple[int, ...]: Sequence[int], tuple[str, ...]: str | Sequence[str]}


def test_the_keyword_arguments_are_the_options_with_their_types() -> None:
    declared = {item.keyword: SEQUENCES.get(item.kind, item.kind) for item in OPTIONS}
    assert get_type_hints(GenerateOptions) == declared | OF_THE_CALL


def test_edgectl_takes_every_option_that_has_a_flag() -> None:
    parameters = inspect.signature(generate).parameters
    flags = {item.option.flag or item.keyword: item for item in OPTIONS if item.option.flag is not None}
    assert {name for name, parameter in parameters.items() if name in flags} == set(flags)
    for name, item in flags.items():
        assert parameters[name].default == (None if isinstance(item.default, tuple) else item.default)
        assert item.option.help


def value_of(item: OptionField) -> Any:
    if isinstance(item.default, tuple):
        return ("x",) if item.kind == tuple[str, ...] else (7,)
    return True if item.kind is bool else item.kind(1)


@pytest.mark.parametrize("item", OPTIONS, ids=lambda item: item.name)
def test_a_keyword_argument_reaches_its_field(item: OptionField) -> None:
    generation = generation_of("x", {item.keyword: value_of(item)})  # type: ignore[misc]
    owner = generation if item in option_fields(Generation) else generation.sampling
    assert getattr(owner, item.name) == value_of(item)


@pytest.mark.parametrize("item", [item for item in OPTIONS if item.option.rule], ids=lambda item: item.name)
def test_a_value_out_of_bounds_is_refused_by_name(item: OptionField) -> None:
    option = item.option
    wrong = [] if item.kind is int else [math.nan, math.inf]
    wrong += [option.low - 1] if option.low is not None else []
    wrong += [option.above] if option.above is not None else []
    wrong += [option.high + 1] if option.high is not None else []
    for value in wrong:
        with pytest.raises(InvalidArgumentError) as refused:
            generation_of("x", {item.keyword: value})  # type: ignore[misc]
        assert refused.value.field == item.name and option.rule in refused.value.message
