"""Requests at the head that end in an unusual way are answered, and the event loop stays free
meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from edgeshard_agent.engine import pipeline_head as head_module
from edgeshard_agent.engine.pipeline_head import Epoch, Head, HeadLimits
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator
from edgeshard_agent.scheduler.scheduler import HeadStep, Limits, Scheduler

import edgeshard
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import (
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import (
    FinishReason,
    Generation,
    Guide,
    GuideKind,
    PromptLogprobs,
    Sampling,
    Token,
)
from edgeshard.domain.requests.head import (
    HeadEvent,
    RequestAccepted,
    RequestAdmitted,
    RequestEnd,
    StartRequest,
)
from edgeshard.domain.requests.step import (
    ReturnedStep,
    SampledToken,
    SpanLogprobs,
    StepResult,
    Targets,
)

pytestmark = pytest.mark.timing

REQUEST = RequestId("r")


class SlowTokenizer:
    """Encodes when the test allows it."""

    longest_token_bytes = 16
    special_tokens: ClassVar[dict[str, int]] = {}
    growth = 1.0
    file = Path()

    def __init__(self) -> None:
        self.go = threading.Event()
        self.fault: Exception | None = None

    def encode(self, text: str) -> list[int]:
        assert self.go.wait(60)
        return [1, 2]

    def decode(self, ids: list[int]) -> str:
        if self.fault is not None:
            raise self.fault
        return "".join(f"<{i}>" for i in ids)


class Rig:
    def __init__(self, window: int = 3, concurrency: int = 2) -> None:
        self.tokenizer = SlowTokenizer()
        self.out: list[HeadEvent] = []
        self.steps: list[HeadStep] = []
        self.fault: Exception | None = None
        self.window, self.concurrency = window, concurrency
        self.failures: list[EdgeShardError] = []
        self.admitted: list[str] = []
        self.now = 0.0
        self.head = Head(self.epoch(), self.tokenizer, HeadLimits(100, 64, 64), lambda: self.now)  # type: ignore[arg-type]

    def epoch(self) -> Epoch:
        """A pipeline that has computed nothing yet."""
        scheduler = Scheduler(
            BlockAllocator(4 * self.concurrency, 16),
            Limits(64, 4 * self.concurrency),
            Batching(Mode.NO_BUBBLES, self.window, self.concurrency, 1),
            Chunking(16),
            frozenset({9}),
        )
        return Epoch(scheduler, self.offer, self.heard, None, self.failures.append)

    def heard(self, output: HeadEvent) -> None:
        """Admissions are recorded separately: only metrics depend on them."""
        if isinstance(output.event, RequestAdmitted):
            self.admitted.append(str(output.request_id))
        else:
            self.out.append(output)

    def next_epoch(self) -> None:
        self.steps.clear()
        self.fault = None
        self.head.pause()
        self.head.begin(self.epoch())
        self.head.open()

    def offer(self, step: HeadStep) -> None:
        if self.fault is not None:
            raise self.fault
        self.steps.append(step)


async def begin(rig: Rig) -> asyncio.Task[None]:
    """A text request, up to its wait for the tokenizer."""
    task = asyncio.create_task(
        rig.head.start_request(StartRequest(REQUEST, Generation("some text", 4)))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_a_request_cancelled_while_it_is_tokenised_ends_as_cancelled() -> None:
    rig = Rig()
    task = await begin(rig)
    rig.head.cancel(REQUEST)
    rig.tokenizer.go.set()
    await task
    said = RequestAccepted((1, 2)), RequestEnd(FinishReason.CANCELLED, "")
    assert rig.out == [HeadEvent(REQUEST, event) for event in said]
    assert not rig.steps and rig.head.is_idle


async def test_what_comes_right_behind_a_request_finds_it() -> None:
    """As when a head stood still, and all that came meanwhile is read at once."""
    rig = Rig()
    rig.tokenizer.go.set()
    for name, then in (
        ("twice", rig.head.start),
        ("cancelled", lambda start: rig.head.cancel(start.request_id)),
    ):
        start = StartRequest(RequestId(name), Generation((1, 2), 4))
        rig.head.start(start)
        then(start)
    await asyncio.gather(*rig.head._tasks)
    assert [output for output in rig.out if output.request_id == "twice"] == [
        HeadEvent(RequestId("twice"), RequestAccepted((1, 2)))
    ]
    assert HeadEvent(RequestId("cancelled"), RequestEnd(FinishReason.CANCELLED, "")) in rig.out


async def test_a_request_that_is_tokenised_while_the_pipeline_breaks_runs_in_the_next_epoch() -> (
    None
):
    rig, broken = Rig(), UnavailableError("the next node is gone")
    task = await begin(rig)
    rig.head.fail(broken)
    rig.tokenizer.go.set()
    await task
    assert (
        rig.out == [HeadEvent(REQUEST, RequestAccepted((1, 2)))]
        and not rig.steps
        and rig.failures == [broken]
    )
    rig.next_epoch()
    assert [step.tokens for step in rig.steps] == [(1, 2)]


async def test_it_says_how_long_it_has_been_the_head_over_all_its_epochs() -> None:
    rig = Rig()
    rig.now = 5.0
    rig.next_epoch()
    rig.now = 7.0
    assert rig.head.head_for_s == 7.0


async def test_a_late_token_is_asked_for_where_nothing_runs_and_not_while_the_head_is_paused() -> (
    None
):
    rig = Rig()
    rig.tokenizer.go.set()
    await rig.head.start_request(StartRequest(REQUEST, Generation((1, 2), 4)))
    rig.head.on_return(ReturnedStep(0, StepResult(pending=(0,))))
    assert len(rig.steps) == 1
    await asyncio.sleep(0.1)
    asking = rig.steps[-1]
    assert len(rig.steps) == 2 and not asking.plan.spans, "one at a time"
    rig.head.pause()
    rig.head.on_return(ReturnedStep(1, StepResult()))
    await asyncio.sleep(0.1)
    assert len(rig.steps) == 2 and rig.head._asking is None
    await rig.head.close()


async def test_an_unforeseen_fault_of_the_tokenizer_is_an_answer() -> None:
    rig = Rig()
    rig.tokenizer.go.set()
    rig.tokenizer.fault = OverflowError("out of range")
    await rig.head.start_request(StartRequest(REQUEST, Generation("some text", 4)))
    (refused,) = rig.out
    assert isinstance(refused.event, InternalError)


@pytest.mark.parametrize("what", ["a wrong result", "a fault in forming the next step"])
async def test_a_head_that_fails_says_so_once(what: str) -> None:
    """It computes nothing from then on, so the coordinator has to start again."""
    rig = Rig()
    rig.tokenizer.go.set()
    await rig.head.start_request(StartRequest(REQUEST, Generation("some text", 4)))
    tokens = () if what == "a wrong result" else (SampledToken(0, 2, 7),)
    if what == "a fault in forming the next step":
        rig.fault = RuntimeError("cannot schedule new futures after shutdown")
    rig.head.on_return(ReturnedStep(0, StepResult(tokens)))
    (failure,) = rig.failures
    assert isinstance(failure, InternalError)
    rig.head.on_return(ReturnedStep(7, StepResult()))
    rig.head.fail(UnavailableError("the next node is gone"))
    assert rig.failures == [failure]


async def test_a_request_cancelled_before_its_turn_to_be_tokenised_ends_as_cancelled() -> None:
    rig = Rig()
    tasks = [await begin(rig)]
    for name in ("second", "third"):
        start = StartRequest(RequestId(name), Generation("some text", 4))
        tasks.append(asyncio.create_task(rig.head.start_request(start)))
    await asyncio.sleep(0)
    rig.head.cancel(RequestId("third"))
    rig.tokenizer.go.set()
    await asyncio.gather(*tasks)
    assert [o for o in rig.out if o.request_id == "third"] == [
        HeadEvent(RequestId("third"), RequestEnd(FinishReason.CANCELLED, ""))
    ]
    assert sum(isinstance(output.event, RequestAccepted) for output in rig.out) == 2


async def test_a_text_that_cannot_be_made_ends_its_request_and_no_other() -> None:
    rig = Rig()
    rig.tokenizer.go.set()
    await rig.head.start_request(StartRequest(REQUEST, Generation("some text", 4)))
    await rig.head.start_request(StartRequest(RequestId("other"), Generation("some text", 4)))
    rig.tokenizer.fault = OverflowError("out of range")
    rig.head.on_return(ReturnedStep(0, StepResult((SampledToken(0, 2, 7),))))
    refused = rig.out[-1]
    assert isinstance(refused.event, InternalError)
    rig.tokenizer.fault = None
    rig.head.on_return(ReturnedStep(1, StepResult((SampledToken(1, 2, 8),))))
    assert rig.out[-1] == HeadEvent(RequestId("other"), Token(2, 8, "<8>")) and not rig.failures


async def test_tokens_outside_the_vocabulary_with_which_a_client_comes_back_break_no_pipeline() -> (
    None
):
    """The first stage would fail with a step that has one, and its deployment with it."""
    rig = Rig()
    await rig.head.start_request(
        StartRequest(REQUEST, Generation((1, 2), 4), emitted_tokens=(5, 100))
    )
    (refused,) = rig.out
    assert isinstance(refused.event, InvalidArgumentError) and not rig.steps
    assert (refused.event.field, refused.event.reason) == ("resume.tokens", "TOKEN_OUT_OF_RANGE")


async def test_a_result_that_cannot_be_breaks_the_pipeline_and_no_request() -> None:
    rig = Rig()
    await rig.head.start_request(StartRequest(REQUEST, Generation((1, 2), 4)))
    rig.head.on_return(ReturnedStep(5, StepResult(())))
    (failure,) = rig.failures
    assert isinstance(failure, InternalError) and rig.out == [
        HeadEvent(REQUEST, RequestAccepted((1, 2)))
    ]
    rig.head.on_return(ReturnedStep(5, StepResult(())))
    assert len(rig.failures) == 1


@pytest.mark.parametrize("when", ["of the request", "of a cancel", "after a token"])
async def test_a_step_that_cannot_be_offered_breaks_the_pipeline_and_no_request(when: str) -> None:
    """Stages run steps in order: they would wait for ever for the one that was lost."""
    rig = Rig()
    if when == "of the request":
        rig.fault = RuntimeError("cannot schedule new futures after shutdown")
    for name in ("one", "other"):
        await rig.head.start_request(StartRequest(RequestId(name), Generation((1, 2), 4)))
    rig.fault = RuntimeError("cannot schedule new futures after shutdown")
    if when == "of a cancel":
        rig.head.cancel(RequestId("one"))
    elif when == "after a token":
        rig.head.on_return(ReturnedStep(0, StepResult((SampledToken(0, 2, 7),))))
    assert len(rig.failures) == 1 and not any(
        isinstance(output.event, EdgeShardError) for output in rig.out
    )
    rig.next_epoch()
    begun = {
        "of the request": (1, 2, 1, 2),
        "of a cancel": (1, 2),
        "after a token": (1, 2, 7, 1, 2),
    }
    assert tuple(token for step in rig.steps for token in step.tokens) == begun[when]


@pytest.mark.parametrize("window", [1, 2, 3])
async def test_the_head_takes_as_many_requests_as_run_and_wait(window: int) -> None:
    """Two may run and eight wait, however many steps the window lets through at the moment they
    come."""
    rig = Rig(window=window, concurrency=2)
    for number in range(10):
        await rig.head.start_request(StartRequest(RequestId(f"r{number}"), Generation((1, 2), 62)))
    assert sum(isinstance(output.event, RequestAccepted) for output in rig.out) == 10
    await rig.head.start_request(StartRequest(RequestId("one too many"), Generation((1, 2), 62)))
    assert (
        isinstance(rig.out[-1].event, EdgeShardError) and rig.out[-1].event.reason == "QUEUE_FULL"
    )


async def test_it_says_when_a_request_waits_no_more() -> None:
    rig = Rig(window=1, concurrency=1)
    for name in ("first", "second"):
        await rig.head.start_request(StartRequest(RequestId(name), Generation((1, 2), 4)))
    assert rig.admitted == ["first"]
    rig.head.cancel(RequestId("first"))
    rig.head.on_return(ReturnedStep(0, StepResult((SampledToken(0, 2, 7),))))
    assert rig.admitted == ["first", "second"]


async def test_tokens_of_a_cancelled_request_that_are_on_their_way_go_nowhere() -> None:
    rig = Rig()
    await rig.head.start_request(StartRequest(REQUEST, Generation((1, 2), 4)))
    rig.head.cancel(REQUEST)
    rig.head.on_return(ReturnedStep(0, StepResult((SampledToken(0, 2, 7),))))
    assert not any(isinstance(output.event, Token) for output in rig.out)


@pytest.mark.parametrize("client", ["client/b", ""])
async def test_whoever_names_the_id_of_anothers_request_gets_a_request_of_its_own(
    client: str,
) -> None:
    """After a coordinator was lost, only the head knows whose it is."""
    rig = Rig()
    await rig.head.start_request(StartRequest(REQUEST, Generation((1, 2), 4), client="client/a"))
    rig.head.on_return(ReturnedStep(0, StepResult((SampledToken(0, 2, 7),))))
    rig.head.stream_lost()
    rig.out.clear()
    rig.head.start(StartRequest(REQUEST, Generation((3, 4, 5), 4), client=client, resumed=True))
    await asyncio.gather(*rig.head._tasks)
    assert rig.out == [HeadEvent(REQUEST, RequestAccepted((3, 4, 5)))]


async def test_the_client_of_a_request_is_told_what_it_has_not_heard() -> None:
    rig = Rig()
    await rig.head.start_request(StartRequest(REQUEST, Generation((1, 2), 4), client="client/a"))
    rig.head.on_return(ReturnedStep(0, StepResult((SampledToken(0, 2, 7),))))
    rig.head.stream_lost()
    rig.out.clear()
    rig.head.start(StartRequest(REQUEST, Generation((1, 2), 4), client="client/a", resumed=True))
    assert rig.out == [
        HeadEvent(REQUEST, RequestAccepted((1, 2))),
        HeadEvent(REQUEST, Token(2, 7, "<7>")),
    ]


async def test_a_long_prompt_does_not_hold_up_the_event_loop() -> None:
    tries = []
    for _ in range(10):  # a busy machine takes the core from some of them, and not from all
        longest_s, whole_s = await refuse_a_long_prompt()
        if longest_s < whole_s / 3:
            return
        tries.append(f"{longest_s:.3f} of {whole_s:.3f} s")
    raise AssertionError(f"the loop stood still for {', '.join(tries)}")


async def refuse_a_long_prompt() -> tuple[float, float]:
    """The seconds of the loop's longest turn meanwhile, and of it all."""
    tokenizer = Tokenizer.load(Path(edgeshard.__file__).parent / "demo_model" / "tokenizer.json")
    batching = Batching(Mode.NO_BUBBLES, 1, 1, 1)
    context = 100_000  # less than the prompt has, and more than its bytes imply
    scheduler = Scheduler(
        BlockAllocator(4, 16), Limits(context, 4), batching, Chunking(16), frozenset()
    )
    out: list[HeadEvent] = []
    limits = HeadLimits(4096, 64, context)
    head = Head(Epoch(scheduler, lambda step: None, out.append), tokenizer, limits)
    text = "Once upon a time there was a king who had three sons. " * 20_000
    began = time.perf_counter()
    task = asyncio.create_task(head.start_request(StartRequest(REQUEST, Generation(text, 4))))
    turns = []
    while not task.done():
        turn = time.perf_counter()
        await asyncio.sleep(0)
        turns.append(time.perf_counter() - turn)
    whole = time.perf_counter() - began
    assert isinstance(out[0].event, EdgeShardError) and out[0].event.reason == "CONTEXT_EXCEEDED"
    return max(turns), whole


