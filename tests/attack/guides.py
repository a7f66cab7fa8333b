"""A guide of a few bytes that costs more for each token than the model does. For sites of one's own
on loopback."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from edgeshard.client import Client
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.generation import Guide, GuideKind
from edgeshard.rpc.tls import TlsFiles

GRAMMAR = "start: a\na: a a a | a a | /[a-zA-Z ,.]/"
"""A text of it has ever more parses, and each token is tried against all of them."""
FINISHED = "FINISHED"


async def ambiguous(
    address: str,
    files: TlsFiles,
    model: str,
    *,
    at_once: int = 20,
    tokens: int = 250,
    seconds: float = 30.0,
) -> Counter[str]:
    """Ask for answers of `tokens` tokens of that grammar, `at_once` at a time, until the time is
    over; how many were finished, and why the others were refused."""
    met: Counter[str] = Counter()
    guide = Guide(GuideKind.GRAMMAR, GRAMMAR)

    async def again_and_again(client: Client) -> None:
        while True:
            try:
                await client.complete(model, "Once upon a time", max_new_tokens=tokens, guide=guide)
                met[FINISHED] += 1
            except EdgeShardError as error:
                met[error.reason or type(error).__name__] += 1
                await asyncio.sleep(0.1)

    async with Client(address, files) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(again_and_again(client) for _ in range(at_once)))
    return met
