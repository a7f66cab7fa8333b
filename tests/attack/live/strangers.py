"""Attackers around the site: a machine in the middle, and another user of the machine."""

from __future__ import annotations

import asyncio
import random
import time

from edgeshard import Client
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import Role
from edgeshard.wire.invitations import invitation_to_text
from tests.attack import local_user, middle
from tests.attack.live.target import Entered, Outcome, Target
from tests.attack.raw import ask
from tests.support.http import Http
from tests.support.http_browser import Browser
from tests.support.identities import Identities

REQUEST_S = 5.0
TOKENS = 8
PROMPT = "Once upon a time"
CONTROLS = ("\x1b", "\x07", "\x9b", "\u202e")


async def meddle(target: Target, seconds: float) -> Outcome:
    """A client and a joiner whose connections go through the machine. No client may get other
    tokens."""
    outcome, dice = Outcome(), random.Random(1)
    until = time.monotonic() + seconds
    right = await _text(target, target.address)
    await _bootstrapped(target, outcome)
    while time.monotonic() < until:
        for way in middle.WAYS:
            async with middle.between(target.address, way, dice) as address:
                try:
                    text = await _text(target, address)
                    outcome.said[f"{way.__name__}: answered"] += 1
                    if text != right:
                        outcome.wrong.append(f"{way.__name__} changed an answer")
                except EdgeShardError as error:
                    outcome.said[f"{way.__name__}: {error.reason}"] += 1
            await asyncio.gather(
                *(
                    middle.garbage(each, dice)
                    for each in (target.address, target.enrolment, target.node_address)
                )
            )
    return outcome


async def _text(target: Target, address: str) -> str:
    async with Client(address, target.client) as client:
        answer = await client.complete(
            target.model, PROMPT, max_new_tokens=TOKENS, ignore_eos=True, timeout_s=REQUEST_S
        )
    return answer.text


async def _bootstrapped(target: Target, outcome: Outcome) -> None:
    """A joiner's terminal gets no control character of a stranger's answer."""
    stranger = Identities(target.scratch, "stranger").coordinator()
    async with Client(target.address, target.operator) as admin:
        token = await admin.create_token(Role.AGENT, f"{target.leaver}-bare")
    printed = await middle.bootstrapped(stranger, invitation_to_text(token.invitation))
    outcome.said["bootstrapped"] += "Run: curl" in printed
    found = [repr(each) for each in CONTROLS if each in printed]
    if found or "Run: curl" not in printed:
        outcome.wrong.append(
            f"a stranger's answer reaches the terminal with {', '.join(found)}: {printed[:200]!r}"
        )


async def look(target: Target, seconds: float) -> Outcome:
    """Another user has the cookie that a browser sends to each port of the host, and looks at files
    and ports."""
    outcome = Outcome()
    until = time.monotonic() + seconds
    for directory in (target.state, *(target.state.parent / name for name in ("a", "b", "c"))):
        opened = local_user.is_open(directory)
        outcome.wrong += [f"{directory.name}: {each}" for each in opened]
        outcome.said["directories"] += 1
    async with Client(target.address, target.operator) as admin:
        browser = await Browser.of(Entered(admin), Http(target.gateway))
        browser.token = ""
        while time.monotonic() < until:
            await _with_cookie(browser, outcome)
            for path in ("/v1/models", "/metrics", "/dashboard/session"):
                answer = await Http(target.gateway).get(path)
                outcome.said[f"{path} without a key: {answer.status}"] += 1
                if answer.status == 200:
                    outcome.wrong.append(f"{path} answers without a key")
            status = await ask(
                target.gateway, None, "/v1/completions", {"model": target.model, "prompt": "Once"}
            )
            outcome.said[f"completion without a key: {status}"] += 1
            await asyncio.sleep(0.01)
    outcome.wrong[:] = sorted(set(outcome.wrong))
    return outcome


async def _with_cookie(browser: Browser, outcome: Outcome) -> None:
    session = await browser.get("/dashboard/session")
    outcome.said[f"session: {session.status}"] += 1
    token = session.json.get("token", "") if session.status == 200 else ""
    if token:
        outcome.wrong.append("the cookie is enough for the page's token")
    answer = await browser.post(
        "/dashboard/do/join", {"name": "spy"}, x_edgeshard_token=token or None
    )
    outcome.said[f"join: {answer.status}"] += 1
    if answer.status == 200:
        outcome.wrong.append("the cookie is enough for a deed")
