"""A model returns to the nodes that keep it packed, and loading it there is reading their files."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edgeshard.client import Client
from edgeshard.domain.control.commands import ProfileReport
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import LinkProfile, MeasuredLink
from edgeshard.proto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from edgeshard.rpc.channel import open_channel
from edgeshard.wire.control import report_to_wire
from tests.support.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
BLOCK_S = {"a": 0.4, "b": 0.1, "c": 0.102}
"""The source is so slow that the best plan leaves it one layer; c is hardly slower than b."""
PROMPT = "Once upon a time there was a king"


def spec(**changes: object) -> DeploymentSpec:
    values = {
        "name": "tales",
        "model": "tales",
        "source": "a",
        "dtype": "float32",
        "max_context": 128,
    }
    return parse_spec({"objective": "latency", **values, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory, make_profile: Any) -> AsyncIterator[Site]:
    """Three nodes that report invented measurements, so that every run plans the same."""
    directory = tmp_path_factory.mktemp("locality")
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    async with Site(directory, models={"tales": DEMO_MODEL}) as site:
        nodes = {str(node.name): node.node_id for node in await site.client.nodes()}
        channel = open_channel(site.address, None)
        for name, seconds in BLOCK_S.items():
            report = ProfileReport(
                nodes[name],
                compute=(make_profile(config, seconds, DType.FLOAT32),),
                links=tuple(
                    MeasuredLink(
                        nodes[name], nodes[other], LinkProfile(1e-4, 1e10, 0.0, 9, 1 << 20)
                    )
                    for other in nodes
                    if other != name
                ),
            )
            await CoordinatorServiceStub(channel).ReportProfile(report_to_wire(report))
        await channel.close()
        yield site


async def layers(client: Client, wanted: DeploymentSpec) -> dict[str, str]:
    return {str(stage.node_name): str(stage.layers) for stage in (await client.plan(wanted)).stages}


def stored(site: Site, node: str, what: str) -> list[Path]:
    return sorted((site.cluster.directory / node / "cache" / what).rglob("*"))


async def edgectl(site: Site, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        "--coordinator",
        site.cluster.address,
        "--plaintext",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_a_model_comes_back_to_the_nodes_that_hold_it_and_they_only_read(site: Site) -> None:
    client = site.client
    best, here = {"a": "0:1", "b": "1:12"}, {"a": "0:1", "c": "1:12"}
    assert await layers(client, spec()) == best, "nobody holds anything"
    await client.deploy(spec(layers="a=0:1,c=1:12"))
    answer = await client.complete("tales", PROMPT, max_new_tokens=24)
    await client.delete_deployment("tales")

    async def comes_back() -> bool:
        return await layers(client, spec()) == here

    await site.until(comes_back)
    told = await edgectl(
        site,
        "plan",
        "--model",
        "tales",
        "--source",
        "a",
        "--dtype",
        "float32",
        "--objective",
        "latency",
    )
    assert "c holds layers 1:12 packed: chosen over a=0:1,b=1:12, " in " ".join(told.split())
    packed = {node: stored(site, node, "packed") for node in "ac"}
    assert all(packed.values()) and not stored(site, "b", "packed")
    for node in "ac":
        shutil.rmtree(site.cluster.directory / node / "cache" / "blobs")
    deployment = await client.deploy(spec())
    assert {
        str(stage.node_name): str(stage.layers) for stage in deployment.placement.stages
    } == here
    note = deployment.placement.note
    assert "c holds layers 1:12 packed: chosen over a=0:1,b=1:12, 1." in note and "% slower" in note
    assert {node: stored(site, node, "packed") for node in "ac"} == packed
    small = {sha256(path.read_bytes()).hexdigest() for path in DEMO_MODEL.glob("*.json")}
    for node in "ac":
        fetched = {path.name for path in stored(site, node, "blobs") if path.is_file()}
        assert fetched <= small, f"{node} fetched what lies packed there"
    assert (await client.complete("tales", PROMPT, max_new_tokens=24)).token_ids == answer.token_ids
    await client.delete_deployment("tales")


async def test_where_the_files_are_gone_the_best_plan_is_taken_again(site: Site) -> None:
    assert await site.client.drop_packed("c")

    async def best() -> bool:
        return await layers(site.client, spec()) == {"a": "0:1", "b": "1:12"}

    await site.until(best)
