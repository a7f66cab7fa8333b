"""Deployments that are planned again while they serve, over real sockets: nodes and heads are
scripted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from edgeshard_coordinator.core.placement.planned import PlanningPlacer

from edgeshard.domain.control.commands import PrepareStage
from edgeshard.domain.control.site import ReplanReason, ReplanResult
from edgeshard.domain.deployments.placement import ExplicitStage
from edgeshard.domain.errors import (
    DataLossError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.models.model import LayerRange
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire.site import replan_from_wire
from tests.coordinator.control.test_full_disk import refusing
from tests.support.scripted_agent import DEADLINE_S, FakeAgent, FakeHead

pytestmark = pytest.mark.timing


@dataclass
class CountingPlacer(PlanningPlacer):
    """Counts how often it has to choose a placement itself, and spreads it over all nodes. These
    are equal and without measurements, and the product would stay on one."""

    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def place(self, problem: Any) -> Any:
        if not problem.spec.layers:
            self.asked.append(problem.spec.name)
            names = [node.name for node in problem.candidates if node.placeable]
            ends = [12 * (index + 1) // len(names) for index in range(len(names))]
            stages = zip(names, [0, *ends], ends, strict=False)
            problem = problem.with_spec(
                layers=tuple(ExplicitStage(n, LayerRange(first, end)) for n, first, end in stages)
            )
        return super().place(problem)


@pytest.fixture
def placer() -> CountingPlacer:
    return CountingPlacer()


@pytest.fixture
async def site(open_site: Any, placer: CountingPlacer) -> Any:
    return await open_site(placer=placer, retry_first_s=0.0, lease_s=0.0)


def layers(record_or_plan: Any) -> str:
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in record_or_plan.stages)


def call(operation_id: str = "op-replan", **changes: Any) -> pb.ReplanRequest:
    return pb.ReplanRequest(**{"operation_id": operation_id, "name": "tale", **changes})


async def replan(site: Any, *arguments: Any, **changes: Any) -> ReplanResult:
    return replan_from_wire(
        await site.admin.Replan(call(*arguments, **changes), timeout=DEADLINE_S)
    )


async def on_two(site: Any) -> tuple[list[FakeAgent], FakeHead]:
    """A deployment that was planned for nodes a and b."""
    agents = await site.connected("a", "b")
    await site.admin.Deploy(site.deploy_request(layers=()), timeout=DEADLINE_S)
    record = await site.until_phase("tale", "ready")
    assert layers(record.placement) == "a=0:6,b=6:12"
    return agents, agents[0].heads[-1]


async def test_a_deployment_moves_to_a_node_that_came_and_its_request_goes_on(site: Any) -> None:
    (a, _), head = await on_two(site)
    running = site.generate("r1")
    await head.accept((await head.next_start()).request_id)
    await head.token("r1", 3, 7)
    (c,) = await site.connected("c")
    done = await replan(site, force=True)
    assert done.changed and (layers(done.current), layers(done.found)) == (
        "a=0:6,b=6:12",
        "a=0:4,b=4:8,c=8:12",
    )
    record = await site.until_phase("tale", "ready", epoch=2)
    assert layers(record.placement) == "a=0:4,b=4:8,c=8:12"
    prepare = c.commands[0]
    assert isinstance(prepare, PrepareStage) and prepare.epoch == 2
    start = await a.heads[-1].next_start()
    assert start.request_id == "r1" and list(start.emitted_tokens) == [7]
    await a.heads[-1].accept("r1")
    await a.heads[-1].token("r1", 4, 8)
    await a.heads[-1].finish("r1")
    kinds = [(await site.read(running)) for _ in range(4)]
    assert [message.WhichOneof("message") for message in kinds] == [
        "started",
        "token",
        "token",
        "finished",
    ]
    assert [message.token.token for message in kinds[1:3]] == [7, 8]


async def test_a_call_takes_effect_once(site: Any) -> None:
    await on_two(site)
    await site.connected("c")
    first = await replan(site, force=True)
    await site.until_phase("tale", "ready", epoch=2)
    assert await replan(site, force=True) == first and site.state.deployments["tale"].epoch == 2
    assert (await replan(site, "", dry_run=True)).reason is ReplanReason.NOTHING_NEW
    stays = await replan(site, "op-2", force=True)
    assert stays.reason is ReplanReason.SAME_LAYERS
    await site.restart()
    assert (
        await replan(site, force=True) == first and await replan(site, "op-2", force=True) == stays
    )


async def test_what_a_dry_run_finds_is_kept_while_nothing_changes(
    site: Any, placer: CountingPlacer
) -> None:
    await on_two(site)
    asked = len(placer.asked)
    assert (await replan(site, "", dry_run=True)).reason is ReplanReason.NOTHING_NEW
    assert len(placer.asked) == asked, "it was planned for these nodes"
    await site.connected("c")
    for reason in (ReplanReason.NOT_WEIGHED, ReplanReason.NOTHING_NEW):
        plan = await replan(site, "", dry_run=True)
        assert (
            plan.reason is reason
            and layers(plan.found) == "a=0:4,b=4:8,c=8:12"
            and "not measured" in plan.note
        )
    for _ in range(2):
        assert (await replan(site, "", dry_run=True, force=True)).reason is ReplanReason.WOULD_MOVE
    assert len(placer.asked) == asked + 1
    assert site.state.deployments["tale"].epoch == 1
    assert (await replan(site)).reason is ReplanReason.NOT_WEIGHED, (
        "without a gain that is known nothing moves"
    )
    assert len(placer.asked) == asked + 2 and site.state.deployments["tale"].epoch == 1


async def test_a_placement_of_a_recovery_is_planned_again_once_the_node_is_back(site: Any) -> None:
    """Although its nodes equal the first plan's."""
    (_, b), _ = await on_two(site)
    await b.vanish()
    record = await site.until_phase("tale", "ready", epoch=2)
    assert layers(record.placement) == "a=0:12"
    await b.restart()
    await site.until(lambda state: state.is_connected(b.node_id))
    plan = await replan(site, "", dry_run=True, force=True)
    assert plan.reason is ReplanReason.WOULD_MOVE and layers(plan.found) == "a=0:6,b=6:12"


