"""The checker finds each way in which a stream can differ from the undisturbed one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerationEvent,
    Started,
    Token,
)
from tests.support.checker import check, reference_of

PROMPT = (7, 8, 9)
TOKENS = (40, 41, 42, 43)


def stream() -> list[GenerationEvent]:
    tokens = [
        Token(len(PROMPT) + n, token, f"w{token} ", -0.1 * n) for n, token in enumerate(TOKENS)
    ]
    placement = Placement((), 1, 1, 1, 1)
    return [
        Started(RequestId("r"), DeploymentName("tales"), PROMPT, placement),
        *tokens,
        Finished(FinishReason.LENGTH, "end", len(PROMPT), len(TOKENS)),
    ]


REFERENCE = reference_of(stream())


def changed(number: int, **fields: object) -> list[GenerationEvent]:
    events = stream()
    events[number] = replace(events[number], **fields)  # type: ignore[arg-type]
    return events


def test_the_undisturbed_stream_has_no_fault_and_its_text_is_whole() -> None:
    assert check(stream(), REFERENCE).problems == ()
    assert REFERENCE.text == "w40 w41 w42 w43 end" and REFERENCE.tokens == TOKENS


@pytest.mark.parametrize(
    ("events", "what", "wrong"),
    [
        (changed(2, token=99), "token 1 is another", 1),
        ([*stream()[:2], *stream()[3:]], "tokens 1 to 1 were lost", 0),
        ([*stream()[:3], stream()[2], *stream()[3:]], "token 1 was repeated", 1),
        ([*stream()[:2], stream()[3], stream()[2], *stream()[4:]], "token 1 was repeated or came "
                                                                   "late", 1),
        ([*stream()[:-2], stream()[-1]], "3 of 4 tokens came", 0),
        ([*stream()[:-1], Token(7, 44, ""), stream()[-1]], "token 4 is beyond", 1),
        (changed(2, logprob=-0.1000001), "token 1 has log-probability -0.1000001, -0.1 is "
                                         "right", 0),
        (changed(2, logprob=float("nan")), "token 1 has log-probability nan", 0),
        (changed(2, text="w14 "), "the text differs", 0),
        (changed(5, text="en"), "the text is too short", 0),
        (changed(5, text="end."), "the text differs", 0),
        (stream()[:-1], "it ended 0 times", 0),
        ([*stream(), stream()[-1]], "it ended 2 times", 0),
        ([*stream(), stream()[2]], "it ended 1 times, as event [5] of 7", 1),
        (stream()[1:], "it began 0 times", 0),
        ([stream()[0], *stream()], "it began 2 times", 0),
        (changed(0, prompt_tokens=(7, 8)), "the prompt's tokens are others", 0),
        (changed(5, reason=FinishReason.STOP), "it ended by stop", 0),
        (changed(5, new_token_count=3), "its end counts", 0),
    ],
)  # fmt: skip
def test_a_fault_is_found_and_counted(events: list[GenerationEvent], what: str, wrong: int) -> None:
    verdict = check(events, REFERENCE)
    assert any(what in problem for problem in verdict.problems), verdict.problems
    assert verdict.wrong_tokens == wrong


@pytest.mark.parametrize("length", range(6))
def test_a_stream_that_broke_off_is_right_as_far_as_it_came(length: int) -> None:
    assert check(stream()[:length], REFERENCE, whole=False).problems == ()
    assert length == 6 or check(stream()[:length], REFERENCE).problems


def test_a_broken_off_stream_is_wrong_where_it_is() -> None:
    assert check(changed(1, token=99)[:2], REFERENCE, whole=False).wrong_tokens == 1


def test_log_probabilities_may_differ_by_the_slack() -> None:
    assert check(changed(2, logprob=-0.1000001), REFERENCE, slack=1e-5).problems == ()
    assert check(changed(2, logprob=-0.1001), REFERENCE, slack=1e-5).problems


def test_an_unfinished_stream_is_no_reference() -> None:
    with pytest.raises(ValueError, match="ended 0 times"):
        reference_of(stream()[:-1])
