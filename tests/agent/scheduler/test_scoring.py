"""A prompt's log-probabilities: each position is requested once, in whatever chunks the prompt
runs, and returned once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.scheduler import Limits
from edgeshard_agent.scheduler.text import TextStream

from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import (
    FinishReason,
    Generation,
    Guide,
    GuideKind,
    PromptLogprobs,
    Sampling,
    Token,
    TokenLogprob,
)
from edgeshard.domain.requests.head import RequestAdmitted, RequestEnd
from edgeshard.domain.requests.step import GuideFailure, Span, SpanLogprobs, StepResult, Targets
from tests.support.rig import Rig, expected

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]


def scores(rig: Rig, name: str) -> dict[int, float]:
    """By position; no position may occur twice."""
    found: dict[int, float] = {}
    for event in rig.events:
        if isinstance(event.event, PromptLogprobs) and event.request_id == name:
            part = event.event
            new = dict(zip(range(part.position, part.end), part.logprobs, strict=True))
            assert not found.keys() & new.keys()
            found |= new
    return found


def all_scores(prompt: list[int]) -> dict[int, float]:
    return {position: -float(token) for position, token in enumerate(prompt) if position}


def spans_of(rig: Rig) -> list[Span]:
    return [span for step in rig.steps for span in step.plan.spans]


@pytest.mark.parametrize("step_tokens", [2, 5, 64])
@pytest.mark.parametrize("new", [0, 1, 4])
def test_every_position_but_the_first_is_scored_once_and_before_the_first_token(
    step_tokens: int, new: int
) -> None:
    rig = Rig(chunking=Chunking(step_tokens, least_tokens=2))
    rig.submit("r", PROMPT, new, prompt_logprobs=True)
    rig.submit("other", PROMPT[:3], 3)
    rig.run_all()
    assert scores(rig, "r") == all_scores(PROMPT) and not scores(rig, "other")
    assert rig.tokens("r") == expected(PROMPT, new) and rig.tokens("other") == expected(
        PROMPT[:3], 3
    )
    mine = [event for event in rig.events if event.request_id == "r"]
    kinds = [type(event.event) for event in mine if not isinstance(event.event, RequestAdmitted)]
    assert kinds == sorted(kinds, key=[PromptLogprobs, Token, RequestEnd].index)
    assert isinstance(mine[-1].event, RequestEnd) and mine[-1].event.reason is FinishReason.LENGTH
    rig.check_empty()


def test_the_stages_are_told_of_tokens_only_where_scores_are_wanted() -> None:
    rig = Rig()
    rig.submit("r", PROMPT, 2)
    rig.run_all()
    assert spans_of(rig) and all(span.targets is None for span in spans_of(rig))


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    rig = Rig()
    text = TextStream(lambda ids: "", [5])
    end = rig.scheduler.submit(RequestId("r"), Generation((5,), 0, prompt_logprobs=True), [5], text)
    assert end == RequestEnd(FinishReason.LENGTH, "") and rig.scheduler.idle


def test_a_shared_beginning_is_computed_again_for_its_scores() -> None:
    rig = Rig(limits=Limits(48, 100, prefix_cache=True))
    rig.submit("first", PROMPT, 2)
    rig.run_all()
    rig.submit("second", PROMPT, 2, prompt_logprobs=True)
    rig.run_all()
    assert scores(rig, "second") == all_scores(PROMPT) and rig.tokens("second") == expected(
        PROMPT, 2
    )
    rig.submit("third", PROMPT, 2)
    rig.run_all()
    assert rig.scheduler.stats.prefix_hit_tokens == 8


def test_a_request_that_begins_again_scores_what_has_not_come() -> None:
    rig = Rig(chunking=Chunking(4, least_tokens=2))
    text = TextStream(lambda ids: "", PROMPT)
    generation = Generation(tuple(PROMPT), 2, prompt_logprobs=True)
    assert rig.scheduler.submit(RequestId("r"), generation, PROMPT, text, scored=6) is None
    rig.run_all()
    assert scores(rig, "r") == {
        position: value for position, value in all_scores(PROMPT).items() if position >= 6
    }
    assert rig.tokens("r") == expected(PROMPT, 2)


def test_preemption_loses_no_score_and_brings_none_twice() -> None:
    rig = Rig(
        blocks=7, limits=Limits(24, 100, overcommit=True), chunking=Chunking(4, least_tokens=2)
    )
    for number in range(3):
        rig.submit(f"r{number}", PROMPT[: 8 + number], 8, prompt_logprobs=True)
    rig.run_all()
    assert rig.scheduler.stats.preemptions
    for number in range(3):
        prompt = PROMPT[: 8 + number]
        assert scores(rig, f"r{number}") == all_scores(prompt) and rig.tokens(
            f"r{number}"
        ) == expected(prompt, 8)


def changed(part: SpanLogprobs, **changes: Any) -> SpanLogprobs:
    return replace(part, prompt_logprobs=replace(part.prompt_logprobs, **changes))


def not_numbers(part: SpanLogprobs) -> tuple[float, ...]:
    return (math.nan,) * len(part.prompt_logprobs.logprobs)


def all_top(part: SpanLogprobs, token: int, logprob: float) -> tuple[tuple[TokenLogprob, ...], ...]:
    return ((TokenLogprob(token, logprob),),) * len(part.prompt_logprobs.logprobs)


WRONG: dict[str, Any] = {
    "none": lambda came: (),
    "one missing": lambda came: came[:-1],
    "one twice": lambda came: (*came, came[-1]),
    "another order": lambda came: came[::-1],
    "another request's": lambda came: (replace(came[0], request=9), *came[1:]),
    "too many": lambda came: (
        *came,
        SpanLogprobs(came[0].request, PromptLogprobs(11, (0.0,), ((),))),
    ),
    "not a number": lambda came: (changed(came[0], logprobs=not_numbers(came[0])), *came[1:]),
    "top outside the vocabulary": lambda came: (
        changed(came[0], top=all_top(came[0], 97, -1.0)),
        *came[1:],
    ),
    "top not a number": lambda came: (
        changed(came[0], top=all_top(came[0], 1, math.nan)),
        *came[1:],
    ),
    "top of another length": lambda came: (changed(came[0], top=()), *came[1:]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_result_with_other_scores_than_were_due_is_refused(what: str) -> None:
    rig = Rig(chunking=Chunking(64), limits=Limits(48, 100, 97))
    rig.submit("r", PROMPT, 2, prompt_logprobs=True, sampling=Sampling(top_logprobs=1))
    step = rig.formed_step()
    result = rig.stages[0].run(step)
    assert len(result.prompt_logprobs) > 2
    with pytest.raises(InternalError) as caught:
        wrong = replace(result, prompt_logprobs=WRONG[what](result.prompt_logprobs))
        rig.scheduler.on_result(step.number, wrong, 0.0)
    assert caught.value.reason == "WRONG_RESULT"


def test_scores_of_a_request_that_ended_meanwhile_may_be_missing() -> None:
    rig = Rig(chunking=Chunking(64))
    rig.submit("r", PROMPT, 2, prompt_logprobs=True)
    step = rig.formed_step()
    rig.stages[0].run(step)
    rig.cancel("r")
    assert rig.scheduler.on_result(step.number, StepResult(), 0.0) == []


def test_targets_stand_behind_the_positions_of_their_span() -> None:
    rig = Rig(chunking=Chunking(4, least_tokens=2))
    rig.submit("r", PROMPT, 1, prompt_logprobs=True)
    rig.run_all()
    assert [span.targets for span in spans_of(rig)] == [
        Targets(1, (12, 13, 14, 15)), Targets(5, (16, 17, 18, 19)), Targets(9, (20, 21))
    ]  # fmt: skip


GUIDE = Guide(GuideKind.REGEX, "a+")


def test_the_last_stage_learns_of_a_guide_once_with_the_answer_so_far() -> None:
    rig = Rig()
    text = TextStream(lambda ids: "", [1, 2])
    generation = Generation((1, 2), 4, guide=GUIDE)
    rig.scheduler.submit(
        RequestId("r"), generation, [1, 2], text, tuple(expected([1, 2], 2)), resumed=True
    )
    rig.submit("plain", [1, 2], 2)
    rig.run_all()
    guided = [span for span in spans_of(rig) if span.guide is not None]
    assert [(span.guide, span.answer_tokens) for span in guided] == [
        (GUIDE, tuple(expected([1, 2], 2)))
    ]
    assert rig.tokens("r") == expected([1, 2], 4)[2:]


def test_a_guide_that_fails_ends_its_request_alone() -> None:
    rig = Rig()
    rig.submit("bad", [1, 2], 4, guide=GUIDE)
    rig.submit("good", [3], 4)
    step = rig.formed_step()
    result = rig.stages[0].run(step)
    number = step.plan.spans[0].request
    tokens = tuple(token for token in result.tokens if token.request != number)
    failed = StepResult(tokens, guide_failures=(GuideFailure(number, "no text satisfies it"),))
    rig.events += rig.scheduler.events(rig.scheduler.on_result(step.number, failed, 0.0))
    (event,) = [event for event in rig.events if event.request_id == "bad"]
    assert isinstance(event.event, InvalidArgumentError)
    assert event.event.field == "guide" and "no text satisfies it" in event.event.message
    rig.run_all()
    assert rig.tokens("good") == expected([3], 4)
    rig.check_empty()


def test_a_failure_beside_a_token_or_of_nobody_is_refused() -> None:
    for request in (0, 77):
        rig = Rig()
        rig.submit("r", [1, 2], 4, guide=GUIDE)
        step = rig.formed_step()
        result = rig.stages[0].run(step)
        with pytest.raises(InternalError):
            wrong = replace(result, guide_failures=(GuideFailure(request, "x"),))
            rig.scheduler.on_result(step.number, wrong, 0.0)
