"""The typical request: as given, else as observed, else the default, and never beyond the
deployment's limits."""

from __future__ import annotations

from typing import Any

import pytest
from edgeshard_coordinator.core.placement.problem import typical_request
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import LengthsFrom
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Traffic
from edgeshard.domain.errors import InvalidArgumentError

SEEN = NO_TRAFFIC.after(800, 40).after(800, 40)


def spec_of(**changes: Any) -> DeploymentSpec:
    return parse_spec({"name": "tale", "model": "tiny", "source": "a", **changes})


@pytest.mark.parametrize(
    ("changes", "traffic", "context", "expected"),
    [
        ({"prompt_tokens": 300, "new_tokens": 7}, SEEN, 2048, (300, 7, "given")),
        ({}, SEEN, 2048, (800, 40, "seen")),
        ({"prompt_tokens": 300}, SEEN, 2048, (300, 40, "seen")),
        ({"new_tokens": 300}, NO_TRAFFIC, 2048, (128, 300, "default")),
        ({}, NO_TRAFFIC, 2048, (128, 128, "default")),
        ({}, NO_TRAFFIC, 64, (32, 32, "default")),
        ({"max_new_tokens": 5}, NO_TRAFFIC, 2048, (128, 5, "default")),
        ({"prompt_tokens": 2040}, NO_TRAFFIC, 2048, (2040, 8, "default")),
        ({"new_tokens": 60}, NO_TRAFFIC, 64, (4, 60, "default")),
    ],
    ids=str,
)
def test_where_the_lengths_come_from(
    changes: dict[str, int], traffic: Traffic, context: int, expected: tuple[int, int, str]
) -> None:
    found = typical_request(spec_of(**changes), context, traffic)
    assert (found.prompt_tokens, found.new_tokens, found.source) == (
        *expected[:2],
        LengthsFrom(expected[2]),
    )


@given(
    st.integers(2, 4096),
    st.integers(1, 2048),
    st.lists(st.tuples(st.integers(1, 2048), st.integers(1, 2048))),
)
def test_a_typical_request_is_one_that_may_be(
    context: int, most_new: int, served: list[tuple[int, int]]
) -> None:
    traffic = NO_TRAFFIC
    for prompt, new in served:
        traffic = traffic.after(prompt, new)
    found = typical_request(spec_of(max_new_tokens=most_new), context, traffic)
    assert found.prompt_tokens >= 1 <= found.new_tokens <= most_new
    assert found.prompt_tokens + found.new_tokens <= context


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_tokens": 64}, "prompt_tokens"),
        ({"new_tokens": 64}, "new_tokens"),
        ({"prompt_tokens": 60, "new_tokens": 5}, "prompt_tokens"),
    ],
    ids=str,
)
def test_a_length_beyond_the_context_is_refused_by_name(
    changes: dict[str, int], field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match="exceed the context of 64 tokens") as refused:
        typical_request(spec_of(**changes), 64, NO_TRAFFIC)
    assert refused.value.field == field
    with pytest.raises(InvalidArgumentError) as sooner:
        spec_of(max_context=64, **changes)
    assert sooner.value.field == field


def test_more_new_tokens_than_allowed_are_not_typical() -> None:
    with pytest.raises(InvalidArgumentError, match="beyond max_new_tokens 8") as refused:
        spec_of(new_tokens=9, max_new_tokens=8)
    assert refused.value.field == "new_tokens"
