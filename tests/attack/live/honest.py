"""The experience of honest users of a site: clients over both APIs, an operator, and a joiner."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import h11

from edgeshard.client import Client
from edgeshard.client.joining import enrol
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import JoinToken, Role
from edgeshard.domain.requests.generation import GenerateOptions, Token
from edgeshard.identity.authority import new_key
from tests.attack.joining import dialled_from
from tests.attack.live.site import DEPLOYMENT, HONEST, OTHER, LiveSite
from tests.attack.live.verdict import Figures, Gaps
from tests.support.http import Http
from tests.support.load import Stream

PROMPT = "Once upon a time there was a king who had three sons"
TOKENS = 300
EVERY_S = 1.0
SAMPLED_S = 0.5
PAUSE_S = 0.1
"""Before somebody who was refused tries again."""
JOINER = "127.0.0.2"
"""The honest joiner's address: a joiner that shares an attacker's address shares its limit."""
BROKEN = (AssertionError, OSError, h11.ProtocolError, EdgeShardError)
"""Errors with which a request over HTTP or the SDK may end, except by itself."""


@dataclass(slots=True)
class Timer:
    """Waits for whatever comes next, the times given in seconds."""

    gaps: list[float] = field(default_factory=list)
    came: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    since: float | None = None

    def asked(self, now: float) -> None:
        """A request that is repeated has been waited for since it was made first."""
        self.since = now if self.since is None else self.since

    def arrived(self, now: float) -> None:
        assert self.since is not None
        self.gaps.append(now - self.since)
        self.since, self.came = now, self.came + 1

    def ended(self) -> None:
        """Later figures belong to another request."""
        self.since = None

    def stopped(self, now: float) -> None:
        """The time of the outstanding wait counts."""
        if self.since is not None:
            self.gaps.append(now - self.since)

    def figures(self) -> Gaps:
        return Gaps.of(self.gaps, self.came, self.refused)

    @property
    def longest_s(self) -> float:
        return max(self.gaps, default=0.0)


async def measured(site: LiveSite, seconds: float, token: JoinToken | None = None) -> Figures:
    """Their figures over `seconds`; if there is a token, a process joins with it after a third of
    the time."""
    timers = {name: Timer() for name in ("sdk", "http", "kept connection", "new connection")}
    joined: list[float] = []
    idle = site.memory_bytes()
    late = [0.0]
    logged = site.log_bytes()
    peak = dict(idle)
    async with site.client_of(Role.CLIENT, "honest") as client, site.client_of() as operator:
        works = [
            _repeated(timers["sdk"], lambda: _by_sdk(client)),
            _repeated(timers["http"], lambda: _by_http(Http(site.gateway, site.honest))),
            _repeated(timers["kept connection"], lambda: _call(operator), EVERY_S),
            _repeated(timers["new connection"], lambda: _call_anew(site), EVERY_S),
            _watched(site, peak),
            _late(late),
        ]
        first = await _epochs(operator)
        if token is not None:
            works.append(_joins(token, seconds / 3, joined))
        await _for_a_time(seconds, works)
        last = await _epochs(operator)
    now = time.monotonic()
    for timer in timers.values():
        timer.stopped(now)
    return Figures(
        seconds,
        {name: timers[name].figures() for name in ("sdk", "http")},
        {name: timers[name].longest_s for name in ("kept connection", "new connection")},
        joined[0] if joined else None,
        {name: peak[name] - before for name, before in idle.items()},
        60 / seconds * (site.log_bytes() - logged),
        {name: (epoch, last.get(name, 0)) for name, epoch in first.items()},
        late[0],
    )


async def _for_a_time(seconds: float, works: list[Coroutine[Any, Any, None]]) -> None:
    """Raises an error that one of them raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


async def _repeated(
    timer: Timer, ask: Callable[[], AsyncGenerator[None, None]], every_s: float = 0.0
) -> None:
    """Send requests repeatedly, at most once in `every_s` seconds; every answer is an arrival."""
    while True:
        began = time.monotonic()
        timer.asked(began)
        try:
            async with aclosing(ask()) as answers:
                async for _ in answers:
                    timer.arrived(time.monotonic())
            timer.ended()
        except BROKEN as error:
            timer.refused[_reason(error)] += 1
            await asyncio.sleep(PAUSE_S)
            continue
        await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))


def _reason(error: BaseException) -> str:
    if isinstance(error, EdgeShardError) and error.reason:
        return error.reason
    return f"{type(error).__name__}: {error}"[:80]


async def _by_sdk(client: Client) -> AsyncGenerator[None, None]:
    stream = Stream(OTHER, PROMPT, GenerateOptions(max_new_tokens=TOKENS, ignore_eos=True))
    async with aclosing(stream.follow(client)) as events:
        async for event in events:
            if isinstance(event, Token):
                yield
    stream.raise_error()


async def _by_http(http: Http) -> AsyncGenerator[None, None]:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": DEPLOYMENT, "messages": messages, "max_tokens": TOKENS, "stream": True}
    async with http.opened("POST", "/v1/chat/completions", body) as stream:
        assert stream.status == 200, f"HTTP {stream.status}"
        rest = b""
        async for part in stream.parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
                    "content"
                ):
                    yield


async def _call(operator: Client) -> AsyncGenerator[None, None]:
    await operator.nodes()
    yield


async def _call_anew(site: LiveSite) -> AsyncGenerator[None, None]:
    """As `edgectl get nodes` does."""
    async with site.client_of() as operator:
        await operator.nodes()
        yield


async def _epochs(operator: Client) -> dict[str, int]:
    return {
        each.spec.name: each.epoch
        for each in await operator.deployments()
        if each.spec.name in HONEST
    }


async def _watched(site: LiveSite, peak: dict[str, int]) -> None:
    while True:
        for name, resident in site.memory_bytes().items():
            peak[name] = max(peak[name], resident)
        await asyncio.sleep(SAMPLED_S)


async def _late(longest: list[float]) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(PAUSE_S)
        longest[0] = max(longest[0], time.monotonic() - began - PAUSE_S)


async def _joins(token: JoinToken, after_s: float, joined: list[float]) -> None:
    """Join as `edgectl join` does, again if refused; record the total time."""
    await asyncio.sleep(after_s)
    began = time.monotonic()
    async with dialled_from(JOINER, token.enrolment) as elsewhere:
        while not joined:
            try:
                await enrol(replace(token.invitation, enrolment=elsewhere), new_key())
                joined.append(time.monotonic() - began)
            except EdgeShardError:
                await asyncio.sleep(PAUSE_S)