@pytest.mark.parametrize(("prompt", "asked", "answers"), [(60, 128, 4), (63, 5, 1), (8, 3, 3)])
async def test_new_tokens_are_clipped_to_the_context_where_the_request_says_so(
    prompt: int, asked: int, answers: int
) -> None:
    rig = Rig()
    generation = Generation((1,) * prompt, asked, clip_new_tokens=True)
    await rig.head.start_request(StartRequest(REQUEST, generation))
    while rig.steps:
        step = rig.steps.pop(0)
        tokens = [
            SampledToken(span.request, span.end_position, 7)
            for span in step.plan.spans
            if span.sample
        ]
        rig.head.on_return(ReturnedStep(step.number, StepResult(tuple(tokens))))
    assert sum(isinstance(output.event, Token) for output in rig.out) == answers
    assert (
        isinstance(rig.out[-1].event, RequestEnd)
        and rig.out[-1].event.reason is FinishReason.LENGTH
    )


@pytest.mark.parametrize(("clips", "field"), [(True, "prompt"), (False, "max_new_tokens")])
async def test_what_does_not_fit_the_context_is_refused(clips: bool, field: str) -> None:
    rig = Rig()
    prompt = (1,) * (64 if clips else 60)
    await rig.head.start_request(
        StartRequest(REQUEST, Generation(prompt, 5, clip_new_tokens=clips))
    )
    (refused,) = rig.out
    assert isinstance(refused.event, EdgeShardError) and refused.event.field == field


