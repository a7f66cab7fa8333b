"""Slices of a timeline against a real coordinator and scripted nodes: one recording for all, never
an operator's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from edgeshard_coordinator.control.services.auditing import CallAudit
from edgeshard_coordinator.dashboard.timeline import EVERY_S, LOOKS_ON_S, SLICE_S, TAKEN, Timeline

from edgeshard.domain.control.commands import TraceSteps
from edgeshard.domain.errors import AbortedError, NotFoundError
from edgeshard.domain.identity import Principal, Role
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.trace import StageTrace, StepRecord
from edgeshard.proto.v1 import admin_pb2
from edgeshard.rpc.access import CallFrom

pytestmark = pytest.mark.timing

TALE = DeploymentName("tale")
ANNA, BERT = (
    CallFrom("127.0.0.1:9", Principal("here", Role.OPERATOR, name), True)
    for name in ("anna", "bert")
)


class Looking:
    """A timeline over a site of three nodes whose traces the test answers."""

    def __init__(self, site: Any) -> None:
        self.site = site
        self.now = 100.0
        self.agents = list[Any]()
        audit = CallAudit(site.coordinator.audit)
        self.timeline = Timeline(site.coordinator.questions.traces, audit, lambda: self.now)

    async def deploy(self) -> None:
        self.agents, _ = await self.site.deployed()
        for agent in self.agents:
            agent.held = {TraceSteps}

    def look(self, source: CallFrom = ANNA) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self.timeline.look(source, TALE))

    async def commands(self) -> list[Any]:
        return [await agent.take_pending() for agent in self.agents]

    async def answer(self, commands: list[Any]) -> None:
        for stage, (agent, command) in enumerate(zip(self.agents, commands, strict=True)):
            record = StepRecord(3, 1, 0, 1.0, 1.5, 2.0, 2.25, 4.0 if stage == 0 else 0.0)
            trace = StageTrace(stage, "abc"[stage], LayerRange(stage, stage + 1), (record,))
            await agent.reply(*command, trace=trace)

    def asked(self) -> int:
        return sum(isinstance(command, TraceSteps) for command in self.agents[0].commands)

    async def audited(self) -> list[str]:
        return [
            entry.who
            for entry in await self.site.coordinator.audit.newest(20)
            if entry.what == "Trace"
        ]


@pytest.fixture
async def looking(site: Any) -> Looking:
    found = Looking(site)
    await found.deploy()
    return found


async def test_all_who_look_share_one_recording(looking: Looking) -> None:
    first, second = looking.look(), looking.look(BERT)
    commands = await looking.commands()
    assert commands[0][1] == TraceSteps(TALE, Epoch(1), SLICE_S)
    late = looking.look()
    await asyncio.sleep(0)
    first.cancel()
    await looking.answer(commands)
    found = await second
    assert [stage["node"] for stage in found["stages"]] == ["a", "b", "c"] and await late is found
    looking.now += EVERY_S - 0.1
    assert await looking.look() is found and looking.asked() == 1
    looking.now += 0.2
    newer = looking.look()
    await looking.answer(await looking.commands())
    assert await newer is not found and looking.asked() == 2


async def test_nothing_is_recorded_while_nobody_looks(looking: Looking) -> None:
    look = looking.look()
    await looking.answer(await looking.commands())
    await look
    looking.now += 100 * EVERY_S
    await looking.site.heard(looking.agents[0])
    assert looking.asked() == 1 and looking.site.coordinator.questions.traces.waiting == 0


async def test_an_operators_trace_is_not_displaced(looking: Looking) -> None:
    call = looking.site.admin.Trace(admin_pb2.TraceRequest(deployment="tale", seconds=0.5))
    commands = await looking.commands()
    assert await looking.look() == TAKEN and looking.asked() == 1
    await looking.answer(commands)
    assert len([stage async for stage in call]) == 3
    look = looking.look()
    await looking.answer(await looking.commands())
    assert (await look)["stages"]


async def test_an_operators_trace_that_begins_ends_ours(looking: Looking) -> None:
    looks = [looking.look(), looking.look(BERT)]
    commands = await looking.commands()
    replaced = AbortedError("another trace of tale began meanwhile", reason="TRACE_REPLACED")
    await looking.agents[1].reply(*commands[1], replaced)
    assert await asyncio.gather(*looks) == [TAKEN, TAKEN]


async def test_what_cannot_be_recorded_is_said_and_tried_again(looking: Looking) -> None:
    with pytest.raises(NotFoundError) as unknown:
        await looking.timeline.look(ANNA, DeploymentName("nothing"))
    assert unknown.value.field == "deployment"
    look = looking.look()
    commands = await looking.commands()
    await looking.agents[2].reply(*commands[2], AbortedError("no memory", reason="NO_MEMORY"))
    with pytest.raises(AbortedError) as failed:
        await look
    assert "node c" in failed.value.message
    again = looking.look()
    await looking.answer(await looking.commands())
    assert (await again)["stages"]


async def test_the_audit_log_has_one_entry_of_each_who_looks_on(looking: Looking) -> None:
    for source in (ANNA, BERT, ANNA):
        looking.now += 0.6 * LOOKS_ON_S
        look = looking.look(source)
        await looking.answer(await looking.commands())
        await look
    looking.now += 0.6 * LOOKS_ON_S
    again = looking.look(BERT)
    await looking.answer(await looking.commands())
    await again
    assert sorted(await looking.audited()) == [
        "operator/anna",
        "operator/anna",
        "operator/bert",
        "operator/bert",
    ]
