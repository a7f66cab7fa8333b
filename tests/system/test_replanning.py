"""A node that joins in the middle of answers, and gets layers: every request continues, and no
token changes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard.client import Client
from edgeshard.domain.control.site import ReplanReason
from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.errors import AbortedError
from edgeshard.domain.requests.generation import GenerateOptions
from tests.support.checker import Reference
from tests.support.load import Stream, whole_answer
from tests.support.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = {
    "name": "tales",
    "model": "tiny-tales",
    "source": "a",
    "dtype": "float32",
    "concurrency": 2,
    "max_context": 256,
}
SMALL, LARGE = "100MiB", "108MiB"
"""Memory of a node: less than the whole model needs; and more, so that it is preferred."""
PROMPT = "Once upon a time there was a king who had three sons"
TOKENS = 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Two nodes with a deployment that takes both, and memory for it on c and one of them."""
    directory = tmp_path_factory.mktemp("replanning")
    memory = {name: ("--memory", size) for name, size in (("a", SMALL), ("b", SMALL), ("c", LARGE))}
    async with Site(
        directory, ("a", "b"), models={"tiny-tales": DEMO_MODEL}, arguments_by_agent=memory
    ) as site:
        await site.client.deploy(parse_spec(SPEC))
        yield site


def asked() -> Stream:
    return Stream(
        "tales", PROMPT, GenerateOptions(max_new_tokens=TOKENS, ignore_eos=True, timeout_s=120)
    )


async def answers_until(
    client: Client, over: asyncio.Event, streams: list[Stream]
) -> list[Reference]:
    """Answers one right after the other, so that all that happens is amid one of `streams`."""
    answers = []
    while not over.is_set():
        streams.append(asked())
        answers.append(await whole_answer(client, streams[-1]))
    return answers


async def layers(client: Client) -> dict[str, str]:
    placement = (await client.deployment("tales")).placement
    return {str(stage.node_name): str(stage.layers) for stage in placement.stages}


async def joined(site: Site) -> None:
    """Node c is there and may get layers."""
    await site.cluster.start_agent("c")

    async def placeable() -> bool:
        return [node.name for node in await site.client.nodes() if node.placeable] == [
            "a",
            "b",
            "c",
        ]

    await site.until(placeable)


async def test_a_node_that_dies_while_it_loads_sends_the_deployment_back(site: Site) -> None:
    client = site.client
    before = await layers(client)
    assert before == {"a": "0:6", "b": "6:12"}
    assert (await client.replan("tales", dry_run=True)).reason is ReplanReason.NOTHING_NEW
    undisturbed = await whole_answer(client, asked())
    await joined(site)
    stream = asked()
    running = asyncio.create_task(whole_answer(client, stream))
    await stream.has(5)
    # It still counts as connected, and cannot load.
    site.cluster.agents["c"].send_signal(signal.SIGSTOP)
    moving = asyncio.create_task(client.replan("tales", force=True))

    async def loading() -> bool:
        return (await client.deployment("tales")).phase is DeploymentPhase.LOADING

    await site.until(loading)
    await site.cluster.agents["c"].kill()
    with pytest.raises(AbortedError) as caught:
        await moving
    # Node a, whose layers move on to c, may first report that it cannot reach it.
    said = caught.value.message
    assert caught.value.reason == "NOT_MOVED" and (
        "node c disconnected" in said or "a node failed" in said
    )
    assert await layers(client) == before
    assert await running == undisturbed


async def test_a_node_that_joins_amid_answers_gets_layers_and_no_token_changes(site: Site) -> None:
    client = site.client
    undisturbed = await whole_answer(client, asked())
    joining = asyncio.create_task(joined(site))
    while not joining.done():
        assert await whole_answer(client, asked()) == undisturbed
    await joining
    moved = asyncio.Event()
    streams: list[Stream] = []
    running = asyncio.create_task(answers_until(client, moved, streams))
    await site.until(lambda: streams)
    await streams[0].has(5)
    done = await client.replan("tales", force=True, wait=False)
    assert done.changed

    async def ready() -> bool:
        return (await client.deployment("tales")).phase is DeploymentPhase.READY

    await site.until(ready)
    assert await layers(client) == {"a": "0:6", "c": "6:12"}
    moved.set()
    for answered in await running:
        assert answered == undisturbed
    assert await whole_answer(client, asked()) == undisturbed
    await site.kv_gone()
    stays = await edgectl(site, "replan", "tales", "--force", "-o", "json")
    assert '"changed": false' in stays and '"reason": "SAME_LAYERS"' in stays


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
