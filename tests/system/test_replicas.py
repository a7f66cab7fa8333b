"""Several pipelines under one name: requests are spread over them, and a lost one costs no
token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase, parse_spec
from edgeshard.domain.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from edgeshard.domain.requests.generation import GenerateOptions
from tests.support.checker import Reference
from tests.support.load import Stream, whole_answer
from tests.support.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = {
    "name": "tales",
    "model": "tiny-tales",
    "dtype": "float32",
    "replicas": 2,
    "concurrency": 4,
    "max_context": 256,
}
PROMPTS = tuple(
    f"Once upon a time there was a king who had {count} sons"
    for count in ("two", "three", "five", "six")
)
NEW_TOKENS = 120


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Two nodes, each with a replica of its own."""
    directory = tmp_path_factory.mktemp("replicas")
    async with Site(directory, ("a", "b"), models={"tiny-tales": DEMO_MODEL}) as site:
        await site.client.deploy(parse_spec(SPEC))
        yield site


def asked(prompt: str) -> Stream:
    return Stream(
        "tales", prompt, GenerateOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True, timeout_s=60)
    )


async def begun(client: Client) -> list[asyncio.Task[Reference]]:
    """A running answer to each prompt, each of which has some tokens."""
    streams = [asked(prompt) for prompt in PROMPTS]
    running = [asyncio.create_task(whole_answer(client, stream)) for stream in streams]
    for stream in streams:
        await stream.has(5)
    return running


async def by_name(client: Client) -> dict[str, Deployment]:
    return {found.spec.name: found for found in await client.deployments()}


async def all_ready(client: Client) -> bool:
    found = await by_name(client)
    return len(found) == 2 and all(one.phase is DeploymentPhase.READY for one in found.values())


async def test_requests_are_spread_over_replicas_on_nodes_of_their_own(site: Site) -> None:
    """Each serves half of them, clients see one name, and operators each replica."""
    found = await by_name(site.client)
    nodes = [[stage.node_name for stage in one.placement.stages] for one in found.values()]
    assert list(found) == ["tales.1", "tales.2"] and sorted(nodes) == [["a"], ["b"]]
    running = await begun(site.client)
    assert [one.active_requests for one in (await by_name(site.client)).values()] == [2, 2]
    await asyncio.gather(*running)
    assert [model.deployment for model in await site.client.served_models()] == ["tales"]
    assert (await site.client.deployment("tales")).spec.name == "tales.1"


async def test_a_lost_replica_costs_no_token_and_the_other_goes_on(site: Site) -> None:
    """For either replica: its requests continue at the other, whose epoch stays."""
    running = await begun(site.client)
    undisturbed = await asyncio.gather(*running)
    for victim in ("b", "a"):
        before = await by_name(site.client)
        running = await begun(site.client)
        await site.cluster.agents[victim].kill()
        assert await asyncio.gather(*running) == undisturbed
        after = await by_name(site.client)
        for name, one in before.items():
            lost = one.placement.head.node_name == victim
            assert (after[name].phase is DeploymentPhase.READY) != lost
            assert lost or after[name].epoch == one.epoch
        assert await whole_answer(site.client, asked(PROMPTS[0])) == undisturbed[0]
        await site.cluster.start_agent(victim)
        await site.until(partial(all_ready, site.client))


async def test_a_coordinator_that_is_killed_ends_no_answer_of_either_replica(site: Site) -> None:
    """Clients come back to the replica that has their request, and nothing is prepared again."""
    running = await begun(site.client)
    undisturbed = await asyncio.gather(*running)
    epochs = [one.epoch for one in (await by_name(site.client)).values()]
    running = await begun(site.client)
    site.cluster.coordinator.keep_address()
    await site.cluster.coordinator.kill()
    await site.cluster.start_coordinator()
    assert await asyncio.gather(*running) == undisturbed
    assert [one.epoch for one in (await by_name(site.client)).values()] == epochs


async def test_a_replica_that_was_deleted_comes_back_beside_the_other(site: Site) -> None:
    """As `edgectl apply` requests it: on a node of its own, and requests go to both again."""
    before = await by_name(site.client)
    with pytest.raises(AlreadyExistsError):
        await site.client.deploy(replace(before["tales.2"].spec, source=""))
    await site.client.delete_deployment("tales.2")
    assert [one.spec.name for one in await site.client.replicas("tales")] == ["tales.1"]
    with pytest.raises(FailedPreconditionError, match="concurrency"):
        await site.client.deploy(replace(before["tales.2"].spec, source="", concurrency=9))
    restored = await site.client.deploy(replace(before["tales.2"].spec, source=""))
    assert restored.spec.name == "tales.2" and restored.phase is DeploymentPhase.READY
    after = await by_name(site.client)
    assert (
        after["tales.1"].epoch == before["tales.1"].epoch
        and after["tales.2"].epoch > before["tales.2"].epoch
    )
    assert {one.placement.head.node_name for one in after.values()} == {"a", "b"}
    running = await begun(site.client)
    assert [one.active_requests for one in (await by_name(site.client)).values()] == [2, 2]
    await asyncio.gather(*running)


async def test_one_name_is_deployed_moved_and_deleted_as_one(site: Site) -> None:
    with pytest.raises(AlreadyExistsError):
        await site.client.deploy(parse_spec({**SPEC, "replicas": 1}))
    with pytest.raises(InvalidArgumentError, match="the coordinator numbers replicas"):
        await site.client.deploy(parse_spec({**SPEC, "name": "other", "replica": 1}))
    with pytest.raises(InvalidArgumentError, match=r"name one of tales\.1, tales\.2"):
        await site.client.replan("tales", dry_run=True)
    await site.client.delete_deployment("tales")
    assert not await site.client.deployments()
    with pytest.raises(NotFoundError):
        await site.client.deployment("tales")
