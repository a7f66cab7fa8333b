"""A node with too little memory for a mixture's experts caches some and reads the others. The
tokens stay the same."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.device import StageStatus
from edgeshard.domain.requests.trace import aligned
from tests.support.site import Site

# The quick form has the cache of experts in tests/agent/experts.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]
MIXTURE = Path(__file__).resolve().parents[2] / "bench" / "mixture_model"
LAYERS, EXPERTS = 8, 16
MEMORY = "96MiB"
"""Enough for everything except the experts, and for about half of these, with a stage's needs
besides its weights."""
PROMPTS = ["Once upon a time", "The old king had three sons", "In a wood there lived a fox who"]
TOKENS = 16


def spec(**changes: object) -> DeploymentSpec:
    values = {
        "model": "mixture",
        "source": "small",
        "dtype": "float32",
        "concurrency": 2,
        "max_context": 128,
    }
    return parse_spec({"name": "cached", **values, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A small node, which has measured itself and its disk, and a large one."""
    directory, memory = tmp_path_factory.mktemp("experts"), {"small": ("--memory", MEMORY)}
    nodes = ("small", "large")
    async with Site(
        directory, nodes, models={"mixture": MIXTURE}, arguments_by_agent=memory
    ) as site:
        async for _ in site.client.profile("mixture", ["small"], dtype=DType.FLOAT32, quick=True):
            pass
        yield site


async def answers(client: Client, name: str) -> list[tuple[int, ...]]:
    made = await asyncio.gather(
        *(client.complete(name, prompt, max_new_tokens=TOKENS) for prompt in PROMPTS)
    )
    return [answer.token_ids for answer in made]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wanted(site: Site) -> list[tuple[int, ...]]:
    """The tokens of a node with all experts in memory."""
    await site.client.deploy(spec(name="whole", source="large", layers=f"large=0:{LAYERS}"))
    found = await answers(site.client, "whole")
    await site.client.delete_deployment("whole")
    return found


async def told(site: Site) -> StageStatus:
    """The only stage, once its node has reported that steps needed experts."""

    async def needed() -> bool:
        stages = (await site.client.deployment("cached")).stages
        return bool(stages) and stages[0].experts is not None and stages[0].experts.hits > 0

    await site.until(needed)
    return (await site.client.deployment("cached")).stages[0]


async def test_it_is_offered_and_gives_the_same_tokens(
    site: Site, wanted: list[tuple[int, ...]]
) -> None:
    client = site.client
    with pytest.raises(
        EdgeShardError,
        match=r"with --allow-streaming it would run: small holds .* of experts and reads",
    ):
        await client.deploy(spec(exclude=["large"]))
    for _ in range(2):  # the second time only from packed files
        deployment = await client.deploy(spec(exclude=["large"], allow_streaming=True))
        (placed,) = deployment.placement.stages
        assert "MB of experts and reads the others" in deployment.placement.note
        assert await answers(client, "cached") == wanted
        status = await told(site)
        experts = status.experts
        assert experts is not None and status.streaming is None
        assert experts.hits and experts.misses and experts.read_bytes and experts.waited_s > 0
        assert 0 < experts.cached_bytes <= experts.room_bytes < experts.total_bytes
        assert placed.streamed_bytes == experts.total_bytes - experts.room_bytes, (
            "the plan knows what the agent does"
        )
        assert (
            len(list(site.cluster.directory.glob("small/cache/packed/*expert*")))
            >= LAYERS * EXPERTS
        )
        await client.delete_deployment("cached")


async def described(address: str) -> str:
    """The output of edgectl about the deployment."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgeshard.cli.main", "--coordinator", address,
        "describe", "deployment", "cached", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return stdout.decode()


async def test_describe_and_trace_show_the_cache(site: Site) -> None:
    client = site.client
    await client.deploy(spec(exclude=["large"], allow_streaming=True))

    async def asked() -> None:
        while True:
            await answers(client, "cached")

    busy = asyncio.create_task(asked())
    try:
        (trace,) = aligned(await client.trace("cached", 2.0))
        await told(site)
        shown = await described(site.cluster.address)
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    assert trace.reads and {read.layer for read in trace.reads} <= set(range(LAYERS))
    assert all(read.expert in range(EXPERTS) for read in trace.reads), "no layer passes"
    first, last = trace.records[0].arrived_s, trace.records[-1].sent_s
    assert all(first - 5 < read.began_s <= read.ended_s < last + 5 for read in trace.reads), (
        "on the steps' clock"
    )
    lines = shown.splitlines()
    (header,) = [number for number, line in enumerate(lines) if "HIT RATE" in line]
    assert lines[header + 1].split()[0] == "small" and " %" in lines[header + 1]
    await client.delete_deployment("cached")


@pytest.mark.long
async def test_experts_that_were_damaged_meanwhile_are_made_again(
    site: Site, wanted: list[tuple[int, ...]]
) -> None:
    client = site.client
    await client.deploy(spec(exclude=["large"], allow_streaming=True))
    epoch = (await client.deployment("cached")).epoch
    files = sorted(site.cluster.directory.glob("small/cache/packed/*layer-0-expert-*"))
    assert len(files) == EXPERTS, "of which the first step needs some, and none is in memory yet"
    for path in files:
        with path.open("r+b") as file:
            file.seek(-2048, 2)
            file.write(bytes(1024))
    assert await answers(client, "cached") == wanted
    assert (await client.deployment("cached")).epoch > epoch, "the stage was loaded anew"
    await client.delete_deployment("cached")