async def test_a_token_says_when_it_came_back_to_the_head() -> None:
    rig = Rig()
    await rig.head.start_request(StartRequest(REQUEST, Generation((1, 2), 2)))
    for step in range(2):
        rig.now = 100.0 + step
        rig.head.on_return(ReturnedStep(step, StepResult((SampledToken(0, 2 + step, 7),))))
    assert [output.event.at_s for output in rig.out if isinstance(output.event, Token)] == [
        100.0,
        101.0,
    ]


LONG = tuple(range(1, 31))
"""In steps of 16 tokens it takes two."""


def scored(number: int, request: int, position: int, count: int) -> ReturnedStep:
    scores = PromptLogprobs(position, (-1.0,) * count, ((),) * count)
    return ReturnedStep(number, StepResult(prompt_logprobs=(SpanLogprobs(request, scores),)))


def said(rig: Rig) -> list[tuple[int, int]]:
    """(position, count) of the emitted scores of prompts."""
    scores = [output.event for output in rig.out if isinstance(output.event, PromptLogprobs)]
    return [(part.position, len(part.logprobs)) for part in scores]


async def test_prompt_logprobs_that_were_said_are_not_asked_for_again_in_the_next_epoch() -> None:
    rig = Rig()
    generation = Generation(LONG, 0, prompt_logprobs=True)
    await rig.head.start_request(StartRequest(REQUEST, generation))
    rig.head.on_return(scored(0, 0, 1, 16))
    rig.next_epoch()
    rig.head.start(StartRequest(REQUEST, generation, resumed=True, scored=17))
    assert [step.plan.spans[0].targets for step in rig.steps] == [None, Targets(17, LONG[17:])]
    rig.head.on_return(ReturnedStep(0, StepResult()))
    rig.head.on_return(scored(1, rig.steps[1].plan.spans[0].request, 17, 13))
    assert said(rig) == [(1, 16), (17, 13)] and rig.out[-1] == HeadEvent(
        REQUEST, RequestEnd(FinishReason.LENGTH, "")
    )


