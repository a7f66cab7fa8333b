"""Two hundred streams of a real site at once: readers that are slow, that read nothing, and that
leave."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.http import Http, Stream
from tests.support.site import Site

pytestmark = [pytest.mark.timing, pytest.mark.asyncio(loop_scope="module")]

CLIENTS = 200
HOLDS = 4096
PATIENCE_S = 300.0
"""A quiet machine needs some seconds; what hangs would never come."""
MOST_GROWTH = 200 << 20
"""Bytes of the coordinator's memory, for all of them; they are a third of it on a quiet machine."""
ASKED: dict[str, Any] = {
    "model": "crowd", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0,
    "ignore_eos": True, "logprobs": 20, "stream": True,
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(site: Site) -> Http:
    """A deployment that admits this many requests, a quarter of them at once, and a key that may
    have them all."""
    spec = {
        "name": "crowd",
        "model": "fairy-tales",
        "source": "a",
        "dtype": "float32",
        "concurrency": CLIENTS // 4,
    }
    await site.client.deploy(parse_spec({**spec, "layers": "a=0:4,b=4:9,c=9:12"}))
    _, key = await site.client.create_key("crowd", requests=2 * CLIENTS, metrics=True)
    return Http(site.cluster.coordinator.gateway, key)


async def all_opened(http: Http, stack: AsyncExitStack, asked: dict[str, Any]) -> list[Stream]:
    opening = (
        stack.enter_async_context(http.opened("POST", "/v1/completions", asked, holds=HOLDS))
        for _ in range(CLIENTS)
    )
    streams = await asyncio.gather(*opening)
    assert {stream.status for stream in streams} == {200}
    return streams


async def read_slowly(stream: Stream) -> str:
    """The text of the answer, whose events all arrived."""
    data = b""
    async for part in stream.parts():
        data += part
        await asyncio.sleep(0.005)
    # The gateway sends a comment if an answer pauses.
    lines = data.decode().split("\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


def resident(site: Site) -> int:
    """Bytes of the coordinator's memory, which has the gateway."""
    status = Path(f"/proc/{site.cluster.coordinator.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


async def active(site: Site) -> int:
    return (await site.client.deployment("crowd")).active_requests


@pytest.mark.long
async def test_slow_readers_get_all_and_hold_up_nobody(site: Site, crowd: Http) -> None:
    whole = (await crowd.post("/v1/completions", {**ASKED, "stream": False})).json["choices"][0][
        "text"
    ]
    before = resident(site)
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        streams = await all_opened(crowd, stack, ASKED)
        # No client reads, and all are computed: slots and KV wait for no reader.
        await site.until(lambda: _nothing_runs(site), PATIENCE_S)
        await site.kv_gone()
        assert resident(site) - before < MOST_GROWTH
        other = await crowd.post("/v1/completions", {**ASKED, "stream": False})
        assert other.json["choices"][0]["text"] == whole
        texts = await asyncio.gather(*map(read_slowly, streams))
    assert set(texts) == {whole}
    assert resident(site) - before < MOST_GROWTH


async def test_readers_that_leave_end_their_requests(site: Site, crowd: Http) -> None:
    before = await generated(crowd)
    asked = {**ASKED, "max_tokens": 400, "logprobs": None}
    async with asyncio.timeout(PATIENCE_S):
        async with AsyncExitStack() as stack:
            await all_opened(crowd, stack, asked)
            assert await active(site) > 0
        await site.until(lambda: _nothing_runs(site), PATIENCE_S)
    await site.kv_gone()
    assert await generated(crowd) - before < CLIENTS * 400, (
        "tokens of answers that came to their end"
    )


async def _nothing_runs(site: Site) -> bool:
    return await active(site) == 0


async def generated(http: Http) -> float:
    text = (await http.get("/metrics")).body.decode()
    found = re.search(r'^edgeshard_http_tokens_total{kind="generated"} (\S+)$', text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])
