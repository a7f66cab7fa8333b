"""A client reconnects for the rest of its request while that may help, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from edgeshard.client.resuming import PATIENCE_S, resumed
from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    GenerationEvent,
    PromptLogprobs,
    Started,
    Token,
)
from tests.support.scripted_site import placement

pytestmark = pytest.mark.timing

PROMPT = (7, 8)
ANSWER = (11, 12, 13, 14)


@dataclass
class HandClock:
    time: float = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class Site:
    """Says `reaches[n]` tokens of the answer in call n, always from the first; only all of them end
    well."""

    clock: HandClock
    reaches: list[int]
    calls: list[GenerateRequest] = field(default_factory=list)

    async def open_call(
        self, request: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerationEvent, None]:
        reach = self.reaches[min(len(self.calls), len(self.reaches) - 1)]
        self.calls.append(request)
        yield Started(RequestId("r"), DeploymentName("tales"), PROMPT, placement())
        for index, token in enumerate(ANSWER[:reach]):
            yield Token(len(PROMPT) + index, token, "x")
        if reach < len(ANSWER):
            raise UnavailableError("the coordinator went away")
        yield Finished(FinishReason.LENGTH, "", len(PROMPT), len(ANSWER))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """Time passes only while a client waits."""
    clock = HandClock()
    yield_to_others = asyncio.sleep

    async def sleep(seconds: float) -> None:
        clock.time += seconds
        await yield_to_others(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return clock


async def events_of(
    site: Site, timeout_s: float | None = None
) -> tuple[list[GenerationEvent], EdgeShardError | None]:
    seen: list[GenerationEvent] = []
    try:
        async for event in resumed(
            site.open_call, GenerateRequest("tales", Generation("Once")), timeout_s, site.clock
        ):
            seen.append(event)
    except EdgeShardError as error:
        return seen, error
    return seen, None


def tokens_of(events: list[GenerationEvent]) -> tuple[int, ...]:
    return tuple(event.token for event in events if isinstance(event, Token))


async def test_each_token_comes_once_over_several_calls(clock: HandClock) -> None:
    site = Site(clock, [1, 1, 3, 4])
    events, error = await events_of(site)
    assert error is None and tokens_of(events) == ANSWER
    assert sum(isinstance(event, Started) for event in events) == 1 and isinstance(
        events[-1], Finished
    )
    assert [call.emitted for call in site.calls] == [None, ANSWER[:1], ANSWER[:1], ANSWER[:3]]
    assert {call.request_id for call in site.calls[1:]} == {RequestId("r")}


async def test_calls_that_say_nothing_new_are_not_repeated_for_ever(clock: HandClock) -> None:
    events, error = await events_of(Site(clock, [3]))
    assert isinstance(error, UnavailableError) and tokens_of(events) == ANSWER[:3]
    assert PATIENCE_S - 1 <= clock.time <= PATIENCE_S


async def test_the_callers_deadline_ends_it_earlier(clock: HandClock) -> None:
    _, error = await events_of(Site(clock, [3]), timeout_s=2.0)
    assert isinstance(error, UnavailableError) and clock.time <= 2.0


SCORES = (-1.0, -2.0, -3.0, -4.0)


@dataclass
class ScoringSite:
    """Sends everything from the first position in slices of `sizes[n]` in call n; only the last
    call ends well."""

    sizes: list[int]
    calls: list[GenerateRequest] = field(default_factory=list)

    async def open_call(
        self, request: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerationEvent, None]:
        size = self.sizes[len(self.calls)]
        self.calls.append(request)
        yield Started(RequestId("r"), DeploymentName("tales"), (1, 2, 3, 4, 5), placement())
        yield PromptLogprobs(1, SCORES[:size], ((),) * size)
        if len(self.calls) < len(self.sizes):
            raise UnavailableError("the coordinator went away")
        yield PromptLogprobs(1 + size, SCORES[size:], ((),) * (4 - size))
        yield Finished(FinishReason.LENGTH, "", 5, 0)


async def test_each_prompt_logprob_comes_once_over_several_calls(clock: HandClock) -> None:
    site = ScoringSite([2, 1, 3])
    generation = Generation((1, 2, 3, 4, 5), 0, prompt_logprobs=True)
    events = [
        event
        async for event in resumed(
            site.open_call, GenerateRequest("tales", generation), None, clock
        )
    ]
    scores = [event for event in events if isinstance(event, PromptLogprobs)]
    assert [event.position for event in scores] == [1, 3, 4]
    assert tuple(score for event in scores for score in event.logprobs) == SCORES
    assert [call.scored for call in site.calls] == [1, 3, 3]
