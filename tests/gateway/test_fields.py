"""HTTP's forms have the bounds of an option of generation from its declaration."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from edgeshard.domain.options import option_fields
from edgeshard.domain.requests.generation import Generation, Sampling
from edgeshard.gateway.routes.chat_completions import ChatRequest
from edgeshard.gateway.routes.completions import CompletionRequest
from edgeshard.gateway.routes.ollama import Options
from edgeshard.gateway.routes.responses import ResponsesRequest

LOWER = {"top_k": -1, "seed": -(2**63)}
"""Below the engine's range: no limit, and a seed that is taken modulo 2^64."""
ELSEWHERE: dict[type[BaseModel], set[str]] = {
    ChatRequest: set(),
    CompletionRequest: {"logprobs", "top_logprobs"},
    Options: {"priority", "top_logprobs"},
    ResponsesRequest: {"top_logprobs"},
}
"""Options that a form lacks, or has in another sense under that name."""


@pytest.mark.parametrize("form", ELSEWHERE)
def test_a_form_has_the_bounds_of_each_option(form: type[BaseModel]) -> None:
    schema: dict[str, Any] = form.model_json_schema()["properties"]
    names = {"repetition_penalty": "repeat_penalty"} if form is Options else {}
    checked = 0
    for item in (*option_fields(Sampling), *option_fields(Generation)):
        name = names.get(item.name, item.name)
        if item.option.rule and item.name not in ELSEWHERE[form] | {"max_new_tokens"}:
            (bounds, _) = schema[name]["anyOf"]
            least, above, most = (
                bounds.get(key) for key in ("minimum", "exclusiveMinimum", "maximum")
            )
            expected = LOWER.get(item.name, item.option.low), item.option.above, item.option.high
            assert (least, above, most) == expected, name
            checked += 1
    assert checked >= 8


@pytest.mark.parametrize(
    ("form", "name", "low"),
    [
        (ChatRequest, "max_tokens", 1),
        (ChatRequest, "max_completion_tokens", 1),
        (CompletionRequest, "max_tokens", 0),
        (ResponsesRequest, "max_output_tokens", 1),
        (Options, "num_predict", -(2**31)),
    ],
)
def test_so_has_the_most_new_tokens_under_each_name(
    form: type[BaseModel], name: str, low: int
) -> None:
    bounds = form.model_json_schema()["properties"][name]["anyOf"][0]
    assert (bounds["minimum"], bounds["maximum"]) == (low, 2**31)
