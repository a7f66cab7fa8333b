"""A node that stands by takes a lost stage's layers from its memory: nothing is fetched, and no
token changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import native_available

from edgeshard.domain.ids import NodeName
from edgeshard.domain.nodes.device import StagePhase
from tests.chaos.matrix import Ask
from tests.chaos.site import DEPLOYMENT, ChaosSite
from tests.chaos.trial import stream_of
from tests.support.checker import check, reference_of
from tests.support.forms import one_in
from tests.support.load import Stream

pytestmark = pytest.mark.skipif(
    not native_available(), reason="torch's operators do not promise the bits"
)


async def standbys(site: ChaosSite) -> dict[NodeName, str]:
    """The layers that nodes keep for others, if all of them are in memory."""
    return {
        node.name: str(stage.layers)
        for node in await site.client.nodes()
        for stage in node.stages
        if stage.phase is StagePhase.STANDBY and stage.parameter_bytes
    }


def blobs(site: ChaosSite, name: str) -> set[Path]:
    return {
        file
        for file in (site.directory / name).rglob("*")
        if file.is_file() and "blobs" in file.parts
    }


async def answer(site: ChaosSite, victim: str = "") -> Stream:
    stream = stream_of(Ask(3))
    running = asyncio.create_task(stream.run(site.client))
    if victim:
        await stream.has(8)
        await site.daemons[victim].kill()
    await asyncio.wait_for(running, 60)
    return stream


@pytest.mark.parametrize("victim", one_in(2, ["a", "b"]))
async def test_a_lost_stage_is_taken_from_memory(tmp_path: Path, victim: str) -> None:
    async with ChaosSite(tmp_path) as site:
        await site.deploy(standby=["auto"])

        async def warm() -> bool:
            return await standbys(site) == {"d": "0:12"}

        await site.until(warm, 30)
        losses = (await site.client.deployment(DEPLOYMENT, outlook=True)).outlook.losses  # type: ignore[union-attr]
        assert {loss.node: (loss.warm, loss.taken_by[0].node) for loss in losses} == dict.fromkeys(
            ("a", "b", "c"), (True, "d")
        )
        wanted = reference_of((await answer(site)).events)
        for file in blobs(site, "d"):
            file.unlink()
        stream = await answer(site, victim)
        assert stream.error is None and not check(stream.events, wanted, whole=True).problems
        assert "d" in (await site.placed())
        # The embedding and the tokenizer, at most: no block was fetched.
        assert len(blobs(site, "d")) <= 4
        await site.restore()

        async def warm_again() -> bool:
            return await standbys(site) == {victim: "0:12"}

        await site.until(warm_again, 30)
