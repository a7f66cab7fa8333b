"""Clients that leave at any point leave nothing: no KV on any node, no request at the head or the
coordinator."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import native_available

from edgeshard import Client
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.generation import GenerateOptions
from tests.chaos.matrix import STAGES, VOCABULARY, Ask
from tests.chaos.run import say
from tests.chaos.site import DEPLOYMENT, ChaosSite
from tests.chaos.trial import Trials, stream_of
from tests.support.checker import check, reference_of
from tests.support.forms import in_form
from tests.support.load import Stream
from tests.support.site import COORDINATOR

COUNT = "EDGESHARD_CHAOS_DISCONNECTS"
"""Names the environment variable with the number of clients that leave."""
GROUP = 8
"""Clients at once: four run, the others wait."""
KILLS_EVERY = 6
"""One of this many groups loses a node."""
NEW_TOKENS = 64
TEXT = "Once upon a time there was a king who had three sons. " * 3
GONE_S = 20.0
"""A quiet machine needs a second; what leaks stays for ever."""
EMPTY = ("requests", "requests alive", "requests of heads", "followed")
EMPTY_OF_NODE = ("requests of heads", "tasks of heads", "sequences")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="torch's operators do not promise the bits"
)


class Leaver:
    """A client with a connection of its own. It leaves after some tokens, or after some time, by
    its request or by its connection."""

    def __init__(self, address: str, chance: random.Random) -> None:
        self._address = address
        long = chance.random() < 0.5
        prompt: str | list[int] = TEXT
        if chance.random() < 0.8:
            prompt = [
                chance.randrange(*VOCABULARY)
                for _ in range(90 if long else chance.randrange(2, 30))
            ]
        options = GenerateOptions(max_new_tokens=NEW_TOKENS if long else 30, ignore_eos=True)
        if chance.random() < 0.5:
            options |= GenerateOptions(temperature=0.9, seed=chance.randrange(100))
        self._after_tokens = chance.choice((None, None, 0, 1, 2, chance.randrange(3, 28)))
        """None: by its time."""
        self._after_s = chance.uniform(0.0, 0.15)
        self._drops_connection = chance.random() < 0.3
        self.stream = Stream(DEPLOYMENT, prompt, options)

    async def visit(self, fault: asyncio.Event | None, after_fault_s: float) -> None:
        """If a node is to be lost, that happens first: the client leaves `after_fault_s` after
        it."""
        async with Client(self._address, plaintext=True) as client:
            reading = asyncio.create_task(
                self._read(client, None if fault is not None else self._after_tokens)
            )
            if fault is not None:
                await fault.wait()
                await asyncio.sleep(after_fault_s)
            elif self._after_tokens is None:
                await asyncio.sleep(self._after_s)
            else:
                await asyncio.wait([reading], timeout=GONE_S)
            if self._drops_connection:
                await client.close()
            reading.cancel()
            with suppress(asyncio.CancelledError, EdgeShardError):
                await reading

    async def _read(self, client: Client, most: int | None) -> None:
        async with aclosing(self.stream.follow(client)) as events:
            async for _ in events:
                if most is not None and len(self.stream.tokens) >= most:
                    return


async def leave(site: ChaosSite, chance: random.Random, count: int, lost_stage: int | None) -> None:
    """A group of clients joins and leaves; meanwhile a node is lost, once the first has a token,
    and recovers."""
    leavers = [Leaver(site.address, chance) for _ in range(count)]
    fault = asyncio.Event() if lost_stage is not None else None
    visits = [
        asyncio.create_task(leaver.visit(fault, chance.uniform(0.0, 0.6))) for leaver in leavers
    ]
    if fault is not None and lost_stage is not None:
        begun = [asyncio.create_task(leaver.stream.has(1)) for leaver in leavers]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        for task in begun:
            task.cancel()
        victim = (await site.stages())[lost_stage]
        await site.daemons[victim].kill()
        fault.set()
        await asyncio.gather(*visits)
        await site.start_daemon(victim)
    await asyncio.gather(*visits)


async def nothing_left(site: ChaosSite) -> float:
    """Seconds until no node holds KV and no process knows of a request. Raises AssertionError for
    what stays."""
    began, found = time.monotonic(), ["nobody answered"]

    async def gone() -> bool:
        nonlocal found
        of = await site.census(COORDINATOR)
        stays = [f"the coordinator has {of[what]} {what}" for what in EMPTY if of[what]]
        for name in site.nodes:
            of = await site.census(name)
            stays += [f"node {name} has {of[what]} {what}" for what in EMPTY_OF_NODE if of[what]]
        found = stays
        return not stays

    try:
        await site.until(gone, GONE_S)
    except TimeoutError:
        raise AssertionError("; ".join(found)) from None
    assert await Trials(site).nothing_left() == []
    return time.monotonic() - began


@pytest.mark.timeout(900)
@pytest.mark.long
async def test_clients_that_leave_at_any_point_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At their start, while their prompt is tokenised or computed, in mid answer, while a node is
    replaced."""
    chance, count = random.Random(11), int(os.environ.get(COUNT, in_form(60, 200)))
    async with ChaosSite(tmp_path) as site:
        await site.deploy()
        right = stream_of(Ask(3))
        await right.run(site.client)
        left = 0
        groups = 0
        kills = 0
        longest_s = 0.0

        async def ready() -> bool:
            return (await site.client.deployment(DEPLOYMENT)).phase is DeploymentPhase.READY

        while left < count:
            loses = groups % KILLS_EVERY == KILLS_EVERY - 1
            await leave(site, chance, min(GROUP, count - left), kills % STAGES if loses else None)
            left = left + GROUP
            groups = groups + 1
            kills = kills + loses
            if loses:
                await site.until(ready)
                longest_s = max(longest_s, await nothing_left(site))
        longest_s = max(longest_s, await nothing_left(site))
        again = stream_of(Ask(3))
        await again.run(site.client)
    assert check(again.events, reference_of(right.events)).problems == ()
    with capsys.disabled():
        say(
            f"\n{count} clients left, {kills} nodes were lost; all was gone after {longest_s:.1f} "
            "s at most"
        )
