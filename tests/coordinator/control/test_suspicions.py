"""A suspicion of a link, from the box that has it to what the coordinator does, over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgeshard_coordinator.core.repair import Lost

from edgeshard.domain.commands import PrepareStage
from edgeshard.domain.deployment import DeploymentPhase
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.link import LinkSuspected

SUSPECTED = LinkSuspected(DeploymentName("tale"), Epoch(1), 0, 1, recovered=False, why="nothing came back for 2.0 s")
RECOVERED = LinkSuspected(DeploymentName("tale"), Epoch(1), 0, 1, recovered=True, why="")
LONG_S = 1e6
"""The agents here send no heartbeats by themselves."""


async def test_a_box_that_says_nothing_is_lost_without_any_further_event(open_site: Callable[..., Any]) -> None:
    site = await open_site(suspect_wait_s=0.1, suspect_silence_s=LONG_S, suspect_limit_s=0.5)
    (a, b, _), _ = await site.deployed()
    await a.say(SUSPECTED)
    await b.ended()
    record = await site.until_phase("tale", DeploymentPhase.WAITING)
    assert record.failure.reason == "NODE_LOST" and "box b" in record.failure.message
    assert site.state.is_connected(a.node_id) and not site.state.is_connected(b.node_id)


async def test_a_link_is_at_fault_once_both_boxes_were_heard_and_is_gone_round(open_site: Callable[..., Any]) -> None:
    site = await open_site(suspect_wait_s=0.1, suspect_silence_s=LONG_S, suspect_limit_s=LONG_S)
    (a, b, c), head = await site.deployed()
    for agent in (a, b, c):
        agent.held.add(PrepareStage)
    await a.say(SUSPECTED)
    await site.until(lambda state: bool(state.suspects))
    for agent in (a, b):
        await agent.heartbeat()
    await head.ended()
    await site.until(lambda state: state.deployments["tale"].epoch == 2)
    record = site.state.deployments["tale"]
    assert record.failure.reason == "LINK_STALLED" and "from box a to box b" in record.failure.message
    assert set(site.state.bad_links) == {(a.node_id, b.node_id)} and not site.state.suspects
    assert not Lost(links=frozenset(site.state.bad_links)).crosses([stage.node_id for stage in record.placement.stages])


async def test_a_recovery_clears_the_suspicion(open_site: Callable[..., Any]) -> None:
    site = await open_site(suspect_wait_s=LONG_S, suspect_limit_s=LONG_S)
    (a, _, _), _ = await site.deployed()
    await a.say(SUSPECTED)
    await site.until(lambda state: bool(state.suspects))
    await a.say(RECOVERED)
    await site.until(lambda state: not state.suspects)
    record = site.state.deployments["tale"]
    assert record.phase is DeploymentPhase.READY and record.epoch == 1
