"""A model whose layers keep states of requests, over real nodes: its tokens equal transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import Deployment, parse_spec
from edgeshard.domain.nodes.device import StageSwap
from tests.support.hybrids import likeliest, save_hybrid
from tests.support.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = [[5, 7, 9, 11, 13, 2], [3, 3, 8], [40, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
NEW_TOKENS = 10
SPEC = {
    "model": "hybrid",
    "source": "a",
    "layers": "a=0:1,b=1:4",
    "dtype": "float32",
    "max_context": 128,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("hybrid")
    return directory, save_hybrid(directory, max_position_embeddings=128)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory, model: Any) -> AsyncIterator[Client]:
    async with Site(
        tmp_path_factory.mktemp("site"), ("a", "b"), models={"hybrid": model[0]}
    ) as site:
        yield site.client


async def deploy(client: Client, name: str, **values: object) -> Deployment:
    return await client.deploy(parse_spec({"name": name, **SPEC, **values}), timeout_s=60)


def assert_likeliest(
    model: Any, prompts: list[list[int]], answers: list[list[int]], new_tokens: int
) -> None:
    assert [len(answer) for answer in answers] == [new_tokens] * len(prompts)
    assert answers == [
        likeliest(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)
    ]


async def tokens_done(client: Client) -> list[int]:
    """Positions that each stage has run, as its node reports them from now on."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        ages = [node.heartbeat_age_s for node in await client.nodes()]
        if max(ages) < clock() - began:
            break
        await asyncio.sleep(0.05)
    return [stage.tokens_done for stage in (await client.deployment("tight")).stages]


async def test_a_hybrid_over_two_nodes_gives_the_tokens_of_transformers(
    client: Client, model: Any
) -> None:
    await deploy(client, "plain", concurrency=4)
    ways = [
        client.complete("plain", prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for prompt in PROMPTS
    ]
    found = [list(answer.token_ids) for answer in await asyncio.gather(*ways)]
    await client.delete_deployment("plain")
    assert_likeliest(model[1], PROMPTS, found, NEW_TOKENS)


async def swaps(client: Client) -> list[StageSwap | None]:
    return [stage.swap for stage in (await client.deployment("tight")).stages]


@pytest.mark.parametrize("swap_bytes", [0, 64 << 20], ids=["run again", "swapped"])
async def test_requests_that_begin_alike_and_give_way_get_the_tokens_of_transformers(
    client: Client, model: Any, swap_bytes: int
) -> None:
    """Four conversations in memory for two, each of two turns: the second one begins at the saved
    states of the first.
    """
    options = {
        "concurrency": 2,
        "kv_overcommit": True,
        "prefix_cache": True,
        "kv_swap_bytes": swap_bytes,
    }
    deployment = await deploy(client, "tight", **options)
    assert deployment.placement.saved_states > 0
    prompts = [[*range(1, 34), number] for number in range(4)]
    for _ in range(2):
        ways = [
            client.complete("tight", prompt, max_new_tokens=40, ignore_eos=True)
            for prompt in prompts
        ]
        found = [list(answer.token_ids) for answer in await asyncio.gather(*ways)]
        assert_likeliest(model[1], prompts, found, 40)
        prompts = [
            [*prompt, *answer[:5], 50] for prompt, answer in zip(prompts, found, strict=True)
        ]

    async with asyncio.timeout(30):  # nodes say so once a second
        while not all(  # noqa: ASYNC110
            (one is not None and one.swapped_in > 0) == (swap_bytes > 0)
            for one in await swaps(client)
        ):
            await asyncio.sleep(0.1)
    prompt = prompts[0]
    assert len(prompt) == 46
    before = await tokens_done(client)
    for run in (46 + 1, 46 - 32 + 1):  # at most; of the second time the first two blocks are there
        answer = await client.complete("tight", prompt, max_new_tokens=2, ignore_eos=True)
        assert_likeliest(model[1], [prompt], [list(answer.token_ids)], 2)
        now = await tokens_done(client)
        assert all(new - old <= run for new, old in zip(now, before, strict=True))
        before = now
    await client.delete_deployment("tight")
