"""A body whose answers would take minutes to prepare is refused at once: bounds stand in the types
of its fields."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from edgeshard.gateway.routes.body_fields import MOST_ANSWERS, RequestModel
from edgeshard.gateway.routes.chat_completions import ChatRequest
from edgeshard.gateway.routes.completions import CompletionRequest

MOST_PROCESSOR_S = 0.1
TURNS = 3
"""The fastest counts: what else runs makes a turn slower."""
BIASES = {str(token): 1 for token in range(20_000)}
TALK = {"model": "tales", "messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[str, tuple[type[RequestModel], dict[str, Any]]] = {
    "prompts, answers and biases": (
        CompletionRequest,
        {"model": "tales", "prompt": ["x"] * 256, "n": 16, "logit_bias": BIASES},
    ),
    "prompts and answers": (CompletionRequest, {"model": "tales", "prompt": ["x"] * 256, "n": 16}),
    "stop strings": (CompletionRequest, {"model": "tales", "prompt": "x", "stop": ["x"] * 100_000}),
    "biases of a chat": (ChatRequest, {**TALK, "n": 16, "logit_bias": BIASES}),
    "stop strings of a chat": (ChatRequest, {**TALK, "stop": ["x"] * 100_000}),
}


@pytest.mark.parametrize(("kind", "body"), BODIES.values(), ids=list(BODIES))
def test_a_costly_body_is_refused_at_once(kind: type[RequestModel], body: dict[str, Any]) -> None:
    taken = []
    for _ in range(TURNS):
        began = time.process_time()
        with pytest.raises(ValidationError):
            kind.model_validate(body)
        taken.append(time.process_time() - began)
    assert min(taken) < MOST_PROCESSOR_S


def test_the_largest_body_that_is_accepted_is_prepared_at_once() -> None:
    biases = {str(token): 1 for token in range(300)}
    options = {"logit_bias": biases, "stop": ["x" * 1024] * 16, "stop_token_ids": list(range(1024))}
    taken = []
    for _ in range(TURNS):
        began = time.process_time()
        asked = CompletionRequest.model_validate(
            {"model": "tales", "prompt": ["x"] * 16, "n": 16, **options}
        )
        generations = asked.generations()
        for generation in generations:
            generation.validate()
        taken.append(time.process_time() - began)
        assert len(generations) == MOST_ANSWERS
        assert len({generation.sampling.seed for generation in generations}) == 16
        assert all(
            generation.sampling.logit_bias is generations[0].sampling.logit_bias
            for generation in generations
        )
    assert min(taken) < MOST_PROCESSOR_S, taken
