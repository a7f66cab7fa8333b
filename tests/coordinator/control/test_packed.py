"""Packed units of nodes against a real coordinator over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.control.services.questions import Packed

from edgeshard.domain.control.commands import DropPacked, ListPacked
from edgeshard.domain.errors import DeadlineError, EdgeShardError, NotFoundError, UnavailableError
from edgeshard.domain.models.packed_units import PackedUnit
from edgeshard.proto.v1 import admin_pb2
from edgeshard.wire.site import packed_unit_from_wire
from edgeshard.wire.status import from_rpc_error

pytestmark = pytest.mark.timing

DEADLINE_S = 30.0
UNIT = PackedUnit("00000000000000aa", "0123456789ab", "layer-3", "int8", 4096, in_use=False)


async def begun(agent: Any, call: Any) -> tuple[Any, Any]:
    """The call under way, and the command at its node, not yet answered."""
    agent.held = {ListPacked, DropPacked}
    task = asyncio.ensure_future(asyncio.wait_for(call, DEADLINE_S))
    return task, await agent.take_pending()


async def failure_of(call: Any) -> EdgeShardError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


async def test_units_come_with_the_names_of_the_models_that_the_store_has(site: Any) -> None:
    (agent,) = await site.connected("a")
    _, digest = site.coordinator.models.list()[0]
    units = (UNIT, replace(UNIT, model=digest[:12], in_use=True))
    call, command = await begun(agent, site.admin.ListPacked(admin_pb2.ListPackedRequest(node="a")))
    await agent.reply(*command, packed=units)
    found = [packed_unit_from_wire(unit) for unit in (await call).units]
    name = site.coordinator.models.list()[0][0].name
    assert (
        found == [UNIT, replace(units[1], model_name=name)]
        and site.coordinator.questions.packed.waiting == 0
    )


async def test_a_drop_is_sent_once_however_often_it_is_asked_for(site: Any) -> None:
    (agent,) = await site.connected("a")
    request = admin_pb2.DropPackedRequest(operation_id="op", node="a", ids=[UNIT.id])
    call, command = await begun(agent, site.admin.DropPacked(request))
    assert command[1] == DropPacked((UNIT.id,))
    await agent.reply(*command, packed=(UNIT,))
    first = await call
    assert await site.admin.DropPacked(request, timeout=DEADLINE_S) == first
    assert agent.kinds().count(DropPacked) == 1


async def test_what_a_node_refuses_and_nodes_that_are_not_there(site: Any) -> None:
    agents = await site.connected("a", "b")
    wanted = admin_pb2.DropPackedRequest(operation_id="op", node="a", ids=["feed"])
    call, command = await begun(agents[0], site.admin.DropPacked(wanted))
    await agents[0].reply(*command, NotFoundError("there are no packed units feed", field="ids"))
    refused = await failure_of(call)
    assert type(refused) is NotFoundError and "node a" in refused.message and refused.field == "ids"
    unknown = await failure_of(
        site.admin.ListPacked(admin_pb2.ListPackedRequest(node="none"), timeout=DEADLINE_S)
    )
    assert type(unknown) is NotFoundError and unknown.field == "node"
    asked, _ = await begun(agents[1], site.coordinator.questions.packed.list("b"))
    await agents[1].vanish()
    with pytest.raises(UnavailableError, match="node b: the node disconnected"):
        await asked
    await site.until(lambda state: not state.is_connected(agents[1].node_id))
    away = await failure_of(
        site.admin.ListPacked(admin_pb2.ListPackedRequest(node="b"), timeout=DEADLINE_S)
    )
    assert type(away) is UnavailableError and away.reason == "NODE_AWAY"


async def test_a_node_cannot_answer_for_another_and_a_silent_one_is_not_waited_for(
    site: Any,
) -> None:
    agents = await site.connected("a", "b")
    call, command = await begun(
        agents[0], site.admin.ListPacked(admin_pb2.ListPackedRequest(node="a"))
    )
    await agents[1].reply(*command, packed=(replace(UNIT, unit="forged"),))
    await site.heard(agents[1])
    await agents[0].reply(*command, packed=(UNIT,))
    assert [unit.unit for unit in (await call).units] == [UNIT.unit]
    coordinator = site.coordinator
    packed = Packed(coordinator.loop, coordinator._hub, coordinator.models, answer_limit_s=0.1)
    with pytest.raises(DeadlineError):
        await packed.list("a")
    assert packed.waiting == 0
