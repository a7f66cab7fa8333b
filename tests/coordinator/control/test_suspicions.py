"""A suspicion of a link or a head, from its origin to the coordinator's action, over real
sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from edgeshard_coordinator.control.runtime import head_watch
from edgeshard_coordinator.control.services import head_service
from edgeshard_coordinator.core.nodes import lost_nodes
from edgeshard_coordinator.core.placement.repair import Lost

from edgeshard.domain.control.commands import PrepareStage
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.rpc import link_watch
from tests.support.scripted_agent import FakeHead

pytestmark = pytest.mark.timing

SUSPECTED = LinkSuspected(
    DeploymentName("tale"), Epoch(1), 0, 1, recovered=False, why="nothing came back for 2.0 s"
)
RECOVERED = LinkSuspected(DeploymentName("tale"), Epoch(1), 0, 1, recovered=True, why="")
LONG_S = 1e6
"""The agents here send no heartbeats by themselves."""


async def test_a_deployment_goes_on_without_a_silent_node_which_stays_connected(
    open_site: Callable[..., Any],
) -> None:
    site = await open_site(suspect_wait_s=0.1, suspect_silence_s=LONG_S, suspect_limit_s=0.5)
    agents, head = await site.deployed()
    for agent in agents:
        agent.held.add(PrepareStage)
    a, b, _ = agents
    await a.say(SUSPECTED)
    await head.ended()
    await site.until(lambda state: state.deployments["tale"].epoch == 2)
    record = site.state.deployments["tale"]
    assert record.failure.reason == "NODE_LOST" and "node b is silent" in record.failure.message
    assert b.node_id not in [stage.node_id for stage in record.placement.stages]
    assert all(site.state.is_connected(agent.node_id) for agent in agents)


async def test_a_link_is_at_fault_once_both_nodes_were_heard_and_is_gone_round(
    open_site: Callable[..., Any],
) -> None:
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
    assert (
        record.failure.reason == "LINK_STALLED"
        and "from node a to node b" in record.failure.message
    )
    assert set(site.state.bad_links) == {(a.node_id, b.node_id)} and not site.state.suspects
    assert not Lost(links=frozenset(site.state.bad_links)).crosses(record.placement)


async def test_a_recovery_clears_the_suspicion(open_site: Callable[..., Any]) -> None:
    site = await open_site(suspect_wait_s=LONG_S, suspect_limit_s=LONG_S)
    (a, _, _), _ = await site.deployed()
    await a.say(SUSPECTED)
    await site.until(lambda state: bool(state.suspects))
    await a.say(RECOVERED)
    await site.until(lambda state: not state.suspects)
    record = site.state.deployments["tale"]
    assert record.phase is DeploymentPhase.READY and record.epoch == 1


# Heads, which the coordinator watches itself


async def _attached(site: Any, agents: Any, *, beacons: bool) -> FakeHead:
    """Attach the head's stream again."""
    head = agents[0].heads[-1]
    before = site.state.deployments["tale"].attachment
    await head.attach(beacons=beacons)
    await site.until(lambda state: state.deployments["tale"].attachment not in (0, before))
    await site.until_phase("tale", DeploymentPhase.READY)
    return head  # type: ignore[no-any-return]


async def _next(head: FakeHead) -> str:
    """The next received message, in a word."""
    message = await asyncio.wait_for(head.down.get(), 30.0)
    kind = str(message.WhichOneof("message"))
    return f"{kind} follows" if kind == "beacon" and message.beacon.follows else kind


async def test_a_head_with_requests_gets_beacons_and_one_without_gets_none(site: Any) -> None:
    agents, _ = await site.deployed()
    head = await _attached(site, agents, beacons=True)
    call = site.generate("r1")
    assert [await _next(head) for _ in range(4)] == ["start", *["beacon follows"] * 3]
    await head.accept("r1")
    await head.finish("r1")
    async for _ in call:
        pass
    while await _next(head) != "beacon":  # a keepalive, which shows that no other message follows
        pass
    await asyncio.sleep(3 * link_watch.BEACON_S)
    assert head.down.empty()


async def test_a_head_that_answers_nothing_is_lost_with_its_node(
    open_site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_watch, "SUSPECT_S", 0.3)
    monkeypatch.setattr(lost_nodes, "LEAST_VANISHED", 4)  # the others are silent here, too
    site = await open_site(suspect_wait_s=0.1, suspect_silence_s=0.0, suspect_limit_s=LONG_S)
    agents, _ = await site.deployed()
    for agent in agents:
        agent.held.add(PrepareStage)
    head = await _attached(site, agents, beacons=True)
    site.generate("r1")
    for _ in range(3):
        await head.answer()
        await _next(head)
    await agents[0].ended()
    await head.ended()
    await site.until(lambda state: state.deployments["tale"].epoch == 2)
    record = site.state.deployments["tale"]
    assert record.failure.reason == "NODE_LOST" and "node a" in record.failure.message
    assert site.state.is_connected(agents[1].node_id) and not site.state.is_connected(
        agents[0].node_id
    )
    assert site.coordinator._agents.suspicions == {"tale": 1}


async def test_a_head_that_answers_beacons_is_not_suspect_however_long_its_step_takes(
    open_site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_watch, "SUSPECT_S", 0.6)
    monkeypatch.setattr(head_watch, "BEACON_S", 0.05)
    site = await open_site(suspect_wait_s=0.0, suspect_silence_s=0.0)
    agents, _ = await site.deployed()
    head = await _attached(site, agents, beacons=True)
    site.generate("r1")
    assert await _next(head) == "start"
    for _ in range(8):
        assert await _next(head) == "beacon follows"
        await head.answer()
    assert not site.state.suspects and not site.coordinator._agents.suspicions


async def test_a_head_of_before_there_were_beacons_gets_none_and_is_never_suspect(
    open_site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_watch, "SUSPECT_S", 0.1)
    site = await open_site(suspect_wait_s=0.0, suspect_silence_s=0.0)
    agents, _ = await site.deployed()
    head = await _attached(site, agents, beacons=False)
    site.generate("r1")
    assert await _next(head) == "start"
    await asyncio.sleep(0.6)
    assert head.down.empty() and not site.state.suspects and not site.coordinator._agents.suspicions


async def test_a_head_waits_for_no_beacon_behind_a_large_message(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_service, "BULK_BYTES", 1)
    agents, _ = await site.deployed()
    head = await _attached(site, agents, beacons=True)
    site.generate("r1")
    assert [await _next(head) for _ in range(2)] == ["beacon", "start"]
