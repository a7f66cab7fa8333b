"""Traces of a deployment from a real coordinator over real sockets: all nodes at once, and nothing
left over."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.control.services.tracing import Traces, still_runs

from edgeshard.domain.control.commands import ReleaseStage, TraceSteps
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import (
    AbortedError,
    DeadlineError,
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
)
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.trace import StageTrace, StepRecord
from edgeshard.proto.v1 import admin_pb2
from edgeshard.wire.site import trace_from_wire
from edgeshard.wire.status import from_rpc_error

pytestmark = pytest.mark.timing

DEADLINE_S = 30.0


def request(deployment: str = "tale", seconds: float = 0.5) -> admin_pb2.TraceRequest:
    return admin_pb2.TraceRequest(deployment=deployment, seconds=seconds)


def trace_of(stage: int) -> StageTrace:
    record = StepRecord(3, 1, 0, 1.0, 1.5, 2.0, 2.25, 4.0 if stage == 0 else 0.0)
    return StageTrace(stage, "abc"[stage], LayerRange(stage, stage + 1), (record,))


async def read_all(call: Any) -> list[StageTrace]:
    return [trace_from_wire(message.stage) async for message in call]


async def refusal(call: Any) -> EdgeShardError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    return from_rpc_error(caught.value)


async def asked(site: Any, agents: list[Any]) -> tuple[Any, list[Any]]:
    """A call under way, and the command at each node, not yet answered."""
    for agent in agents:
        agent.held = {TraceSteps}
    call = site.admin.Trace(request(), timeout=DEADLINE_S)
    return call, [await agent.take_pending() for agent in agents]


async def test_every_node_is_asked_at_once_and_the_stages_come_in_order(site: Any) -> None:
    agents, _ = await site.deployed()
    call, commands = await asked(site, agents)
    assert {command for _, command in commands} == {
        TraceSteps(DeploymentName("tale"), Epoch(1), 0.5)
    }
    for stage in (2, 0, 1):
        await agents[stage].reply(*commands[stage], trace=trace_of(stage))
    assert await read_all(call) == [trace_of(stage) for stage in range(3)]
    assert site.coordinator.questions.traces.waiting == 0


@pytest.mark.parametrize(
    ("wanted", "kind", "field"),
    [
        (request("nothing"), NotFoundError, "deployment"),
        (request(seconds=0.01), InvalidArgumentError, "seconds"),
        (request(seconds=100.0), InvalidArgumentError, "seconds"),
        (request(seconds=float("nan")), InvalidArgumentError, "seconds"),
    ],
)
async def test_what_cannot_be_is_refused_before_a_node_hears_of_it(
    site: Any, wanted: admin_pb2.TraceRequest, kind: type, field: str
) -> None:
    agents, _ = await site.deployed()
    failure = await refusal(site.admin.Trace(wanted, timeout=DEADLINE_S))
    assert isinstance(failure, kind) and failure.field == field
    assert all(TraceSteps not in agent.kinds() for agent in agents)


async def test_a_deployment_that_is_not_ready_has_no_steps(site: Any) -> None:
    agents, _ = await site.deployed()
    await agents[1].vanish()
    await site.until_phase("tale", "waiting")
    failure = await refusal(site.admin.Trace(request(), timeout=DEADLINE_S))
    assert isinstance(failure, FailedPreconditionError) and failure.reason == "DEPLOYMENT_NOT_READY"


async def test_a_node_that_goes_away_ends_the_trace_by_name(site: Any) -> None:
    agents, _ = await site.deployed()
    call, commands = await asked(site, agents)
    await agents[0].reply(*commands[0], trace=trace_of(0))
    await agents[1].vanish()
    failure = await refusal(call)
    assert isinstance(failure, AbortedError) and failure.reason == "DEPLOYMENT_STOPPED"
    assert "node b" in failure.message and site.coordinator.questions.traces.waiting == 0


async def test_a_deployment_deleted_meanwhile_ends_the_trace(site: Any) -> None:
    agents, _ = await site.deployed()
    for agent in agents:
        agent.held = {ReleaseStage}
    call, _ = await asked(site, agents)
    await site.admin.DeleteDeployment(
        admin_pb2.DeleteDeploymentRequest(operation_id="op-d", name="tale"), timeout=DEADLINE_S
    )
    assert (await refusal(call)).reason == "DEPLOYMENT_STOPPED"


async def test_what_a_node_says_against_it_names_the_node(site: Any) -> None:
    agents, _ = await site.deployed()
    call, commands = await asked(site, agents)
    await agents[2].reply(
        *commands[2], AbortedError("another trace began", reason="TRACE_REPLACED")
    )
    failure = await refusal(call)
    assert isinstance(failure, AbortedError) and failure.message == "node c: another trace began"
    assert failure.reason == "TRACE_REPLACED"
    # Later reports of the others belong to no trace, and do no harm.
    await agents[0].reply(*commands[0], trace=trace_of(0))
    await site.heard(agents[0])


@pytest.mark.parametrize("answer", [None, trace_of(1)])
async def test_an_answer_that_is_no_trace_of_the_stage_is_no_answer(
    site: Any, answer: StageTrace | None
) -> None:
    agents, _ = await site.deployed()
    call, commands = await asked(site, agents)
    await agents[0].reply(*commands[0], trace=answer)
    failure = await refusal(call)
    assert isinstance(failure, InternalError) and "node a" in failure.message


async def test_a_node_cannot_answer_for_another(site: Any) -> None:
    agents, _ = await site.deployed()
    call, commands = await asked(site, agents)
    await agents[1].reply(*commands[0], trace=trace_of(0))
    await site.heard(agents[1])
    assert site.coordinator.questions.traces.waiting == 3
    for stage, agent in enumerate(agents):
        await agent.reply(*commands[stage], trace=trace_of(stage))
    assert await read_all(call) == [trace_of(stage) for stage in range(3)]


async def test_nothing_is_left_of_a_caller_that_went(site: Any) -> None:
    agents, _ = await site.deployed()
    call, commands = await asked(site, agents)
    assert site.coordinator.questions.traces.waiting == 3
    tasks = len(asyncio.all_tasks())
    call.cancel()
    async with asyncio.timeout(DEADLINE_S):
        while site.coordinator.questions.traces.waiting or len(asyncio.all_tasks()) >= tasks:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.005)
    await agents[0].reply(*commands[0], trace=trace_of(0))
    await site.heard(agents[0])


async def test_a_silent_node_is_named(site: Any) -> None:
    agents, _ = await site.deployed()
    for agent in agents:
        agent.held = {TraceSteps}
    traces = Traces(site.coordinator.loop, site.coordinator._hub, answer_limit_s=0.1)
    with pytest.raises(DeadlineError) as late:
        await traces.take(DeploymentName("tale"), 0.1)
    assert "from a, b, c within" in late.value.message and traces.waiting == 0


async def test_a_deployment_of_another_epoch_is_not_the_one_that_was_traced(site: Any) -> None:
    """The phases between may pass unseen: the trace goes by uid and epoch."""
    await site.deployed()
    name, state = DeploymentName("tale"), site.state
    record = state.deployments[name]
    assert still_runs(state, record)
    others = [
        replace(record, uid="another"),
        replace(record, epoch=Epoch(2)),
        replace(record, phase=DeploymentPhase.WAITING),
    ]
    for other in others:
        assert not still_runs(replace(state, deployments={name: other}), record)
    assert not still_runs(replace(state, deployments={}), record)
