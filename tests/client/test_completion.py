"""The arithmetic of a completion: times come in as values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgeshard.client.completion import Completion, CompletionBuilder
from edgeshard.domain.errors import InternalError
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerationEvent,
    StageTiming,
    Started,
    Token,
)


def build(site: Any, times_s: list[float], **options: Any) -> Completion:
    return build_of(site.story(), times_s, **options)


def build_of(events: list[Any], times_s: list[float], **options: Any) -> Completion:
    started = events[0]
    tokens = events[1:-1]
    finished = events[-1]
    builder = CompletionBuilder(100.0, **options)
    builder.add(started, 100.1)
    for token, now_s in zip(tokens, times_s, strict=False):
        builder.add(token, now_s)
    builder.add(finished, 109.0)
    return builder.build()


def test_times_are_measured_from_the_call(site: Any) -> None:
    completion = build(site, [101.0, 101.1, 101.3, 101.6, 102.0])
    assert completion.ttft_s == pytest.approx(1.0)
    assert completion.inter_token_latency_s == pytest.approx(0.25)
    assert completion.tokens_per_s == pytest.approx(4.0)
    assert completion.total_s == pytest.approx(9.0)


def test_the_rate_is_the_heads_where_tokens_come_in_a_lump(site: Any) -> None:
    events = site.story()
    for index, token in enumerate(events[1:-1]):
        events[1 + index] = replace(token, at_s=5000.0 + 0.5 * index)
    assert build_of(events, [103.0] * 5).tokens_per_s == pytest.approx(2.0)


def test_another_heads_clock_is_not_compared(site: Any) -> None:
    """The third token comes from another node, whose clock began long before or long after; the
    arrivals tell."""
    for origin_s in (9e6, 3.0):
        events = site.story()
        for index, at_s in enumerate((500.0, 500.5, origin_s, origin_s + 0.5, origin_s + 1.0)):
            events[1 + index] = replace(events[1 + index], at_s=at_s)
        completion = build_of(events, [101.0, 101.5, 103.0, 103.5, 104.0])
        assert completion.inter_token_latency_s == pytest.approx(3.0 / 4)


def test_a_single_token_has_no_latency_between_tokens(site: Any) -> None:
    completion = build(site, [101.0])
    assert (completion.inter_token_latency_s, completion.tokens_per_s) == (0.0, 0.0)
    assert completion.stage_compute_ms == pytest.approx((40.0, 4.0)), (
        "with one token there is only the prefill"
    )


def test_stage_compute_leaves_the_prefill_out(site: Any) -> None:
    assert build(site, [101.0, 102.0, 103.0, 104.0, 105.0]).stage_compute_ms == pytest.approx(
        (2.0, 4.0)
    )


def test_text_is_the_tokens_text_and_what_was_held_back(site: Any) -> None:
    completion = build(site, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert completion.text == "Once upon a time é!"
    assert completion.token_ids == (10, 11, 12, 13, 14)
    assert completion.prompt_token_ids == (5, 6, 7)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.logprobs == () and completion.top_logprobs == ()


def test_logprobs_are_kept_when_asked_for(site: Any) -> None:
    completion = build(site, [1.0, 2.0, 3.0, 4.0, 5.0], logprobs=True)
    assert completion.logprobs == (-0.5,) * 5
    assert [top[1].token for top in completion.top_logprobs] == [99] * 5


def test_a_stage_that_is_not_in_the_placement_is_ignored(site: Any) -> None:
    started = site.story()[0]
    builder = CompletionBuilder(0.0)
    builder.add(started, 0.0)
    builder.add(Token(3, 1, "x", timings=(StageTiming(7, 0.0, 1.0),)), 1.0)
    builder.add(Finished(FinishReason.STOP, "", 3, 1), 1.0)
    assert builder.build().stage_compute_ms == (0.0, 0.0)


@pytest.mark.parametrize("kept", [Started, Finished])
def test_a_stream_without_its_first_or_last_event_is_an_error(
    site: Any, kept: type[GenerationEvent]
) -> None:
    builder = CompletionBuilder(0.0)
    events: list[GenerationEvent] = [event for event in site.story() if isinstance(event, kept)]
    builder.add(events[0], 0.0)
    with pytest.raises(InternalError, match="before the request was finished"):
        builder.build()
