"""Nodes, heads and operators against one coordinator, over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.core.values.state import ServedOperation

from edgeshard import WIRE_VERSION
from edgeshard.domain.control.commands import ActivateHead, ControlHello, PrepareStage
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import (
    AlreadyExistsError,
    DataLossError,
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    StaleEpochError,
    UnavailableError,
    WireVersionError,
)
from edgeshard.domain.ids import DeploymentName, Epoch, ModelName, NodeId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.proto.v1 import admin_pb2, coordinator_pb2, head_pb2, inference_pb2
from edgeshard.wire.control import agent_message_to_wire
from edgeshard.wire.site import (
    deployment_from_wire,
    facts_to_wire,
    node_from_wire,
    placement_from_wire,
    site_event_from_wire,
)
from edgeshard.wire.status import from_rpc_error
from tests.support.scripted_agent import held_of

DEADLINE_S = 30.0


async def test_a_deployment_becomes_ready_in_order(site: Any) -> None:
    a, b, c = await site.connected("a", "b", "c")
    answer = await site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    first = deployment_from_wire(answer.deployment)
    assert (first.phase, first.epoch) == (DeploymentPhase.LOADING, 1)
    await site.until_phase("tale", DeploymentPhase.READY)
    assert a.kinds() == [PrepareStage, ActivateHead]
    assert b.kinds() == c.kinds() == [PrepareStage]
    prepare = b.commands[0]
    assert prepare.stage == 1 and prepare.placed.layers == LayerRange(4, 9) and prepare.epoch == 1
    shown = await site.admin.GetDeployment(
        admin_pb2.GetDeploymentRequest(name="tale"), timeout=DEADLINE_S
    )
    deployment = deployment_from_wire(shown.deployment)
    assert deployment.phase is DeploymentPhase.READY and deployment.failure is None
    assert [stage.stage for stage in deployment.stages] == [0, 1, 2]
    served = await site.inference.ListModels(
        inference_pb2.InferenceServiceListModelsRequest(), timeout=DEADLINE_S
    )
    assert [(m.deployment, m.model, m.max_context) for m in served.models] == [
        ("tale", "tiny", 128)
    ]


async def test_nodes_show_what_is_left_of_their_memory(site: Any) -> None:
    await site.deployed()
    nodes = await site.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=DEADLINE_S)
    a = next(node for node in map(node_from_wire, nodes.nodes) if node.name == "a")
    stage = site.state.deployments["tale"].placement.stages[0]
    assert a.connected and a.heartbeat_age_s < DEADLINE_S
    held = stage.parameter_bytes + stage.kv_bytes + stage.workspace_bytes
    assert a.free_bytes == a.facts.memory_budget_bytes - held


async def test_plan_changes_nothing(site: Any) -> None:
    await site.connected("a", "b", "c")
    answer = await site.admin.Plan(
        admin_pb2.PlanRequest(spec=site.deploy_request().spec), timeout=DEADLINE_S
    )
    assert [s.node_name for s in placement_from_wire(answer.placement).stages] == ["a", "b", "c"]
    assert not site.state.deployments


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"model": "nothing"}, NotFoundError, "model"),
        ({"source": "z", "layers": "z=0:12"}, NotFoundError, "source"),
        ({"layers": "a=0:4,b=5:12"}, InvalidArgumentError, "layers"),
        ({"layers": "a=0:4,q=4:12"}, InvalidArgumentError, "layers"),
        ({"max_context": 4096}, InvalidArgumentError, "max_context"),
        (
            {"max_context": 128, "concurrency": 4096, "kv_dtype": "float32", "layers": "a=0:12"},
            None,
            "layers",
        ),
    ],
)
async def test_a_refused_deploy_changes_nothing(
    site: Any, failing: Any, changes: dict[str, Any], kind: type[EdgeShardError] | None, field: str
) -> None:
    await site.connected("a", "b")
    before = site.state.version
    if kind is None:
        small = site.agent("a")
        small.registration = replace(
            small.registration, facts=replace(small.registration.facts, memory_budget_bytes=1 << 27)
        )
        await small.register()
        kind, before = ResourceExhaustedError, site.state.version
    async with failing(kind) as caught:
        await site.admin.Deploy(
            site.deploy_request(**{"layers": (), **changes}), timeout=DEADLINE_S
        )
    assert caught[0].field == field
    assert not site.state.deployments and site.state.version == before


async def test_another_wire_version_is_refused(site: Any, failing: Any) -> None:
    for version, older in ((WIRE_VERSION + 1, "coordinator"), (WIRE_VERSION - 1, "agent")):
        agent = site.agent("a", wire_version=version)
        async with failing(FailedPreconditionError) as caught:
            await agent.register()
        error = caught[0]
        assert error.field == "wire_version" and error.reason == WireVersionError.default_reason
        assert f"version {version}" in error.message and f"upgrade the {older}" in error.message
    assert not site.state.nodes


@pytest.mark.parametrize(
    ("field", "value"), [("name", "../x"), ("node_id", ""), ("address", "nowhere")]
)
async def test_a_registration_that_cannot_be(
    site: Any, failing: Any, field: str, value: str
) -> None:
    async with failing(InvalidArgumentError) as caught:
        agent = site.agent("a")
        agent.registration = replace(agent.registration, **{field: value})
        await agent.register()
    assert caught[0].field == field
    assert not site.state.nodes


async def test_two_nodes_of_one_name(site: Any, failing: Any) -> None:
    (first,) = await site.connected("a")
    second = site.agent("a", node_id=NodeId("id-other"))
    async with failing(AlreadyExistsError) as caught:
        await second.register()
    assert caught[0].field == "name"
    await first.vanish()
    await site.until(lambda state: not state.is_connected(first.node_id))
    await second.connect()
    await site.until(lambda state: state.is_connected(second.node_id))
    assert set(site.state.nodes) == {"id-other"}


async def test_control_needs_a_registration_of_this_incarnation(site: Any, failing: Any) -> None:
    (agent,) = await site.connected("a")
    for node_id, incarnation in (("id-a", "another"), ("id-z", "i1")):
        call = agent.stub.Control(timeout=DEADLINE_S)
        await call.write(agent_message_to_wire(ControlHello(NodeId(node_id), incarnation)))
        async with failing(NotFoundError) as caught:
            await call.read()
        assert caught[0].field == "node_id"
    assert site.state.is_connected(agent.node_id)
    call = agent.stub.Control(timeout=DEADLINE_S)
    await call.write(
        coordinator_pb2.ControlRequest(result=coordinator_pb2.CommandResult(operation_id="x"))
    )
    async with failing(InvalidArgumentError):
        await call.read()


async def test_profile_changes_the_facts(site: Any, make_facts: Any) -> None:
    (agent,) = await site.connected("a")
    facts = make_facts(budget=123)
    await agent.stub.ReportProfile(
        coordinator_pb2.ReportProfileRequest(node_id=agent.node_id, facts=facts_to_wire(facts)),
        timeout=DEADLINE_S,
    )
    assert site.state.nodes[agent.node_id].facts == facts


async def test_a_deployment_that_is_not_ready(site: Any, failing: Any) -> None:
    a, b, c = await site.connected("a", "b", "c")
    b.held.add(PrepareStage)
    await site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    async with failing(UnavailableError) as caught:
        await site.read(site.generate())
    assert caught[0].field == "model" and caught[0].retry_after_s == 1.0
    await b.reply(*await b.take_pending(), DataLossError("tensor x is corrupt", field="x"))
    record = await site.until_phase("tale", DeploymentPhase.FAILED)
    assert isinstance(record.failure, DataLossError) and record.failure.field == "x"
    assert "node b" in record.failure.message
    async with failing(FailedPreconditionError) as caught:
        await site.read(site.generate())
    assert "tensor x is corrupt" in caught[0].message
    for agent in (a, c):
        await agent.until(lambda agent: bool(agent.released()))


async def test_requests_go_on_with_another_head_when_theirs_goes_away(site: Any) -> None:
    agents, head = await site.deployed()
    calls = [site.generate("r1"), site.generate("r2")]
    for name in ("r1", "r2"):
        assert not (await head.next_start()).resumed
        await head.accept(name)
    await head.token("r1", 3, token=11)
    for _ in range(2):
        await site.read(calls[0])
    await agents[0].vanish()
    record = await site.until_phase("tale", DeploymentPhase.READY, epoch=2)
    assert [stage.node_name for stage in record.placement.stages] == ["b", "c"]
    new_head = agents[1].heads[-1]
    starts = [await new_head.next_start() for _ in range(2)]
    assert [(start.request_id, list(start.emitted_tokens)) for start in starts] == [
        ("r1", [11]),
        ("r2", []),
    ]
    assert all(
        start.resumed and list(start.generation.prompt_tokens) == [5, 6, 7] for start in starts
    )
    await new_head.accept("r1")
    await new_head.token("r1", 3, token=66)  # It has this one.
    await new_head.token("r1", 4, token=12)
    await new_head.finish("r1")
    assert (await site.read(calls[0])).token.token == 12
    assert (await site.read(calls[0])).finished.new_token_count == 2
    calls[1].cancel()


async def test_a_head_that_attaches_again_at_its_epoch(site: Any) -> None:
    agents, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    await head.accept("r1")
    await site.read(call)
    head.cancel()
    await site.until_phase("tale", DeploymentPhase.ACTIVATING)
    await head.attach()
    record = await site.until_phase("tale", DeploymentPhase.READY)
    assert record.epoch == 1 and agents[0].kinds().count(ActivateHead) == 1
    assert (await head.next_start()).resumed
    call.cancel()


async def test_a_head_forgets_what_ended_while_it_was_away(site: Any) -> None:
    """It keeps what another run of the coordinator gave it: the client of that knows more."""
    _, head = await site.deployed()
    instance = site.state.instance
    head.cancel()
    await site.until_phase("tale", DeploymentPhase.ACTIVATING)
    held = {"over": instance, "earlier": "another run"}
    await head.attach(
        [head_pb2.HeldRequest(request_id=name, instance=run) for name, run in held.items()]
    )
    await site.until_phase("tale", DeploymentPhase.READY)
    site.generate("r1")
    await head.next_start()  # earlier messages have arrived
    assert head.forgotten == ["over"]


async def test_a_request_that_nothing_can_go_on_with_is_told_why(site: Any, failing: Any) -> None:
    """In time, before its own deadline is over; and a client that leaves meanwhile is forgotten."""
    agents, head = await site.deployed()
    call = site.generate("r1", timeout=2.0)
    leaving = site.generate("r2")
    await head.next_start()
    await head.next_start()
    await head.accept("r1")
    await site.read(call)
    for agent in agents:
        await agent.vanish()
    await site.until_phase("tale", DeploymentPhase.WAITING)
    leaving.cancel()
    async with failing(UnavailableError) as caught:
        await site.read(call)
    assert (
        caught[0].reason == "NOT_RECOVERED"
        and caught[0].retry_after_s
        and "0 tokens" in caught[0].message
    )
    await site.until(lambda state: site.coordinator.front.all_active_requests() == 0)


async def test_a_parked_request_ends_when_its_deployment_is_deleted(
    site: Any, failing: Any
) -> None:
    agents, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    for agent in agents:
        await agent.vanish()
    await site.until_phase("tale", DeploymentPhase.WAITING)
    request = admin_pb2.DeleteDeploymentRequest(operation_id="op-2", name="tale")
    await site.admin.DeleteDeployment(request, timeout=DEADLINE_S)
    async with failing(UnavailableError) as caught:
        await site.read(call)
    assert caught[0].reason == "DEPLOYMENT_DELETED"


async def test_a_client_that_comes_back_gets_what_is_behind_its_tokens(
    site: Any, failing: Any
) -> None:
    """Its earlier call may not have ended here yet."""
    _, head = await site.deployed()
    former = site.generate("r1")
    await head.next_start()
    await head.accept("r1")
    for position in (3, 4):
        await head.token("r1", position, token=position + 10)
    for _ in range(3):
        await site.read(former)
    call = site.generate("r1", resume=[13])
    async with failing(UnavailableError) as caught:
        await site.read(former)
    assert caught[0].reason == "RESUMED_ELSEWHERE"
    start = await head.next_start()
    assert start.resumed and list(start.emitted_tokens) == [13]
    await head.accept("r1")
    await head.token("r1", 4, token=14)
    await head.finish("r1")
    messages = [message async for message in call]
    assert [m.token.token for m in messages if m.WhichOneof("message") == "token"] == [14]
    assert messages[-1].finished.new_token_count == 2


async def test_only_the_head_that_is_awaited_attaches(open_site: Any) -> None:
    site = await open_site(retry_first_s=0.0)
    agents, head = await site.deployed()
    here, there = agents[0].node_id, agents[1].node_id

    async def refused(node_id: str, deployment: str, epoch: int) -> bool:
        stranger = type(head)(agents[0]._channel, node_id, deployment, epoch)
        await stranger.attach()
        error = await stranger.ended()
        return (
            isinstance(error, FailedPreconditionError)
            and error.reason == StaleEpochError.default_reason
        )

    for node_id, deployment, epoch in ((here, "tale", 7), (here, "other", 1), (there, "tale", 1)):
        assert await refused(node_id, deployment, epoch), (node_id, deployment, epoch)
    assert site.state.deployments["tale"].phase is DeploymentPhase.READY, (
        "the head that serves was not disturbed"
    )
    await agents[2].vanish()
    await site.until_phase("tale", DeploymentPhase.WAITING)
    assert await refused(here, "tale", 1), "a deployment that waits for its nodes awaits no head"


async def test_a_head_that_stays_away_is_loaded_again(open_site: Any) -> None:
    site = await open_site(reattach_timeout_s=0.3, retry_first_s=0.0)
    agents, head = await site.deployed()
    head.cancel()
    await site.until(lambda state: state.deployments["tale"].epoch == 2)
    await site.until_phase("tale", DeploymentPhase.READY)
    assert [type(c) for c in agents[0].commands] == [PrepareStage, ActivateHead] * 2


async def test_a_middle_node_that_goes_away_is_replaced_and_the_old_stream_ends(
    site: Any, failing: Any
) -> None:
    agents, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    agents[0].held.add(PrepareStage)
    await agents[1].vanish()
    assert await head.ended() is None
    async with failing(UnavailableError):
        await site.read(site.generate())
    operation, command = await agents[0].take_pending()
    assert [stage.node_name for stage in command.placement.stages] == ["a", "c"]
    await agents[0].reply(operation, command)
    await site.until_phase("tale", DeploymentPhase.READY, epoch=2)
    assert (await agents[0].heads[-1].next_start()).request_id == "r1"
    await agents[1].connect()
    old = StageStatus(DeploymentName("tale"), Epoch(1), 1, LayerRange(4, 9), StagePhase.READY)
    await agents[1].heartbeat(old)
    await agents[1].until(lambda agent: bool(agent.released()))
    call.cancel()


async def test_an_agent_gone_while_loading(site: Any) -> None:
    a, b, c = await site.connected("a", "b", "c")
    b.held.add(PrepareStage)
    await site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    held = await b.take_pending()
    await b.vanish()
    record = await site.until_phase("tale", DeploymentPhase.FAILED)
    assert isinstance(record.failure, UnavailableError)
    assert "node b" in record.failure.message and record.failure.field == "node"
    for agent in (a, c):
        await agent.until(lambda agent: bool(agent.released()))
    # It restarts and answers late: the only effect is its release.
    await b.restart()
    await b.reply(*held)
    await b.until(lambda agent: bool(agent.released()))
    assert site.state.deployments["tale"].phase is DeploymentPhase.FAILED


async def test_a_silent_node_counts_as_gone(open_site: Any) -> None:
    site = await open_site(heartbeat_timeout_s=0.3)
    agent = site.agent("a")
    await agent.connect()
    await agent.ended()
    await site.until(lambda state: not state.is_connected(agent.node_id))


async def test_a_stage_that_broke_at_work_ends_the_epoch_and_is_tried_again(site: Any) -> None:
    agents, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    broken = StageStatus(DeploymentName("tale"), Epoch(1), 1, LayerRange(4, 9), StagePhase.FAILED)
    await agents[1].heartbeat(broken)
    await site.until_phase("tale", DeploymentPhase.READY, epoch=2)
    assert (await agents[0].heads[-1].next_start()).request_id == "r1"
    call.cancel()
    await site.heard(agents[1], broken)
    assert site.state.deployments["tale"].epoch == 2, "what an old epoch says is no news"


async def test_a_stage_of_a_deleted_deployment_is_released_and_one_of_an_unknown_is_left_alone(
    site: Any,
) -> None:
    """The disk decides which it is: nothing else survives a coordinator."""
    await site.deployed()
    request = admin_pb2.DeleteDeploymentRequest(operation_id="op-2", name="tale")
    await site.admin.DeleteDeployment(request, timeout=DEADLINE_S)
    await site.until(lambda state: "tale" in state.retired)
    await site.restart()
    (agent,) = await site.connected("a")
    names = (("tale", 1), ("tale", 2), ("old", 4))
    held = [
        StageStatus(DeploymentName(name), Epoch(epoch), number, LayerRange(0, 4), StagePhase.ACTIVE)
        for number, (name, epoch) in enumerate(names)
    ]
    await site.heard(agent, *held)
    await agent.until(lambda agent: bool(agent.released()))
    await site.heard(agent, *held)
    assert [(r.deployment, r.epoch) for r in agent.released()] == [("tale", 1)]
    shown = await site.admin.GetNode(admin_pb2.GetNodeRequest(node="a"), timeout=DEADLINE_S)
    assert [(stage.deployment, stage.epoch) for stage in node_from_wire(shown.node).stages] == list(
        names
    )


async def test_delete_releases_every_stage(site: Any, failing: Any) -> None:
    agents, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    request = admin_pb2.DeleteDeploymentRequest(operation_id="op-2", name="tale")
    await site.admin.DeleteDeployment(request, timeout=DEADLINE_S)
    async with failing(UnavailableError):
        await site.read(call)
    await site.until(lambda state: "tale" not in state.deployments)
    for agent in agents:
        assert [r.epoch for r in agent.released()] == [1]
    await site.admin.DeleteDeployment(request, timeout=DEADLINE_S)
    async with failing(NotFoundError):
        await site.admin.DeleteDeployment(
            admin_pb2.DeleteDeploymentRequest(operation_id="op-3", name="tale"), timeout=DEADLINE_S
        )
    answer = await site.admin.Deploy(site.deploy_request("op-4"), timeout=DEADLINE_S)
    assert answer.deployment.epoch == 2, "an epoch never comes twice for a name"
    await site.until_phase("tale", DeploymentPhase.READY)


async def test_operation_ids_take_effect_once(site: Any, failing: Any) -> None:
    await site.connected("a", "b", "c")
    requests = [site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S) for _ in range(3)]
    first, *others = await asyncio.gather(*requests)
    await site.until_phase("tale", DeploymentPhase.READY)
    later = await site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    assert all(other == first for other in [*others, later])
    async with failing(InvalidArgumentError) as caught:
        await site.admin.Deploy(site.deploy_request(name="other"), timeout=DEADLINE_S)
    assert caught[0].field == "operation_id"
    async with failing(AlreadyExistsError) as caught:
        await site.admin.Deploy(site.deploy_request("op-2"), timeout=DEADLINE_S)
    assert caught[0].field == "name"
    async with failing(InvalidArgumentError) as caught:
        await site.admin.Deploy(site.deploy_request(""), timeout=DEADLINE_S)
    assert caught[0].field == "operation_id"


async def test_a_restarted_coordinator_goes_on(open_site: Any, failing: Any) -> None:
    site = await open_site(retry_first_s=0.0, lease_s=30.0)
    await site.deployed()
    first = await site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    await site.restart()
    assert site.state.deployments["tale"].phase is DeploymentPhase.WAITING
    nodes = await site.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=DEADLINE_S)
    assert [(node.name, node.connected) for node in nodes.nodes] == [
        ("a", False),
        ("b", False),
        ("c", False),
    ]
    agents = await site.connected("a", "b", "c")
    for agent in agents:
        await agent.heartbeat()  # It holds nothing any more.
    record = await site.until_phase("tale", DeploymentPhase.READY)
    assert record.epoch == 2 and agents[2].commands[0].epoch == 2
    assert await site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S) == first, (
        "a repeat after the restart"
    )


async def test_a_restarted_coordinator_adopts_the_epoch_that_its_nodes_hold(
    open_site: Any, failing: Any
) -> None:
    """Nothing is prepared again, the head attaches to the epoch it has, and a client reconnects for
    its answer. One that never had any is refused."""
    site = await open_site(lease_s=30.0)
    agents, head = await site.deployed()
    site.generate("r1")
    held = held_of(await head.next_start())
    placed = site.state.deployments["tale"].placement.stages
    await site.restart()
    agents = await site.connected("a", "b", "c")
    agents[0].held_requests = [held]
    for agent, stage in zip(agents, placed, strict=True):
        assert site.state.deployments["tale"].phase is DeploymentPhase.WAITING
        ready = StageStatus(
            DeploymentName("tale"), Epoch(1), stage.index, stage.layers, StagePhase.READY
        )
        await agent.heartbeat(ready)
    await site.until_phase("tale", DeploymentPhase.ACTIVATING)
    call, never = site.generate("r1", resume=[]), site.generate("never", resume=[])
    await agents[0].until(lambda agent: bool(agent.heads))
    again = agents[0].heads[-1]
    record = await site.until_phase("tale", DeploymentPhase.READY)
    assert record.epoch == 1 and [agent.kinds() for agent in agents] == [[ActivateHead], [], []]
    start = await again.next_start()
    assert start.request_id == "r1" and start.resumed
    async with failing(FailedPreconditionError) as caught:
        await site.read(never)
    assert (caught[0].field, caught[0].reason) == ("resume", "NOT_RESUMABLE")
    call.cancel()


async def test_models_in_use_stay(site: Any, failing: Any) -> None:
    await site.deployed()
    stored = await site.admin.ListModels(admin_pb2.ListModelsRequest(), timeout=DEADLINE_S)
    model = stored.models[0]
    assert (model.name, model.layer_count, model.max_context, model.architecture) == (
        "tiny",
        12,
        128,
        "llama",
    )
    async with failing(FailedPreconditionError) as caught:
        await site.admin.DeleteModel(
            admin_pb2.DeleteModelRequest(operation_id="op-2", name="tiny"), timeout=DEADLINE_S
        )
    assert caught[0].field == "name" and "tale" in caught[0].message
    tiny = site.models.manifests["tiny"]
    site.models.manifests["unused"] = replace(
        tiny, name=ModelName("unused"), tensors=tiny.tensors[:1]
    )
    await site.admin.DeleteModel(
        admin_pb2.DeleteModelRequest(operation_id="op-5", name="unused"), timeout=DEADLINE_S
    )
    assert [*site.models.manifests] == ["tiny"]
    request = admin_pb2.DeleteDeploymentRequest(operation_id="op-3", name="tale")
    await site.admin.DeleteDeployment(request, timeout=DEADLINE_S)
    await site.until(lambda state: not state.deployments)
    for _ in range(2):
        await site.admin.DeleteModel(
            admin_pb2.DeleteModelRequest(operation_id="op-4", name="tiny"), timeout=DEADLINE_S
        )
    assert not site.models.manifests


async def test_a_model_is_deleted_once_when_its_coordinator_ends_before_the_answer(
    open_site: Any,
) -> None:
    """The model is gone, and that the call took effect was not saved: its repeat is no mistake."""
    site = await open_site()
    store = site.coordinator.admin._store
    request = admin_pb2.DeleteModelRequest(operation_id="op-1", name="tiny")
    saved = store.save_operation

    async def save(operation: ServedOperation) -> None:
        if operation.operation_id == "op-1":
            raise InternalError("as if the coordinator had ended here")
        await saved(operation)

    store.save_operation = save
    with pytest.raises(grpc.aio.AioRpcError):
        await site.admin.DeleteModel(request, timeout=DEADLINE_S)
    assert not site.models.manifests
    await site.restart()
    await site.admin.DeleteModel(request, timeout=DEADLINE_S)
    other = admin_pb2.DeleteModelRequest(operation_id="op-2", name="tiny")
    with pytest.raises(grpc.aio.AioRpcError):
        await site.admin.DeleteModel(other, timeout=DEADLINE_S)


async def test_an_operators_call_under_way_ends_with_the_coordinator(site: Any) -> None:
    """It would continue after its caller hangs up, and also after the disk is gone."""
    began = asyncio.Event()

    async def never(operation: ServedOperation) -> bytes:
        began.set()
        await asyncio.Event().wait()
        return b""

    operations = site.coordinator.admin.operations
    call = asyncio.create_task(operations.once("op-1", admin_pb2.ReplanRequest(), never))
    await asyncio.wait_for(began.wait(), DEADLINE_S)
    await site.coordinator.stop()
    await asyncio.wait([call], timeout=1.0)
    assert call.cancelled()


async def test_unknown_names_are_not_found(site: Any, failing: Any) -> None:
    async with failing(NotFoundError) as caught:
        await site.admin.GetNode(admin_pb2.GetNodeRequest(node="z"), timeout=DEADLINE_S)
    assert caught[0].field == "node"
    async with failing(NotFoundError) as caught:
        await site.admin.GetDeployment(admin_pb2.GetDeploymentRequest(name="z"), timeout=DEADLINE_S)
    assert caught[0].field == "name"


async def test_events_are_listed_and_followed_as_they_happen(site: Any, failing: Any) -> None:
    await site.connected("a")
    listed = site.admin.ListEvents(admin_pb2.ListEventsRequest(limit=10), timeout=DEADLINE_S)
    found = [site_event_from_wire(message.event) async for message in listed]
    assert [(event.number, event.name, event.what) for event in found] == [
        (1, "a", "joined"),
        (2, "a", "ready"),
    ]
    two = [
        site.admin.ListEvents(
            admin_pb2.ListEventsRequest(limit=limit, follow=True), timeout=DEADLINE_S
        )
        for limit in (1, 2)
    ]
    assert [
        (await two[0].read()).event.number,
        *[(await two[1].read()).event.number for _ in range(2)],
    ] == [2, 1, 2]
    await site.connected("b")
    for call in two:
        assert [(await call.read()).event.number for _ in range(2)] == [3, 4]
    async with failing(InvalidArgumentError) as caught:
        await site.admin.ListEvents(
            admin_pb2.ListEventsRequest(limit=1001), timeout=DEADLINE_S
        ).read()
    assert caught[0].field == "limit"


async def test_followers_of_events_end_with_the_coordinator(site: Any) -> None:
    call = site.admin.ListEvents(
        admin_pb2.ListEventsRequest(limit=9, follow=True), timeout=DEADLINE_S
    )
    reading = asyncio.ensure_future(call.read())
    await site.connected("a")
    assert (await reading).event.what == "joined"
    await call.read()
    last = asyncio.ensure_future(call.read())
    await site.coordinator.stop()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await last
    assert from_rpc_error(caught.value).reason == "SHUTTING_DOWN"


async def test_a_deployment_without_a_source_gets_one(site: Any) -> None:
    await site.connected("a", "b")
    request = site.deploy_request(source="", layers=())
    await site.admin.Deploy(request, timeout=DEADLINE_S)
    record = site.state.deployments["tale"]
    assert record.spec.source == record.placement.stages[0].node_name != ""