@pytest.mark.parametrize("known", [1, 5, 17])
async def test_a_client_that_comes_back_gets_the_prompt_logprobs_that_it_lacks(known: int) -> None:
    rig = Rig()
    generation = Generation(LONG, 0, prompt_logprobs=True)
    await rig.head.start_request(StartRequest(REQUEST, generation))
    rig.head.on_return(scored(0, 0, 1, 16))
    rig.head.stream_lost()
    rig.out.clear()
    rig.head.start(StartRequest(REQUEST, generation, resumed=True, scored=known))
    assert rig.out[0] == HeadEvent(REQUEST, RequestAccepted(tuple(LONG))) and said(rig) == (
        [] if known == 17 else [(known, 17 - known)]
    )


async def test_a_request_of_another_head_starts_again_if_its_client_lacks_prompt_logprobs() -> None:
    rig = Rig()
    generation = Generation(LONG, 0, prompt_logprobs=True)
    await rig.head.start_request(StartRequest(REQUEST, generation, scored=9))
    rig.head.stream_lost()
    rig.head.start(StartRequest(REQUEST, generation, resumed=True, scored=5))
    await asyncio.gather(*rig.head._tasks)
    assert rig.steps[-1].plan.spans[0].targets == Targets(5, LONG[5:17])


async def test_a_guide_is_refused_before_anything_is_computed() -> None:
    rig = Rig()
    for guide, generation in (
        (Guide(GuideKind.REGEX, "(("), Generation((1, 2), 4)),
        (Guide(GuideKind.REGEX, ""), Generation((1, 2), 4)),
        (Guide(GuideKind.REGEX, "a"), Generation((1, 2), 4, ignore_eos=True)),
    ):
        await rig.head.start_request(StartRequest(REQUEST, replace(generation, guide=guide)))
        refused = rig.out[-1]
        assert isinstance(refused.event, EdgeShardError) and refused.event.field in (
            "guide",
            "ignore_eos",
        )
    assert not rig.steps
    await rig.head.start_request(
        StartRequest(REQUEST, Generation((1, 2), 4, guide=Guide(GuideKind.REGEX, "a")))
    )
    assert rig.steps[0].plan.spans[0].guide == Guide(GuideKind.REGEX, "a")
    await rig.head.close()