async def test_a_node_that_cannot_load_sends_it_back_to_what_it_had(site: Any) -> None:
    (a, _), head = await on_two(site)
    running = site.generate("r1")
    await head.accept((await head.next_start()).request_id)
    (c,) = await site.connected("c")
    c.answer = lambda command: DataLossError("a tensor does not match its digest")
    assert (await replan(site, force=True)).changed
    record = await site.until_phase("tale", "ready", epoch=3)
    assert layers(record.placement) == "a=0:6,b=6:12" and record.former is None
    again = a.heads[-1]
    assert (await again.next_start()).request_id == "r1"
    await again.accept("r1")
    await again.token("r1", 3, 7)
    await again.finish("r1")
    assert [(await site.read(running)).WhichOneof("message") for _ in range(3)] == [
        "started",
        "token",
        "finished",
    ]


async def test_a_request_that_comes_while_it_moves_waits_for_its_end(site: Any) -> None:
    (a, _), _ = await on_two(site)
    (c,) = await site.connected("c")
    c.held.add(PrepareStage)
    assert (await replan(site, force=True)).changed
    operation, command = await c.take_pending()
    running = site.generate("r1")
    await site.until(lambda state: site.coordinator.front.active_requests("tale") == 1)
    await c.reply(operation, command)
    await site.until_phase("tale", "ready", epoch=2)
    assert (await a.heads[-1].next_start()).request_id == "r1"
    running.cancel()


async def test_a_move_that_cannot_be_saved_leaves_it_at_work(site: Any, failing: Any) -> None:
    _, head = await on_two(site)
    (c,) = await site.connected("c")
    running = site.generate("r1")
    await head.accept((await head.next_start()).request_id)
    assert (await site.read(running)).HasField("started")
    with refusing(site.state_path):
        async with failing(InternalError):
            await replan(site, force=True)
    record = site.state.deployments["tale"]
    assert (record.phase, record.epoch) == ("ready", 1) and not c.commands
    await head.token("r1", 3, 7)
    assert (await site.read(running)).token.token == 7, "its requests go on"
    assert (await replan(site, force=True)).changed
    await site.until_phase("tale", "ready", epoch=2)
    running.cancel()


async def test_who_cannot_move_says_why(site: Any, failing: Any) -> None:
    async with failing(NotFoundError) as caught:
        await replan(site, name="nobody")
    assert caught[0].field == "name"
    agents, _ = await site.deployed()
    for dry_run in (False, True):
        async with failing(FailedPreconditionError) as caught:
            await replan(site, dry_run=dry_run)
        assert caught[0].reason == "PLACED_BY_HAND" and "--layers" in caught[0].message
    agents[0].held.add(PrepareStage)
    await site.admin.Deploy(
        site.deploy_request("op-2", name="other", layers=()), timeout=DEADLINE_S
    )
    async with failing(UnavailableError) as caught:
        await replan(site, name="other")
    assert caught[0].reason == "DEPLOYMENT_NOT_READY" and caught[0].retry_after_s
