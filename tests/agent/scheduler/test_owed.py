"""A result brings the tokens that its step was formed for: one that is missing would be waited for
for ever."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_agent.scheduler import forming
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.scheduler import GIVES_WAY_S, HeadStep, Limits
from edgeshard_agent.scheduler.swapping import Swapping

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import InternalError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import Sampling, TokenLogprob
from edgeshard.domain.requests.head import HeadEvent, RequestAdmitted
from edgeshard.domain.requests.step import SampledToken, StepResult
from tests.support.rig import Rig, expected

VOCABULARY = 97
"""The pretended model's."""


def begun(rig: Rig) -> tuple[HeadStep, StepResult]:
    """A step of two requests whose tokens are due, and its result."""
    rig.submit("one", [1, 2], 4)
    rig.submit("other", [3], 4)
    step = rig.formed_step()
    return step, rig.stages[0].run(step)


WRONG: dict[str, Any] = {
    "one missing": lambda tokens: tokens[:1],
    "all missing": lambda tokens: (),
    "one twice": lambda tokens: (*tokens, tokens[0]),
    "one twice and one missing": lambda tokens: (tokens[0], tokens[0]),
    "one of nobody": lambda tokens: (*tokens, SampledToken(77, 3, 5)),
    "another position": lambda tokens: (replace(tokens[0], position=1), *tokens[1:]),
    "another request's": lambda tokens: (replace(tokens[0], request=77), *tokens[1:]),
    "outside the vocabulary": lambda tokens: (replace(tokens[0], token=VOCABULARY), *tokens[1:]),
    "not a number": lambda tokens: (replace(tokens[0], logprob=math.nan), *tokens[1:]),
    "infinite": lambda tokens: (replace(tokens[0], logprob=-math.inf), *tokens[1:]),
    "likeliest ones": lambda tokens: (
        replace(tokens[0], top=(TokenLogprob(1, -0.5),)),
        *tokens[1:],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_result_with_other_tokens_than_were_due_is_refused_by_its_step(what: str) -> None:
    rig = Rig(limits=Limits(48, 100, VOCABULARY))
    step, result = begun(rig)
    with pytest.raises(InternalError, match=f"step {step.number} ") as caught:
        rig.scheduler.on_result(step.number, StepResult(WRONG[what](result.tokens)), 0.0)
    assert caught.value.reason == "WRONG_RESULT"


WRONG_TOP = (TokenLogprob(VOCABULARY, -0.5),), (TokenLogprob(1, math.nan),)


@pytest.mark.parametrize("top", WRONG_TOP)
def test_the_likeliest_tokens_are_of_the_vocabulary_and_finite(
    top: tuple[TokenLogprob, ...],
) -> None:
    rig = Rig(limits=Limits(48, 100, VOCABULARY))
    rig.submit("one", [1, 2], 4, sampling=Sampling(top_logprobs=1))
    step = rig.formed_step()
    (token,) = rig.stages[0].run(step).tokens
    with pytest.raises(InternalError, match=f"step {step.number} "):
        rig.scheduler.on_result(step.number, StepResult((replace(token, top=top),)), 0.0)


def test_forced_tokens_are_of_the_vocabulary() -> None:
    """The next step runs them as draft tokens."""
    rig = Rig(limits=Limits(48, 100, VOCABULARY))
    step, result = begun(rig)
    forced = {result.tokens[0].request: (VOCABULARY,)}
    with pytest.raises(InternalError, match="outside the vocabulary"):
        rig.scheduler.on_result(step.number, StepResult(result.tokens, forced=forced), 0.0)


@pytest.mark.parametrize("what", ["of nobody", "beside its token", "twice"])
def test_what_is_pending_must_be_due(what: str) -> None:
    rig = Rig()
    step, result = begun(rig)
    one = result.tokens[0].request
    wrong = {
        "of nobody": StepResult(result.tokens, pending=(77,)),
        "beside its token": StepResult(result.tokens, pending=(one,)),
        "twice": StepResult(result.tokens[1:], pending=(one, one)),
    }
    with pytest.raises(InternalError, match="was not requested"):
        rig.scheduler.on_result(step.number, wrong[what], 0.0)


@pytest.mark.parametrize("ends", [False, True])
def test_a_pending_token_comes_with_a_later_step_at_its_own_position_once(ends: bool) -> None:
    """Also if its request ended meanwhile, until the stages are notified."""
    rig = Rig()
    step, result = begun(rig)
    late, other = result.tokens
    rig.scheduler.on_result(step.number, StepResult((other,), pending=(late.request,)), 0.0)
    following = rig.formed_step()
    assert [span.request for span in following.plan.spans] == [other.request], (
        "the late one is left out"
    )
    came = rig.stages[0].run(following).tokens
    if ends:
        rig.cancel("one")
    with pytest.raises(InternalError, match="was not requested"):
        rig.scheduler.on_result(
            following.number, StepResult((*came, replace(late, position=9))), 0.0
        )


@pytest.mark.parametrize("overcommit", [False, True])
def test_a_request_that_its_guide_holds_up_gives_its_place_to_another_clients(
    overcommit: bool,
) -> None:
    """Not to its own client's request, which waits after others, and not at once; its tokens are
    the same in the end.
    """
    rig = Rig(
        blocks=24,
        batching=Batching(Mode.NO_BUBBLES, 1, 2, 1),
        limits=Limits(48, 100, overcommit=overcommit),
    )
    stage = rig.stages[0]
    stage.is_late = lambda: True
    prompts = {name: [1, 2, 3, ord(name[1])] for name in ("a0", "a1", "a2", "a3")}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 4, client="a")
    rig.take(rig.next_step())
    rig.take(rig.next_step())
    rig.submit("b0", [4, 5], 4, client="b")
    stage.is_late = lambda: bool(stage.late)
    rig.scheduler.newly_admitted()
    rig.now_s = 0.9 * GIVES_WAY_S
    for _ in range(2):
        rig.scheduler.ask()
        rig.take(rig.next_step())
        assert rig.scheduler.newly_admitted() == []
        rig.now_s += 0.2 * GIVES_WAY_S
    step = rig.formed_step()
    assert rig.scheduler.newly_admitted() == ["b0"]
    stage.is_late = lambda: False
    rig.take(step)
    rig.run_all()
    for name, prompt in {**prompts, "b0": [4, 5]}.items():
        assert rig.tokens(name) == expected(prompt, 4)
    rig.check_empty()


def test_a_request_that_gave_its_place_and_is_cancelled_at_once_is_freed_and_not_kept() -> None:
    swapping = Swapping(24)
    rig = Rig(blocks=24, batching=Batching(Mode.NO_BUBBLES, 1, 1, 1), swapping=swapping)
    stage = rig.stages[0]
    stage.is_late = lambda: True
    rig.submit("a0", [1, 2, 3], 4, client="a")
    rig.take(rig.next_step())
    rig.now_s = 2 * GIVES_WAY_S
    rig.scheduler.ask()
    rig.take(rig.next_step())
    rig.submit("b0", [4, 5], 4, client="b")
    assert rig.cancel("a0")
    stage.is_late = lambda: False
    step = rig.formed_step()
    assert len(step.plan.frees) == 1 and not step.plan.swap_outs
    rig.take(step)
    rig.run_all()
    assert rig.tokens("b0") == expected([4, 5], 4)
    rig.check_empty()


def test_where_nothing_else_runs_a_step_has_to_be_asked_for() -> None:
    rig = Rig()
    rig.submit("one", [1, 2], 4)
    step = rig.formed_step()
    (late,) = rig.stages[0].run(step).tokens
    rig.scheduler.on_result(step.number, StepResult(pending=(late.request,)), 0.0)
    assert rig.next_step() is None and rig.scheduler.must_ask
    rig.scheduler.ask()
    asking = rig.formed_step()
    assert not asking.plan.spans and not rig.scheduler.must_ask and rig.next_step() is None
    rig.stages[0].run(asking)
    rig.events += rig.scheduler.events(
        rig.scheduler.on_result(asking.number, StepResult((late,)), 0.0)
    )
    rig.run_all()
    assert rig.tokens("one") == expected([1, 2], 4)
    rig.check_empty()


@pytest.mark.parametrize("comes", [True, False])
def test_a_token_of_a_request_that_ended_meanwhile_may_come_or_not(comes: bool) -> None:
    rig = Rig()
    step, result = begun(rig)
    assert rig.cancel("one")
    tokens = (
        result.tokens
        if comes
        else tuple(t for t in result.tokens if t.request != step.plan.spans[0].request)
    )
    assert len(tokens) == 1 + comes
    rig.events += rig.scheduler.events(
        rig.scheduler.on_result(step.number, StepResult(tokens), 0.0)
    )
    rig.run_all()
    assert rig.tokens("other") == expected([3], 4) and not rig.tokens("one")
    rig.check_empty()


def test_a_step_within_a_prompt_owes_nothing_and_says_how_far_it_is_read() -> None:
    rig = Rig(chunking=Chunking(5, least_tokens=2))
    rig.submit("long", list(range(12)), 2)
    steps = [rig.formed_step(), rig.formed_step()]
    results = [rig.stages[0].run(step) for step in steps]
    assert [result.tokens for result in results] == [(), ()]
    for read, step, result in zip((5, 10), steps, results, strict=True):
        assert rig.scheduler.on_result(step.number, result, 0.0) == [
            HeadEvent(RequestId("long"), RequestAdmitted(read))
        ]
    with pytest.raises(InternalError):
        step = rig.formed_step()
        assert rig.stages[0].run(step).tokens
        rig.scheduler.on_result(step.number, StepResult(), 0.0)


def test_requests_whose_seen_tokens_do_not_go_in_one_message_go_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forming, "MOST_SEEN_TOKENS", 10)
    rig = Rig(blocks=60, chunking=Chunking(100, least_tokens=2))
    prompts = {f"r{n}": [n * 10 + i for i in range(6)] for n in range(4)} | {
        "large": list(range(20, 40))
    }
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 3, sampling=Sampling(repetition_penalty=1.5))
    biases = tuple((token, 1.0) for token in range(20))
    for name in ("biased", "also"):
        rig.submit(name, [1, 2], 3, sampling=Sampling(logit_bias=biases))
    rig.submit("plain", [1, 2], 3)
    rig.run_all()
    biased = [
        sum(bool(s.sampling and s.sampling.logit_bias) for s in step.plan.spans)
        for step in rig.steps
    ]
    assert sum(biased) == 2 and max(biased) == 1
    seen = [
        [len(span.seen_tokens) for span in step.plan.spans if span.seen_tokens]
        for step in rig.steps
    ]
    assert all(sum(counts) <= 10 or len(counts) == 1 for counts in seen)
    assert sum(sum(counts) for counts in seen) == 4 * 6 + 20, "the stages are told of each token"
    for name, prompt in {**prompts, "plain": [1, 2]}.items():
        assert rig.tokens(name) == expected(prompt, 3)
    rig.check_empty()
