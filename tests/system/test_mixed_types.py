"""A GGUF file of mixed types over three nodes: the tokens and the bits of one node, whichever node
dies, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.requests.generation import GenerateOptions, Token
from tests.support.gguf_files import mixed, write_demo_gguf
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]
NODES = ("a", "b", "c", "d")
SPEC = {"name": "mixed", "model": "mixed", "source": "a", "concurrency": 4, "max_context": 64}
CUT = "a=0:4,b=4:9,c=9:12"
PROMPTS = [[5, 7, 9, 11, 13, 2], [3, 3, 8], list(range(20, 45)), [40, 1]]
NEW_TOKENS = 12
Bits = list[tuple[int, float]]
"""Each token of an answer and its log-probability."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    file = write_demo_gguf(tmp_path_factory.mktemp("file") / "mixed.gguf", mixed)
    directory = tmp_path_factory.mktemp("site")
    async with Site(directory, NODES, models={"mixed": file}) as site:
        yield site


async def answer(client: Client, prompt: list[int]) -> Bits:
    """The greedy answer."""
    return [bits async for bits in tokens(client, prompt)]


async def tokens(client: Client, prompt: list[int]) -> AsyncIterator[tuple[int, float]]:
    options: GenerateOptions = {
        "max_new_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "logprobs": True,
        "timeout_s": 60,
    }
    async for event in client.generate("mixed", prompt, **options):
        if isinstance(event, Token):
            yield event.token, event.logprob


async def answers(client: Client) -> list[Bits]:
    """All prompts at once."""
    return list(await asyncio.gather(*(answer(client, prompt) for prompt in PROMPTS)))


async def disturbed(site: Site, kill_at: int) -> Bits:
    """The first prompt's answer, during which a node dies after `kill_at` tokens. It is back at the
    end."""
    stages = (await site.client.deployment("mixed")).placement.stages
    victim = stages[kill_at % len(stages)].node_name
    found: Bits = []
    async for bits in tokens(site.client, PROMPTS[0]):
        found.append(bits)
        if len(found) == kill_at:
            await site.cluster.agents[victim].kill()
    await site.cluster.start_agent(victim)

    async def ready() -> bool:
        nodes = await site.client.nodes()
        phase = (await site.client.deployment("mixed")).phase
        return all(node.placeable for node in nodes) and phase is DeploymentPhase.READY

    await site.until(ready)
    return found


@pytest.mark.timeout(300)
async def test_three_nodes_give_the_bits_of_one_and_a_death_at_any_token_changes_none(
    site: Site,
) -> None:
    await site.client.deploy(parse_spec(SPEC | {"layers": "a=0:12"}), timeout_s=60)
    one_node = [await answer(site.client, prompt) for prompt in PROMPTS]
    assert await answers(site.client) == one_node, (
        "a batch has other bits than its requests one by one"
    )
    await site.client.delete_deployment("mixed")

    await site.client.deploy(parse_spec(SPEC | {"layers": CUT}), timeout_s=60)
    assert [await answer(site.client, prompt) for prompt in PROMPTS] == one_node
    assert await answers(site.client) == one_node
    for kill_at in range(1, NEW_TOKENS):
        assert await disturbed(site, kill_at) == one_node[0], f"killed after {kill_at} tokens"
