"""Many requests with limited concurrency, each with a result or an error of its own, in the order
they were given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeshard.client.arguments import Message, Tool
from edgeshard.client.chat_completion import ChatCompletion
from edgeshard.client.completion import Completion
from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.requests.generation import GenerateOptions

PATIENCE_S = 300.0
"""How long a request of a batch is offered again while the site has no room for it."""
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of a batch, with the arguments of `Client.complete`."""

    model: str
    prompt: str | Sequence[int]
    options: GenerateOptions = field(default_factory=GenerateOptions)


@dataclass(frozen=True, slots=True)
class Chat:
    """A request of a batch, with the arguments of `Client.complete_chat`."""

    model: str
    messages: str | Sequence[Message]
    tools: Sequence[Tool] | None = None
    variables: Mapping[str, Any] | None = None
    options: GenerateOptions = field(default_factory=GenerateOptions)


BatchRequest = Prompt | Chat
BatchResult = Completion | ChatCompletion | EdgeShardError
BatchProgress = Callable[[int, int], None]
"""Called with (requests done, requests in all)."""


async def run_batch(
    run: Callable[[BatchRequest], Awaitable[Completion | ChatCompletion]],
    requests: Sequence[BatchRequest],
    concurrency: int,
    on_progress: BatchProgress | None,
    clock: Clock,
) -> list[BatchResult]:
    """The results in the order of the requests. Cancelling it cancels those that run."""
    check_batch(requests, concurrency)
    results: dict[int, BatchResult] = {}
    waiting = iter(enumerate(requests))

    async def work() -> None:
        for place, request in waiting:
            results[place] = await _result(run, request, clock)
            if on_progress is not None:
                on_progress(len(results), len(requests))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())
    return [results[place] for place in range(len(requests))]


def check_batch(requests: Sequence[BatchRequest], concurrency: int) -> None:
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidArgumentError(
            "concurrency must be a whole number of 1 or more", field="concurrency"
        )
    for place, request in enumerate(requests):
        if not isinstance(request, Prompt | Chat):
            raise InvalidArgumentError(
                f"requests[{place}] must be a Prompt or a Chat, not {type(request).__name__}",
                field=f"requests[{place}]",
                reason="WRONG_TYPE",
            )


async def _result(
    run: Callable[[BatchRequest], Awaitable[Completion | ChatCompletion]],
    request: BatchRequest,
    clock: Clock,
) -> BatchResult:
    """Send a request that was refused for lack of capacity, and so not begun, again after the time
    that the site names."""
    until = clock.now() + PATIENCE_S
    while True:
        try:
            return await run(request)
        except ResourceExhaustedError as error:
            if error.retry_after_s is None or error.partial_text or clock.now() >= until:
                return error
            pause_s = min(max(error.retry_after_s, 0.05), _LONGEST_PAUSE_S)
        except EdgeShardError as error:
            return error
        await asyncio.sleep(pause_s)
