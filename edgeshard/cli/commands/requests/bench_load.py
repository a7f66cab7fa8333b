"""Requests for a load: drawn by a seed, begun at a rate or with a fixed concurrency, and timed as
their tokens arrive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from edgeshard.cli.render.bench_report import Served
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.requests.generation import Token

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.domain.clock import Clock

FIRST_ID, LAST_ID = 10, 200
"""Drawn prompts use these tokens, which every vocabulary has; their meaning does not matter to the
time."""


@dataclass(frozen=True, slots=True)
class LengthRange:
    """From `low` to `high` tokens, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> LengthRange:
        """`64` or `32:128`. Raises InvalidArgumentError naming the option."""
        low, _, high = text.partition(":")
        if low.isdecimal() and (not high or high.isdecimal()):
            length_range = cls(int(low), int(high or low))
            if 1 <= length_range.low <= length_range.high <= 1 << 20:
                return length_range
        raise InvalidArgumentError(
            f"--{option} {text[:40]!r} is neither a number of tokens nor LOW:HIGH, such as 64 or "
            "32:128",
            field=option,
        )

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of the load."""

    prompt: str | tuple[int, ...]
    new_tokens: int


def drawn(
    seed: int, prompts: LengthRange | Sequence[str], answers: LengthRange
) -> Iterator[Wanted]:
    """Requests without an end, the same for the same seed: of drawn tokens, or of given texts in
    turn."""
    chance, number = random.Random(seed), 0
    while True:
        prompt: str | tuple[int, ...]
        if isinstance(prompts, LengthRange):
            prompt = tuple(chance.randint(FIRST_ID, LAST_ID) for _ in range(prompts.draw(chance)))
        else:
            prompt = prompts[number % len(prompts)]
        yield Wanted(prompt, answers.draw(chance))
        number += 1


def arrivals(seed: int, rate: float) -> Iterator[float]:
    """Seconds since the beginning at which independent requests arrive, `rate` a second."""
    chance, at = random.Random(f"arrivals {seed}"), 0.0
    while True:
        yield at
        at += chance.expovariate(rate)


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """At most `requests`, none begun after `duration_s`: at `rate` a second independent of the
    answers, or, if that is None, `concurrency` at a time."""

    requests: int
    duration_s: float
    rate: float | None
    concurrency: int

    def __str__(self) -> str:
        return (
            f"{self.concurrency} at a time"
            if self.rate is None
            else f"{self.rate:g} requests/s, open loop"
        )


@dataclass(slots=True)
class Loading:
    """The outcome of a load so far. `interrupted` means that the user ended it early."""

    served: list[Served]
    unfinished: int = 0
    interrupted: bool = False


Serve = Callable[[Wanted, float], Awaitable[Served]]
"""Runs a request that began this many seconds after the load."""


async def put_on(
    load: OfferedLoad,
    requests: Iterator[Wanted],
    seed: int,
    serve: Serve,
    clock: Clock,
    on_progress: Callable[[Loading], None],
) -> Loading:
    """Put the whole load on. Cancelled, it ends the running requests and returns its results so
    far; `on_progress` receives each answer."""
    loading, running = Loading([]), set[asyncio.Task[None]]()
    began = clock.now()

    async def one(request: Wanted) -> None:
        loading.served.append(await serve(request, clock.now() - began))
        on_progress(loading)

    async def begin() -> None:
        async for _ in _turns(load, seed, clock, began, running):
            task = asyncio.create_task(one(next(requests)))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            await asyncio.wait(running)

    try:
        await begin()
    except asyncio.CancelledError:
        loading.interrupted, loading.unfinished = True, len(running)
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        for request in list(running):
            request.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*running, return_exceptions=True)
    return loading


async def _turns(
    load: OfferedLoad, seed: int, clock: Clock, began: float, running: set[asyncio.Task[None]]
) -> AsyncIterator[None]:
    """One for each request, when it is to begin."""
    times = arrivals(seed, load.rate) if load.rate is not None else None
    for _ in range(load.requests):
        if times is not None:
            at = next(times)
            if at > load.duration_s:
                return
            await asyncio.sleep(max(0.0, began + at - clock.now()))
        else:
            while len(running) >= load.concurrency:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if clock.now() - began > load.duration_s:
                return
        yield


async def served(
    client: Client, model: str, request: Wanted, began_s: float, timeout_s: float, clock: Clock
) -> Served:
    """Run one request to its end. An error is its result."""
    called = clock.now()
    times = list[float]()
    prompt_tokens = 0
    error = ""
    events = client.generate(
        model,
        request.prompt,
        max_new_tokens=request.new_tokens,
        ignore_eos=True,
        timeout_s=timeout_s,
    )
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Token):
                    times.append(clock.now())
                elif not prompt_tokens:
                    prompt_tokens = len(getattr(event, "prompt_tokens", ()))
    except EdgeShardError as failure:
        error = failure.reason or failure.code.name
    return Served(
        began_s=began_s,
        total_s=clock.now() - called,
        ttft_s=times[0] - called if times else 0.0,
        prompt_tokens=prompt_tokens,
        new_tokens=len(times),
        gaps_s=tuple(after - before for before, after in pairwise(times)),
        error=error,
    )
