"""A request that outlives its stream: when the coordinator goes away, the client reconnects for the
rest.

The client has the whole request and the tokens so far, so it needs nothing from a coordinator or a
head that survived. If both are lost, others continue from these tokens. A coordinator that starts
makes it wait for the head's report, and refuses requests that never existed. Events that arrive a
second time are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.requests.generation import (
    Finished,
    GenerateRequest,
    GenerationEvent,
    PromptLogprobs,
    Started,
    Token,
)

PATIENCE_S = 60.0
"""How long a client tries to reconnect, unless its own deadline is earlier."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
_COME_BACK = frozenset(
    {UnavailableError.default_reason, "SHUTTING_DOWN", "LISTENER_LOST", "DEPLOYMENT_NOT_READY"}
)
"""Reasons that are independent of the request itself."""

Open = Callable[[GenerateRequest, float | None], AsyncGenerator[GenerationEvent, None]]
"""The events of one call, which may take this many seconds; None is without a bound."""


async def resumed(
    open_call: Open, request: GenerateRequest, timeout_s: float | None, clock: Clock
) -> AsyncGenerator[GenerationEvent, None]:
    """The events of a request, over as many calls as it takes. Until it has started its errors are
    the caller's."""
    ends_at = None if timeout_s is None else clock.now() + timeout_s
    started: Started | None = None
    tokens: list[int] = []
    scored = 1
    pause_s, patient_until = FIRST_PAUSE_S, 0.0
    while True:
        left_s = None if ends_at is None else max(0.0, ends_at - clock.now())
        try:
            async with aclosing(open_call(request, left_s)) as events:
                async for event in events:
                    match event:
                        case Started():
                            if started is not None:
                                continue
                            started = event
                        case PromptLogprobs():
                            rest = event.behind(scored)
                            if rest is None:
                                continue
                            event, scored = rest, rest.end
                        case Token():
                            if started is not None and event.position < len(
                                started.prompt_tokens
                            ) + len(tokens):
                                continue
                            tokens.append(event.token)
                    # Only a new event counts: a call that repeats the old ones and fails again gets
                    # nowhere.
                    pause_s, patient_until = FIRST_PAUSE_S, 0.0
                    yield event
                    if isinstance(event, Finished):
                        return
            return
        except EdgeShardError as error:
            now = clock.now()
            patient_until = patient_until or now + PATIENCE_S
            late = now + pause_s >= min(
                patient_until, ends_at if ends_at is not None else patient_until
            )
            if started is None or error.reason not in _COME_BACK or late:
                raise
        request = replace(
            request, request_id=started.request_id, emitted=tuple(tokens), scored=scored
        )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
