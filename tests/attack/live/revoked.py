"""Attackers whose rights have ended, or who have a key only."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from itertools import count, cycle
from typing import Any

from edgeshard import Client
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import Role
from tests.attack import costly_bodies, late_bodies
from tests.attack.live.target import Entered, Outcome, Target
from tests.support.http import Http
from tests.support.http_browser import Browser

ENDS_S = 5.0
REFUSED = (400, 413, 422, 429)


async def costly(target: Target, seconds: float) -> Outcome:
    """One costly body after another. None may be accepted, or end the connection without an
    answer."""
    outcome = Outcome()
    sent = cycle(costly_bodies.bodies(target.model).items())
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for name, (path, body) in sent:
                status = await costly_bodies.send(target.gateway, target.key, path, body)
                outcome.said[f"{name}: {status}"] += 1
                if status not in REFUSED:
                    outcome.wrong.append(f"{name} is answered with {status}")
    outcome.wrong[:] = sorted(set(outcome.wrong))
    return outcome


async def revoked_key(target: Target, seconds: float) -> Outcome:
    """Keys that are revoked while their requests arrive, and while an answer runs."""
    outcome, numbers = Outcome(), count()
    chat = _chat(target)
    requests: dict[str, late_bodies.Sent] = {
        "completion": (
            "POST",
            "/v1/completions",
            {"model": target.model, "prompt": "Once", "max_tokens": 2},
            (),
        ),
        "chat": ("POST", "/v1/chat/completions", {**chat, "max_tokens": 2}, ()),
        "tokenize": ("POST", "/tokenize", {"model": target.model, "prompt": "Once"}, ()),
    }
    until = time.monotonic() + seconds
    async with Client(target.address, target.operator) as admin:
        while time.monotonic() < until:
            name = f"{target.leaver}-{next(numbers)}"
            _, key = await admin.create_key(name)
            met = await late_bodies.late(
                target.gateway, key, requests, partial(admin.revoke_key, name)
            )
            outcome.said.update(met)
            outcome.wrong += [
                f"after the revocation of its key {each}" for each in met if each.endswith("200")
            ]
            name = f"{target.leaver}-{next(numbers)}"
            _, key = await admin.create_key(name)
            stream: late_bodies.Sent = (
                "POST",
                "/v1/chat/completions",
                {**chat, "max_tokens": 400, "stream": True},
                (),
            )
            revoke = partial(admin.revoke_key, name)
            went_on_s = await late_bodies.streamed_after(
                target.gateway, key, stream, revoke, ENDS_S
            )
            outcome.said["streams"] += 1
            if went_on_s is None or went_on_s > late_bodies.LATER_S:
                outcome.wrong.append(
                    f"an answer goes on for more than {late_bodies.LATER_S:g} s after a revocation"
                )
    outcome.wrong[:] = sorted(set(outcome.wrong))
    return outcome


async def revoked_operator(target: Target, seconds: float) -> Outcome:
    """An operator who begins deeds, is revoked, and then tries the session and the certificate."""
    outcome = Outcome()
    until = time.monotonic() + seconds
    async with Client(target.address, target.leaving_operator) as leaver:
        browser = await Browser.of(Entered(leaver), Http(target.gateway))
        lines = [
            f"{name}: {value}"
            for name, value in browser.headers().items()
            if name in SHOWN and value
        ]
        deeds: dict[str, late_bodies.Sent] = {
            "join": ("POST", "/dashboard/do/join", {"name": "spy"}, lines),
            "chat": ("POST", "/dashboard/chat", {**_chat(target), "max_tokens": 1}, lines),
        }
        async with Client(target.address, target.operator) as admin:
            revoke = partial(admin.revoke, Role.OPERATOR, target.leaver)
            met = await late_bodies.late(target.gateway, None, deeds, revoke)
            outcome.said.update(met)
            outcome.wrong += [
                f"after the revocation of an operator {each}"
                for each in met
                if each.endswith("200")
            ]
            while time.monotonic() < until:
                await _refused(outcome, leaver, browser)
                await asyncio.sleep(0.01)
            for entry in await admin.audit(100):
                if (
                    entry.what == "CreateToken"
                    and entry.result == "ok"
                    and entry.who.endswith(target.leaver)
                ):
                    outcome.wrong.append("a revoked operator made a token")
    outcome.wrong[:] = sorted(set(outcome.wrong))
    return outcome


def _chat(target: Target) -> dict[str, Any]:
    return {"model": target.model, "messages": [{"role": "user", "content": "Once"}]}


SHOWN = ("cookie", "origin", "x-edgeshard-token")


async def _refused(outcome: Outcome, leaver: Client, browser: Browser) -> None:
    """Try a deed each way."""
    try:
        await leaver.create_token(Role.AGENT, "spy")
        outcome.wrong.append("a revoked operator's certificate made a token")
    except EdgeShardError as error:
        outcome.said[error.reason] += 1
    answer = await browser.post("/dashboard/do/join", {"name": "spy"})
    outcome.said[f"session: {answer.status}"] += 1
    if answer.status == 200:
        outcome.wrong.append("a revoked operator's session made a token")
