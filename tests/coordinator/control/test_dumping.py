"""Dumps from a real coordinator over real sockets: every node is queried, and none blocks the
others' dumps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from edgeshard_coordinator.control.runtime import loop
from edgeshard_coordinator.control.services import dumping
from edgeshard_coordinator.control.services.dumping import Dumps
from edgeshard_coordinator.core.machine.apply import machine
from edgeshard_coordinator.core.values.events import ActionIssued

from edgeshard.domain.control.commands import MOST_PART_BYTES as PART_BYTES
from edgeshard.domain.control.commands import TakeDump
from edgeshard.domain.errors import (
    DeadlineError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import OperationId
from edgeshard.proto.v1 import admin_pb2, coordinator_pb2
from edgeshard.wire.debug import read_dumps

pytestmark = pytest.mark.timing

DEADLINE_S = 30.0


async def read_all(call: Any) -> dict[str, Any]:
    try:
        return {dump.node: dump async for dump in read_dumps(call)}
    finally:
        # gRPC does not, if a reader is cancelled between the request and the first read
        call.cancel()


async def asked(site: Any, agents: list[Any]) -> tuple[Any, list[Any]]:
    """A call under way, and the command at each node, not yet answered."""
    for agent in agents:
        agent.held = {TakeDump}
    call = asyncio.create_task(
        read_all(site.admin.Dump(admin_pb2.DumpRequest(), timeout=DEADLINE_S))
    )
    return call, [await agent.take_pending() for agent in agents]


async def test_the_coordinators_own_dump_replays(site: Any) -> None:
    await site.deployed()
    # So that nothing is under way that would change the state meanwhile.
    await site.until(lambda state: all(record.durable for record in state.deployments.values()))
    site.coordinator.questions.dumps.about = lambda: {"versions": {"edgeshard": "1"}}
    call, commands = await asked(site, site.agents)
    for agent, command in zip(site.agents, commands, strict=True):
        await agent.send_dump(command[0], b"{}")
    document = json.loads((await call)[""].text)
    assert document["versions"] == {"edgeshard": "1"}
    replay = machine().replay(document)
    assert not replay.differs and replay.events > 10
    assert machine().state.decode(document["state"]).deployments == site.state.deployments
    kinds = [
        entry["event"].get("action", entry["event"])["type"]
        for entry in document["ring"]["entries"]
    ]
    assert {
        "NodeRegistered",
        "DeployRequested",
        "SendCommand",
        "SaveDeployment",
        "HeadAttached",
    } <= set(kinds)
    assert site.coordinator.questions.dumps.waiting == 0


async def test_a_refused_request_is_in_the_ring_and_changes_nothing(site: Any) -> None:
    await site.connected("a")
    wanted = admin_pb2.DeleteDeploymentRequest(operation_id="op", name="none")
    with pytest.raises(Exception, match="no deployment"):
        await site.admin.DeleteDeployment(wanted, timeout=DEADLINE_S)
    view = site.coordinator.loop.recorded()
    assert view.entries[-1].refused == "NOT_FOUND"
    assert not machine().replay(machine().document(site.state, view)).differs


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
async def test_nodes_dumps_come_whole_whatever_their_size(site: Any, size: int) -> None:
    agents = await site.connected("b", "a")
    call, commands = await asked(site, agents)
    for agent, command in zip(agents, commands, strict=True):
        await agent.send_dump(command[0], agent.registration.name.encode() * size)
    dumps = await call
    assert (
        list(dumps) == ["", "a", "b"]
        and dumps["a"].text == b"a" * size
        and dumps["b"].text == b"b" * size
    )


async def test_a_node_that_is_away_is_named_and_one_that_refuses_says_why(site: Any) -> None:
    agents = await site.connected("a", "b", "c")
    await agents[2].vanish()
    await site.until(lambda state: not state.is_connected(agents[2].node_id))
    call, commands = await asked(site, agents[:2])
    await agents[0].reply(
        *commands[0], InvalidArgumentError("a command of a kind this version does not know")
    )
    await agents[1].reply(*commands[1])
    dumps = await call
    assert [dumps[name].failure.reason for name in "abc"] == [
        "INVALID_ARGUMENT",
        "UNAVAILABLE",
        "NODE_AWAY",
    ]


async def test_a_node_that_goes_away_meanwhile_does_not_hold_up_the_others(site: Any) -> None:
    agents = await site.connected("a", "b")
    call, commands = await asked(site, agents)
    await agents[0].send_dump(commands[0][0], b"{}")
    await agents[1].vanish()
    dumps = await call
    assert (
        dumps["a"].text == b"{}"
        and dumps["b"].failure is not None
        and dumps["b"].failure.reason == "NODE_LOST"
    )


async def test_a_silent_node_is_named_in_time_and_what_it_says_later_harms_nobody(
    site: Any,
) -> None:
    agents = await site.connected("a", "b")
    for agent in agents:
        agent.held = {TakeDump}
    dumps = site.coordinator.questions.dumps = Dumps(
        site.coordinator.loop, site.coordinator._hub, answer_limit_s=0.1
    )
    found: dict[str, Any] = {dump.node: dump async for dump in dumps.take()}
    assert all(type(found[name].failure) is DeadlineError for name in "ab") and dumps.waiting == 0
    operation_id, _ = await agents[0].take_pending()
    await agents[0].send_dump(operation_id, b"late")
    await site.heard(agents[0])


async def test_a_node_cannot_answer_for_another(site: Any) -> None:
    agents = await site.connected("a", "b")
    call, commands = await asked(site, agents)
    await agents[1].send_dump(commands[0][0], b"forged")
    await agents[1].reply(commands[0][0], TakeDump(), UnavailableError("forged"))
    await site.heard(agents[1])
    for agent, command in zip(agents, commands, strict=True):
        await agent.send_dump(command[0], b"own")
    assert {dump.text for name, dump in (await call).items() if name} == {b"own"}


async def test_a_node_cannot_fill_the_memory(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumping, "MOST_BYTES", 1 << 20)
    agents = await site.connected("a")
    call, commands = await asked(site, agents)
    await agents[0].send_dump(commands[0][0], bytes(3 << 20))
    assert (
        type((await call)["a"].failure) is ResourceExhaustedError
        and site.coordinator.questions.dumps.waiting == 0
    )


async def test_a_part_that_is_too_long_costs_its_node_no_stream(site: Any) -> None:
    agents = await site.connected("a")
    call, commands = await asked(site, agents)
    part = coordinator_pb2.DumpPart(
        operation_id=commands[0][0], part=bytes(PART_BYTES + 1), last=True
    )
    await agents[0]._call.write(coordinator_pb2.ControlRequest(dump=part))
    await agents[0].send_dump(commands[0][0], b"{}")
    assert (await call)["a"].text == b"{}", "over the stream on which the refused part came"


async def test_nothing_is_left_of_a_caller_that_went(site: Any) -> None:
    agents = await site.connected("a", "b")
    call, _ = await asked(site, agents)
    assert site.coordinator.questions.dumps.waiting == 2
    call.cancel()
    async with asyncio.timeout(DEADLINE_S):
        while site.coordinator.questions.dumps.waiting:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.005)


async def test_dumps_are_no_part_of_what_they_show(site: Any) -> None:
    agents = await site.connected("a")
    before: Callable[[], int] = lambda: site.coordinator.loop.recorded().recorded  # noqa: E731
    call, commands = await asked(site, agents)
    count = before()
    await agents[0].send_dump(commands[0][0], b"{}")
    await call
    await agents[0].send_dump(OperationId("nobody's"), b"{}")
    await site.heard(agents[0])
    events = [entry.event for entry in site.coordinator.loop.recorded().entries[count - before() :]]
    assert all(type(event).__name__ in ("HeartbeatsReceived", "Ticked") for event in events), events
    assert not any(isinstance(event, ActionIssued) for event in events)


@pytest.mark.parametrize("level", ["debug", "info"])
async def test_every_event_and_action_is_said_at_debug_and_none_is_worded_above(
    site: Any, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worded: list[str] = []
    monkeypatch.setattr(loop, "debug_logged", lambda: level == "debug")

    def labels(value: object) -> dict[str, str]:
        worded.append(type(value).__name__)
        return {}

    monkeypatch.setattr(loop, "labels", labels)
    await site.connected("a")
    said = [kind for kind in worded if kind != "Ticked"]
    assert said == {"debug": ["NodeRegistered", "NodeConnected", "SaveNode"], "info": []}[level]
