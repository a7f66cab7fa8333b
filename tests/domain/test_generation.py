"""An option of generation is declared once: what repeats its name or follows from it is held to the
declaration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import pytest

from edgeshard.cli.commands.requests.generate import generate
from edgeshard.cli.commands.requests.generation_options import UNSET
from edgeshard.client.arguments import generation_of
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import Epoch, RequestId
from edgeshard.domain.options import OptionField, option_fields
from edgeshard.domain.requests.generation import (
    GUIDE_LIMIT_BYTES,
    LOGIT_BIAS_LIMIT_TOKENS,
    PROMPT_LIMIT_BYTES,
    PROMPT_LIMIT_TOKENS,
    STOP_LIMIT_BYTES,
    STOP_LIMIT_TOKENS,
    Biases,
    GenerateOptions,
    Generation,
    Guide,
    GuideKind,
    Sampling,
)
from edgeshard.domain.requests.head import HeadEvent, HeadEvents, RequestAccepted, StartRequest
from edgeshard.rpc.channel import is_sendable
from edgeshard.wire.head_stream import head_command_to_wire, head_message_to_wire

OF_THE_CALL = {"request_id": str, "timeout_s": float | None}
OPTIONS = [*option_fields(Sampling), *option_fields(Generation)]
# A caller may give any sequence, and one string for the strings.
SEQUENCES: dict[Any, Any] = {
    tuple[int, ...]: Sequence[int],
    tuple[str, ...]: str | Sequence[str],
    Biases: Mapping[int, float],
}


def test_the_keyword_arguments_are_the_options_with_their_types() -> None:
    declared = {item.keyword: SEQUENCES.get(item.kind, item.kind) for item in OPTIONS}
    assert get_type_hints(GenerateOptions) == declared | OF_THE_CALL


def test_edgectl_takes_every_option_that_has_a_flag() -> None:
    parameters = inspect.signature(generate).parameters
    flags = {
        item.option.flag or item.keyword: item for item in OPTIONS if item.option.flag is not None
    }
    assert {name for name, parameter in parameters.items() if name in flags} == set(flags)
    for name, item in flags.items():
        unset = isinstance(item.default, tuple) or name in UNSET
        assert parameters[name].default == (None if unset else item.default)
        assert item.option.help


def value_of(item: OptionField) -> Any:
    if item.kind == Biases:
        return ((7, -2.0), (9, 1.0))
    if isinstance(item.default, tuple):
        return ("x",) if item.kind == tuple[str, ...] else (7,)
    if item.kind == Guide | None:
        return Guide(GuideKind.REGEX, "x")
    return True if item.kind is bool else item.kind(1)


@pytest.mark.parametrize("item", OPTIONS, ids=lambda item: item.name)
def test_a_keyword_argument_reaches_its_field(item: OptionField) -> None:
    value = value_of(item)
    generation = generation_of("x", {item.keyword: {9: 1, 7: -2} if item.kind == Biases else value})  # type: ignore[misc]
    owner = generation if item in option_fields(Generation) else generation.sampling
    assert getattr(owner, item.name) == value


@pytest.mark.parametrize(
    "wrong",
    [
        {7: 100.5}, {7: math.nan}, {-1: 1.0}, {2**32: 1.0}, {"7": 1.0}, {7: "x"}, {7: True},
        [(7, 1.0)], dict.fromkeys(range(LOGIT_BIAS_LIMIT_TOKENS + 1), 1.0),
    ],
    ids=lambda wrong: str(wrong)[:20],
)  # fmt: skip
def test_biases_that_are_none_are_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        generation_of("x", {"logit_bias": wrong})
    assert refused.value.field == "logit_bias"
    most = {token: 100.0 * (-1) ** token for token in range(LOGIT_BIAS_LIMIT_TOKENS)}
    assert (
        len(generation_of("x", {"logit_bias": most}).sampling.logit_bias) == LOGIT_BIAS_LIMIT_TOKENS
    )


@pytest.mark.parametrize(
    "item", [item for item in OPTIONS if item.option.alias], ids=lambda item: item.name
)
def test_an_alias_is_the_same_option_and_not_a_second_one(item: OptionField) -> None:
    generation = generation_of("x", {item.option.alias: value_of(item)})  # type: ignore[misc]
    assert getattr(generation, item.name) == value_of(item)
    with pytest.raises(InvalidArgumentError, match="given twice") as refused:
        generation_of("x", {item.keyword: value_of(item), item.option.alias: value_of(item)})  # type: ignore[misc]
    assert refused.value.field == item.keyword


def test_a_limit_is_clipped_unless_it_must_not_be() -> None:
    assert generation_of("x", {}).clip_new_tokens
    assert generation_of("x", {"max_new_tokens": 128}).clip_new_tokens
    assert not generation_of("x", {"max_new_tokens": 128, "clip_new_tokens": False}).clip_new_tokens


@pytest.mark.parametrize(
    "item", [item for item in OPTIONS if item.option.rule], ids=lambda item: item.name
)
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


TOO_LARGE: dict[str, tuple[str, Generation, Generation]] = {
    "a text of one byte each": (
        "prompt",
        Generation("x" * PROMPT_LIMIT_BYTES),
        Generation("x" * (PROMPT_LIMIT_BYTES + 1)),
    ),
    "a text of three bytes each": (
        "prompt",
        Generation("\N{EURO SIGN}" * (PROMPT_LIMIT_BYTES // 3)),
        Generation("\N{EURO SIGN}" * (PROMPT_LIMIT_BYTES // 3 + 1)),
    ),
    "tokens": (
        "prompt",
        Generation((1,) * PROMPT_LIMIT_TOKENS),
        Generation((1,) * (PROMPT_LIMIT_TOKENS + 1)),
    ),
    "a stop string": (
        "stop",
        Generation("x", stop_strings=("x" * STOP_LIMIT_BYTES,)),
        Generation("x", stop_strings=("y", "\N{EURO SIGN}" * (STOP_LIMIT_BYTES // 3 + 1))),
    ),
    "stop tokens": (
        "stop_tokens",
        Generation("x", stop_tokens=(1,) * STOP_LIMIT_TOKENS),
        Generation("x", stop_tokens=(1,) * (STOP_LIMIT_TOKENS + 1)),
    ),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_a_message_should_not_hold_is_refused_by_name(what: str) -> None:
    field, largest, too_large = TOO_LARGE[what]
    largest.validate()
    with pytest.raises(InvalidArgumentError) as refused:
        too_large.validate()
    assert refused.value.field == field


def test_the_largest_requests_and_their_prompts_tokens_fit_a_message() -> None:
    """With ids of 5 bytes each, in both directions."""
    stops = {
        "stop_strings": ("x" * STOP_LIMIT_BYTES,) * 16,
        "stop_tokens": (2**32 - 1,) * STOP_LIMIT_TOKENS,
    }
    tokens = (2**32 - 1,) * PROMPT_LIMIT_TOKENS
    for prompt in ("x" * PROMPT_LIMIT_BYTES, tokens):
        generation = Generation(prompt, **stops)  # type: ignore[arg-type]
        generation.validate()
        assert is_sendable(head_command_to_wire(StartRequest(RequestId("r" * 128), generation)))
    accepted = HeadEvent(RequestId("r" * 128), RequestAccepted(tokens))
    assert is_sendable(head_message_to_wire(HeadEvents(Epoch(2**63), (accepted,))))


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        (Generation("x", guide=Guide(GuideKind.JSON_OBJECT, "{}")), "guide"),
        (Generation("x", guide=Guide(GuideKind.GRAMMAR, " ")), "guide"),
        (
            Generation(
                "x", guide=Guide(GuideKind.REGEX, "\N{EURO SIGN}" * (GUIDE_LIMIT_BYTES // 3 + 1))
            ),
            "guide",
        ),
        (Generation("x", ignore_eos=True, guide=Guide(GuideKind.JSON_OBJECT)), "ignore_eos"),
        (Generation("x", max_new_tokens=0), "max_new_tokens"),
    ],
)
def test_what_contradicts_a_guide_or_has_no_tokens_is_refused_by_name(
    generation: Generation, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        generation.validate()
    assert refused.value.field == field


def test_the_largest_guide_fits_a_message_and_no_tokens_go_with_prompt_logprobs() -> None:
    generation = Generation(
        "x", 0, prompt_logprobs=True, guide=Guide(GuideKind.REGEX, "x" * GUIDE_LIMIT_BYTES)
    )
    generation.validate()
    assert is_sendable(head_command_to_wire(StartRequest(RequestId("r"), generation)))
