"""Nodes whose memory is too small for the model: weights stream from the disk, and the tokens stay
the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage
from edgeshard.domain.errors import EdgeShardError, NotFoundError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.trace import aligned
from tests.support.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
MEMORY = "84MiB"
"""With a stage's needs besides its weights, this is too little for half of the demo model in
float32."""
PROMPTS = [
    "Once upon a time",
    "The old king had three sons",
    "In a wood there lived a fox who",
    '"Why," said',
]


def spec(**changes: object) -> DeploymentSpec:
    values = {
        "model": "tales",
        "source": "a",
        "dtype": "float32",
        "concurrency": 2,
        "max_context": 128,
    }
    return parse_spec({"name": "streamed", **values, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Two small nodes, which have measured themselves and their disks, and a larger one."""
    directory = tmp_path_factory.mktemp("streaming")
    memory = dict.fromkeys("ab", ("--memory", MEMORY))
    nodes = ("a", "b", "large")
    async with Site(
        directory, nodes, models={"tales": DEMO_MODEL}, arguments_by_agent=memory
    ) as site:
        async for _ in site.client.profile("tales", ["a", "b"], dtype=DType.FLOAT32, quick=True):
            pass
        yield site


async def answers(client: Client, name: str) -> list[tuple[int, ...]]:
    made = await asyncio.gather(
        *(client.complete(name, prompt, max_new_tokens=24) for prompt in PROMPTS)
    )
    return [answer.token_ids for answer in made]


async def test_it_streams_when_it_may_and_gives_the_same_tokens(site: Site) -> None:
    client = site.client
    await client.deploy(spec(name="whole", source="large", layers="large=0:12"))
    wanted = await answers(client, "whole")
    await client.delete_deployment("whole")
    with pytest.raises(EdgeShardError, match="with --allow-streaming it would run"):
        await client.deploy(spec(exclude=["large"]))
    for _ in range(2):  # the second time only from packed files
        deployment = await client.deploy(spec(exclude=["large"], allow_streaming=True))
        streaming = [stage for stage in deployment.placement.stages if stage.streamed_bytes]
        assert streaming and all(stage.weight_budget_bytes for stage in streaming)
        assert await answers(client, "streamed") == wanted

        async def reads_are_told(streaming: list[PlacedStage] = streaming) -> bool:
            """Nodes report in turns of a heartbeat. Guessed tokens that are right need no step of
            their own."""
            seen = (await client.deployment("streamed")).stages
            told = [status.streaming for status in seen if status.streaming is not None]
            assert len(told) == len(streaming)
            for status, stage in zip(told, streaming, strict=True):
                assert status.resident_bytes <= stage.weight_budget_bytes
            return all(status.read_bytes >= 12 * status.streamed_bytes for status in told)

        await site.until(reads_are_told)
        packed = list(site.cluster.directory.glob("*/cache/packed/*.packed"))
        assert packed
        await client.delete_deployment("streamed")


async def test_a_trace_has_the_reads_of_nodes_that_stream(site: Site) -> None:
    client = site.client
    deployment = await client.deploy(spec(exclude=["large"], allow_streaming=True))
    streaming = {stage.index for stage in deployment.placement.stages if stage.streamed_bytes}

    async def asked() -> None:
        while True:
            await answers(client, "streamed")

    busy = asyncio.create_task(asked())
    try:
        traces = aligned(await client.trace("streamed", 2.0))
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    assert {trace.stage for trace in traces if trace.reads} == streaming
    for trace in traces:
        first, last = trace.records[0].arrived_s, trace.records[-1].sent_s
        assert all(
            read.layer in range(trace.layers.first, trace.layers.end) for read in trace.reads
        )
        assert all(first - 5 < read.began_s <= read.ended_s < last + 5 for read in trace.reads), (
            "on the steps' clock"
        )
    await client.delete_deployment("streamed")


async def test_packed_units_are_seen_and_dropped_while_none_that_is_in_use_is(site: Site) -> None:
    client = site.client
    await client.deploy(spec(exclude=["large"], allow_streaming=True))
    wanted = await answers(client, "streamed")
    for name in "ab":
        units = await client.packed_units(name)
        used = [unit for unit in units if unit.in_use]
        assert used and {unit.model_name for unit in units} == {"tales"}
        files = {path.stem[-16:]: path.stat().st_size for path in _packed_files(site, name)}
        assert {unit.id: unit.size_bytes for unit in units} == files
        assert [unit.in_use for unit in await client.drop_packed(name, [used[0].id])] == [True]
        await client.drop_packed(name)
        assert await client.packed_units(name) == tuple(used)
    assert await answers(client, "streamed") == wanted
    await client.delete_deployment("streamed")
    dropped = await client.drop_packed("b")
    assert dropped and not any(unit.in_use for unit in dropped) and not _packed_files(site, "b")
    with pytest.raises(NotFoundError, match="node b"):
        await client.drop_packed("b", [dropped[0].id])
    await client.deploy(spec(exclude=["large"], allow_streaming=True))  # they are made again
    assert await answers(client, "streamed") == wanted and _packed_files(site, "b")
    await client.delete_deployment("streamed")


def _packed_files(site: Site, node: str) -> list[Path]:
    return sorted((site.cluster.directory / node).glob("cache/packed/*.packed"))


async def test_a_damaged_packed_file_is_made_again(site: Site) -> None:
    client, files = site.client, sorted(site.cluster.directory.glob("*/cache/packed/*.packed"))
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[-2048] ^= 1
        path.write_bytes(data)
    await client.deploy(spec(exclude=["large"], allow_streaming=True))
    assert len((await answers(client, "streamed"))[0]) == 24
    await client.delete_deployment("streamed")