async def test_a_model_without_a_tokenizer_or_an_end_takes_no_guide() -> None:
    rig = Rig()
    generation = Generation((1, 2), 4, guide=Guide(GuideKind.REGEX, "a"))
    endless = Scheduler(
        BlockAllocator(8, 16),
        Limits(64, 4),
        Batching(Mode.NO_BUBBLES, 1, 1, 1),
        Chunking(16),
        frozenset(),
    )
    limits = HeadLimits(100, 64, 64)
    heads = {
        "NO_TOKENIZER": Head(rig.epoch(), None, limits),
        "NO_END": Head(Epoch(endless, rig.offer, rig.out.append), rig.tokenizer, limits),  # type: ignore[arg-type]
    }
    for reason, head in heads.items():
        await head.start_request(StartRequest(REQUEST, generation))
        refused = rig.out[-1].event
        assert isinstance(refused, EdgeShardError) and (refused.field, refused.reason) == (
            "guide",
            reason,
        )


async def test_more_prompt_logprobs_than_a_head_should_keep_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_module, "PROMPT_LOGPROBS_LIMIT", 6 * len(LONG))
    rig = Rig()
    for top, is_taken in ((6, False), (5, True)):
        sampling = Sampling(logprobs=True, top_logprobs=top)
        await rig.head.start_request(
            StartRequest(REQUEST, Generation(LONG, 0, sampling, prompt_logprobs=True))
        )
        assert bool(rig.steps) is is_taken
    refused = rig.out[0]
    assert isinstance(refused.event, EdgeShardError) and refused.event.field == "prompt_logprobs"
