"""KV that is taken from a request, put aside on every stage and given back: the answer is as if
nothing had been."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard.client import Client, Completion
from edgeshard.domain.deployments.deployment import Deployment
from tests.support.site import MakeSpec, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
STORIES = (
    "Once upon a time Zyxomoravian quokkas met a king",
    "The old king of Quetzelbrunn had three sons",
    "In a wood there lived a fox whom they called Wimpelthrop",
    '"Why," said the Ostrogander, "do you weep?"',
)
NEW = 150
CONTEXT = 192
"""The memory is for two requests of CONTEXT tokens: four that grow to nearly that number do not
fit."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Three nodes that log everything."""
    said = ("--log-level", "debug")
    directory, models = tmp_path_factory.mktemp("swap"), {"fairy-tales": DEMO_MODEL}
    async with Site(
        directory, models=models, agent_arguments=said, coordinator_arguments=said
    ) as site:
        yield site


async def answers(client: Client, name: str) -> list[Completion]:
    """All at once."""
    asked = (client.complete(name, story, max_new_tokens=NEW, ignore_eos=True) for story in STORIES)
    return list(await asyncio.gather(*asked))


async def heard_since(site: Site, name: str) -> Deployment:
    """The deployment, as every node reports it from now on."""
    await site.reported()
    return await site.client.deployment(name)


def files_aside(site: Site) -> dict[str, list[os.stat_result]]:
    """The unnamed files that each node's agent has open in its state directory, and their
    content."""
    found: dict[str, list[os.stat_result]] = {}
    for name, agent in site.cluster.agents.items():
        descriptors = Path(f"/proc/{agent.pid}/fd")
        for path in descriptors.iterdir():
            try:
                target = str(path.readlink())
                known = path.stat()
            except FileNotFoundError:  # closed meanwhile
                continue
            if (
                target.startswith(str(site.cluster.directory / name))
                and target.endswith("(deleted)")
                and known.st_size
            ):
                found.setdefault(name, []).append(known)
    return found


@pytest.mark.long
@pytest.mark.parametrize("on_disk", [True, False])
async def test_a_request_that_gave_way_goes_on_where_it_was(
    site: Site, make_spec: MakeSpec, on_disk: bool
) -> None:
    client = site.client
    await client.deploy(make_spec(name="whole", max_context=CONTEXT))
    wanted = await answers(client, "whole")
    await client.delete_deployment("whole")
    spec = make_spec(
        name="swapped",
        max_context=CONTEXT,
        concurrency=2,
        kv_overcommit=True,
        kv_swap_bytes=64 << 20,
        kv_swap_on_disk=on_disk,
        speculation="off",  # a guess may be a position that is run twice
    )
    await client.deploy(spec)
    asked = asyncio.create_task(answers(client, "swapped"))
    files: dict[str, list[os.stat_result]] = {}
    while not asked.done():
        for name, opened in files_aside(site).items():
            files.setdefault(name, []).extend(opened)
        await asyncio.sleep(0.005)
    found = await asked
    assert [done.token_ids for done in found] == [done.token_ids for done in wanted]

    computed = sum(len(done.prompt_token_ids) + NEW - 1 for done in wanted)

    async def told() -> bool:  # a heartbeat that was in flight at the last token reports less
        return all(
            stage.tokens_done >= computed for stage in (await client.deployment("swapped")).stages
        )

    await site.until(told)
    stages = (await heard_since(site, "swapped")).stages
    assert [stage.tokens_done for stage in stages] == [computed] * 3, "no position was run twice"
    swaps = [stage.swap for stage in stages]
    assert all(
        swap is not None and swap.swapped_out == swap.swapped_in > 0 == swap.kept_bytes
        for swap in swaps
    )
    assert len({(swap.swapped_out, swap.swapped_in) for swap in swaps if swap is not None}) == 1, (
        "on every stage"
    )

    assert set(files) == ({"a", "b", "c"} if on_disk else set())
    for opened in files.values():
        assert all((stat.S_IMODE(file.st_mode), file.st_nlink) == (0o600, 0) for file in opened)
    assert files_aside(site) == {}
    await client.delete_deployment("swapped")
    for log in site.cluster.directory.glob("*.log"):
        text = log.read_text()
        assert not any(
            word in text for story in STORIES for word in story.split() if len(word) > 8
        ), log.name
        assert not any(done.text in text for done in wanted)
