"""A box that stands still with its connections open: lost in seconds if it stays so, not at all if it was short."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from edgeshard.domain.deployment import Deployment, DeploymentPhase
from edgeshard.domain.errors import UnavailableError
from tests.support.site import MakeSpec, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAUSE_S = 1.5
LONG_BEFORE_S = 8.0
"""A quiet machine takes 3 s; without beacons a box that stands still is lost after 10 s of silence."""


async def test_a_box_that_stands_still_is_lost_long_before_its_silence_tells(site: Site, make_spec: MakeSpec) -> None:
    await site.client.deploy(make_spec())
    agent = site.cluster.agents["b"]
    stream = site.client.generate("tales", "Once upon a time", max_new_tokens=400, ignore_eos=True)
    await anext(stream)
    agent.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(UnavailableError) as lost:
            async for _ in stream:
                pass
        took_s = time.monotonic() - began
        assert lost.value.reason == "NODE_LOST" and "box b" in lost.value.message
        assert took_s < LONG_BEFORE_S
    finally:
        agent.send_signal(signal.SIGCONT)

    async def is_ready_again() -> bool:
        deployment = await site.client.deployment("tales")
        return deployment.phase is DeploymentPhase.READY and deployment.epoch > 1

    await site.until(is_ready_again)
    await site.client.delete_deployment("tales")


@pytest.mark.parametrize("name", ["a", "b", "c"])
async def test_a_box_that_stood_still_for_a_moment_keeps_its_place(site: Site, tales: Deployment, name: str) -> None:
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
