"""A node that stands still with its connections open: lost in seconds if it stays so, not at all if
it was short."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time

import pytest

from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase
from edgeshard.domain.requests.generation import Token
from tests.support.site import MakeSpec, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAUSE_S = 1.5
LONG_BEFORE_S = 8.0
"""A quiet machine takes 3 s; without keepalives a stalled node is lost after 10 s of silence."""


async def test_a_node_that_stands_still_is_lost_long_before_its_silence_tells(
    site: Site, make_spec: MakeSpec
) -> None:
    """Its request continues without it."""
    await site.client.deploy(make_spec())
    agent = site.cluster.agents["b"]
    stream = site.client.generate("tales", "Once upon a time", max_new_tokens=400, ignore_eos=True)
    await anext(stream)
    agent.send_signal(signal.SIGSTOP)
    times = [time.monotonic()]
    try:
        async for event in stream:
            if isinstance(event, Token):
                times.append(time.monotonic())
        deployment = await site.client.deployment("tales")
        longest_s = max(after - before for before, after in itertools.pairwise(times))
        assert len(times) == 401 and longest_s < LONG_BEFORE_S
        assert "b" not in [stage.node_name for stage in deployment.placement.stages]
    finally:
        agent.send_signal(signal.SIGCONT)
    await site.client.delete_deployment("tales")

    async def is_whole_again() -> bool:
        return all(node.placeable for node in await site.client.nodes())

    await site.until(is_whole_again)


@pytest.mark.parametrize("name", ["a", "b", "c"])
async def test_a_node_that_stood_still_for_a_moment_keeps_its_place(
    site: Site, tales: Deployment, name: str
) -> None:
    agent = site.cluster.agents[name]
    stream = site.client.generate("tales", "Once upon a time", max_new_tokens=200, ignore_eos=True)
    await anext(stream)
    agent.send_signal(signal.SIGSTOP)
    await asyncio.sleep(PAUSE_S)
    agent.send_signal(signal.SIGCONT)
    tokens = [event async for event in stream]
    assert tokens
    deployment = await site.client.deployment("tales")
    assert (deployment.phase, deployment.epoch) == (DeploymentPhase.READY, tales.epoch)
