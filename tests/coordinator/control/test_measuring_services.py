"""Nodes that measure themselves, and operators who ask for it, against a real coordinator over real
sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.control.runtime import node_reports
from edgeshard_coordinator.control.runtime.planner import Planner
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer
from edgeshard_coordinator.core.values.measurements import MAX_PROFILES, Measurements

from edgeshard.domain.control.commands import Command, MeasureCompute, ProbeLinks, ProfileReport
from edgeshard.domain.control.site import UnknownFigures, UnknownProfile
from edgeshard.domain.errors import (
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.ids import ModelName, NodeId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    Effort,
    LayerKind,
    LinkProfile,
    MeasuredLink,
    Sample,
    config_hash,
)
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1.common_pb2 import DATA_TYPE_FLOAT32
from edgeshard.wire.codec import from_failure
from edgeshard.wire.control import report_from_wire, report_to_wire
from edgeshard.wire.site import (
    compute_profile_from_wire,
    deployment_from_wire,
    link_from_wire,
    node_details_from_wire,
    node_from_wire,
    placement_from_wire,
)

pytestmark = pytest.mark.timing

DEADLINE_S = 30.0
LINK = LinkProfile(1e-3, 1e9, 0.0, 9, 1 << 20)


@pytest.fixture
def measuring(make_manifest: Any, make_profile: Any) -> Any:
    """Make an agent report the requested measurements: blocks of `seconds` each, and a link to
    every peer."""
    config = make_manifest().config

    def install(agent: Any, block_s: float = 1e-3) -> ComputeProfile:
        profile: ComputeProfile = make_profile(config, block_s, DType.FLOAT32)

        def measured(command: Command) -> ProfileReport | None:
            if isinstance(command, MeasureCompute):
                return ProfileReport(agent.node_id, compute=(profile,))
            if isinstance(command, ProbeLinks):
                links = tuple(
                    MeasuredLink(agent.node_id, peer.node_id, LINK) for peer in command.peers
                )
                return ProfileReport(agent.node_id, links=links)
            return None

        agent.measured = measured
        return profile

    return install


def profile_request(
    *nodes: str, operation_id: str = "op-p", model: str = "tiny", **more: Any
) -> admin_pb2.ProfileRequest:
    return admin_pb2.ProfileRequest(
        operation_id=operation_id, model=model, dtype=DATA_TYPE_FLOAT32, nodes=nodes, **more
    )


async def rest(call: Any) -> dict[str, admin_pb2.ProfileResponse]:
    """Read a call to its end: the last message of every node."""
    last: dict[str, admin_pb2.ProfileResponse] = {}
    while (message := await asyncio.wait_for(call.read(), DEADLINE_S)) is not grpc.aio.EOF:
        assert not (message.node in last and last[message.node].finished), (
            "a message behind a node's last"
        )
        last[message.node] = message
    return last


async def test_nodes_are_measured_and_shown(site: Any, measuring: Any) -> None:
    a, b = await site.connected("a", "b")
    profile = measuring(a)
    measuring(b)
    last = await rest(
        site.admin.Profile(profile_request(quick=True, again=True), timeout=DEADLINE_S)
    )
    assert {name: (m.finished, m.HasField("failure")) for name, m in last.items()} == {
        "a": (True, False),
        "b": (True, False),
    }
    measure = a.commands[0]
    assert isinstance(measure, MeasureCompute) and (
        measure.dtype,
        measure.effort,
        measure.again,
    ) == (
        DType.FLOAT32,
        Effort.QUICK,
        True,
    )
    assert config_hash(measure.config) == profile.model_hash
    probe = a.commands[1]
    assert [(p.node_id, p.name, p.address) for p in probe.peers] == [("id-b", "b", "b:7000")]
    shown = await site.admin.GetNode(admin_pb2.GetNodeRequest(node="a"), timeout=DEADLINE_S)
    assert node_from_wire(shown.node).name == "a"
    (stored,) = shown.profiles
    assert compute_profile_from_wire(stored.profile) == profile
    assert list(stored.models) == ["tiny"] and 0 <= stored.age_s < DEADLINE_S
    assert {(link.sender_id, link.receiver_id) for link in shown.links} == {
        ("id-a", "id-b"),
        ("id-b", "id-a"),
    }
    assert link_from_wire(shown.links[0]).profile == LINK and 0 <= shown.links[0].age_s < DEADLINE_S
    whole = await site.admin.GetSite(admin_pb2.GetSiteRequest(model="tiny"), timeout=DEADLINE_S)
    assert [node.name for node in whole.nodes] == ["a", "b"] and len(whole.links) == 2
    assert sorted(stored.node_id for stored in whole.profiles) == ["id-a", "id-b"]
    assert whole.config_json.decode() == site.models.get("tiny")[0].config_json
    bare = await site.admin.GetSite(admin_pb2.GetSiteRequest(), timeout=DEADLINE_S)
    assert len(bare.nodes) == 2 and not bare.profiles and not bare.config_json


async def test_progress_reaches_the_caller(site: Any) -> None:
    (a,) = await site.connected("a")
    a.held = {MeasureCompute}
    call = site.admin.Profile(profile_request("a"), timeout=DEADLINE_S)
    first = await site.read(call)
    assert (first.node, first.done, first.what, first.finished) == ("a", 0, "waiting", False)
    operation_id, command = await a.take_pending()
    await a.progress(operation_id, 3, 40, "block, decode, 8 sequences")
    told = await site.read(call)
    assert (told.done, told.total, told.what) == (3, 40, "block, decode, 8 sequences")
    await a.progress("another/0/measure/0", 9, 9, "of a call that is not")
    await a.progress("no command's id", 9, 9, "refused, and the stream goes on")
    await a.reply(operation_id, command)
    last = (await rest(call))["a"]
    assert last.finished and last.done == last.total == 40


async def test_a_node_that_cannot_does_not_stop_the_others(site: Any, measuring: Any) -> None:
    a, b = await site.connected("a", "b")
    measuring(b)
    a.answer = lambda command: (
        InternalError("no room for one layer") if isinstance(command, MeasureCompute) else None
    )
    last = await rest(site.admin.Profile(profile_request(), timeout=DEADLINE_S))
    assert from_failure(last["a"].failure).message == "no room for one layer" and last["a"].finished
    assert last["b"].finished and not last["b"].HasField("failure")


async def test_a_node_that_goes_away_ends_its_part(site: Any, measuring: Any) -> None:
    a, b = await site.connected("a", "b")
    measuring(b)
    a.held = {MeasureCompute}
    call = site.admin.Profile(profile_request(), timeout=DEADLINE_S)
    await a.take_pending()
    await a.vanish()
    last = await rest(call)
    failure = from_failure(last["a"].failure)
    assert isinstance(failure, UnavailableError) and "node a disconnected" in failure.message
    assert last["b"].finished and not last["b"].HasField("failure")


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"model": "nothing"}, NotFoundError, "model"),
        ({"dtype": 0}, InvalidArgumentError, "dtype"),
        ({"nodes": ["a", "q"]}, NotFoundError, "nodes"),
        ({"nodes": ["a", "away"]}, UnavailableError, "nodes"),
        ({"operation_id": ""}, InvalidArgumentError, "operation_id"),
    ],
)
async def test_a_refused_call_changes_nothing(
    site: Any, failing: Any, changes: dict[str, Any], kind: type[EdgeShardError], field: str
) -> None:
    (a,) = await site.connected("a")
    await site.agent("away").register()
    values = {"operation_id": "op-p", "model": "tiny", "dtype": DATA_TYPE_FLOAT32, **changes}
    async with failing(kind) as caught:
        await site.admin.Profile(admin_pb2.ProfileRequest(**values), timeout=DEADLINE_S).read()
    assert caught[0].field == field
    assert not site.state.jobs and not a.commands
    async with failing(NotFoundError):
        await site.admin.GetSite(admin_pb2.GetSiteRequest(model="nothing"), timeout=DEADLINE_S)


async def test_a_site_without_nodes(site: Any, failing: Any) -> None:
    async with failing(UnavailableError) as caught:
        await site.admin.Profile(profile_request(), timeout=DEADLINE_S).read()
    assert caught[0].field == "nodes"


async def test_measuring_outlives_its_caller_and_a_repeat_follows_on(
    site: Any, measuring: Any, failing: Any
) -> None:
    (a,) = await site.connected("a")
    measuring(a)
    a.held = {MeasureCompute}
    first = site.admin.Profile(profile_request("a"), timeout=DEADLINE_S)
    await site.read(first)
    first.cancel()
    operation_id, command = await a.take_pending()
    second = site.admin.Profile(profile_request("a"), timeout=DEADLINE_S)
    assert (await site.read(second)).node == "a"
    await a.reply(operation_id, command)
    assert (await rest(second))["a"].finished
    again = await rest(site.admin.Profile(profile_request("a"), timeout=DEADLINE_S))
    assert again["a"].finished and a.kinds() == [MeasureCompute], "nothing was measured twice"
    async with failing(InvalidArgumentError) as caught:
        await site.admin.Profile(profile_request("a", quick=True), timeout=DEADLINE_S).read()
    assert caught[0].field == "operation_id"
    assert len((await site.admin.GetNode(admin_pb2.GetNodeRequest(node="a"))).profiles) == 1


async def test_links_alone(site: Any, measuring: Any) -> None:
    agents = await site.connected("a", "b", "c")
    for agent in agents:
        measuring(agent)
    last = await rest(site.admin.Profile(profile_request(model=""), timeout=DEADLINE_S))
    assert all(message.finished for message in last.values())
    assert all(agent.kinds() == [ProbeLinks] for agent in agents)
    assert sum(len(known.links) for known in site.state.measured.values()) == 6


async def test_a_quiet_site_measures_its_links_by_itself(open_site: Any, measuring: Any) -> None:
    site = await open_site(probe_quiet_s=0.2)
    for agent in await site.connected("a", "b", "c"):
        measuring(agent)
    await site.until(lambda state: sum(len(known.links) for known in state.measured.values()) == 6)


async def test_a_node_that_joins_is_measured_by_itself_and_until_then_said_to_be_unknown(
    open_site: Any, measuring: Any
) -> None:
    site = await open_site(probe_quiet_s=0.2)
    a, b = await site.connected("a", "b")
    for agent in (a, b):
        measuring(agent)
    await rest(site.admin.Profile(profile_request(), timeout=DEADLINE_S))
    (c,) = await site.connected("c")
    measuring(c)
    c.held = {MeasureCompute}
    operation_id, command = await c.take_pending()
    assert isinstance(command, MeasureCompute) and (command.dtype, command.effort) == (
        DType.FLOAT32,
        Effort.FULL,
    )
    await site.until(lambda state: sum(len(known.links) for known in state.measured.values()) == 6)
    assert await unknown_by_name(site) == {"a": (0, 0), "b": (0, 0), "c": (1, 0)}
    shown = node_details_from_wire(
        await site.admin.GetNode(admin_pb2.GetNodeRequest(node="c"), timeout=DEADLINE_S)
    )
    assert shown.unknown == UnknownFigures((UnknownProfile((ModelName("tiny"),), DType.FLOAT32),))
    await c.reply(operation_id, command)
    await site.until(lambda state: state.measured[c.node_id].profiles)
    assert await unknown_by_name(site) == {"a": (0, 0), "b": (0, 0), "c": (0, 0)}


async def unknown_by_name(site: Any) -> dict[str, tuple[int, int]]:
    answer = await site.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=DEADLINE_S)
    nodes = map(node_from_wire, answer.nodes)
    return {str(node.name): (node.unknown_profiles, node.unknown_links) for node in nodes}


@pytest.mark.parametrize("copies", [False, True])
async def test_a_deleted_model_is_not_unknown_unless_another_has_its_shape(
    site: Any, measuring: Any, copies: bool
) -> None:
    a, _ = await site.connected("a", "b")
    measuring(a)
    await rest(site.admin.Profile(profile_request("a"), timeout=DEADLINE_S))
    assert await unknown_by_name(site) == {"a": (0, 0), "b": (1, 1)}
    if copies:
        site.models.manifests["copy"] = replace(
            site.models.manifests["tiny"], name=ModelName("copy")
        )
    await site.admin.DeleteModel(
        admin_pb2.DeleteModelRequest(name="tiny", operation_id="d"), timeout=DEADLINE_S
    )
    if not copies:
        await site.until(lambda state: not state.configs)
    assert await unknown_by_name(site) == {"a": (0, 0), "b": (int(copies), 1)}


async def test_a_deployed_model_is_unknown_of_nodes_also_after_a_restart(site: Any) -> None:
    await site.connected("a", "b", "c")
    await site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    await site.until_phase("tale", "ready")
    assert (await unknown_by_name(site))["c"] == (1, 2)
    await site.restart()
    assert (await unknown_by_name(site))["c"] == (1, 0), "no node is there to send to"


async def test_measurements_outlive_the_coordinator(site: Any, measuring: Any) -> None:
    for agent in await site.connected("a", "b"):
        measuring(agent)
    await rest(site.admin.Profile(profile_request(), timeout=DEADLINE_S))
    before = site.state.measured
    await site.restart()
    assert site.state.measured.keys() == before.keys()
    for node_id, known in before.items():
        restored = site.state.measured[node_id]
        assert {key: value.value for key, value in restored.profiles.items()} == {
            key: value.value for key, value in known.profiles.items()
        }
        assert restored.links.keys() == known.links.keys()


@pytest.mark.parametrize("restarts", [False, True])
async def test_layers_measured_on_a_busy_node_are_measured_again(
    open_site: Any, measuring: Any, restarts: bool
) -> None:
    site = await open_site(retake_quiet_s=0.2, retake_first_s=1e9 if restarts else 0.2)
    (a,) = await site.connected("a")
    quiet = measuring(a)

    def measured(command: Command) -> ProfileReport | None:
        assert isinstance(command, MeasureCompute)
        return ProfileReport(
            a.node_id, compute=(quiet if command.again else replace(quiet, others_share=0.3),)
        )

    a.measured = measured
    await rest(site.admin.Profile(profile_request(), timeout=DEADLINE_S))
    if restarts:
        await site.restart()
        (again,) = await site.connected("a")
        again.measured = measured

    def of_a_quiet_node(state: Any) -> bool:
        return [known.value for known in state.measured[a.node_id].profiles.values()] == [quiet]

    await site.until(of_a_quiet_node)
    assert not site.state.retakes or site.state.jobs, "the answer comes behind the report"
    await site.until(lambda state: not state.retakes and not state.jobs)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_deployment_asks_a_node_that_measured_something_else_when_it_came(
    site: Any, measuring: Any, fails: bool
) -> None:
    a, b = await site.connected("a", "b")
    for agent in (a, b):
        measuring(agent)
        agent.held = {ProbeLinks, MeasureCompute}
    links = site.admin.Profile(profile_request("b", model=""), timeout=DEADLINE_S)
    await site.read(links)
    probing = await b.take_pending()
    request = site.deploy_request(layers="a=0:6,b=6:12")
    request.measure_s = DEADLINE_S
    call = asyncio.ensure_future(site.admin.Deploy(request, timeout=2 * DEADLINE_S))
    b.held = set()
    if fails:
        b.answer = lambda command: (
            InternalError("no") if isinstance(command, MeasureCompute) else None
        )
    a.held = set()
    # layers wait for probes
    await site.until(lambda state: any(job.node_id == a.node_id for job in state.jobs))
    await b.reply(*probing)
    await asyncio.wait_for(call, DEADLINE_S)
    assert [kind for kind in b.kinds() if kind in (ProbeLinks, MeasureCompute)][:2] == [
        ProbeLinks,
        MeasureCompute,
    ]
    assert b.kinds().count(MeasureCompute) == 1, "it is asked once, also where it cannot"
    assert bool(site.state.measured[b.node_id].profiles) is not fails


async def test_a_report_that_cannot_be_used_is_refused(
    site: Any, failing: Any, measuring: Any
) -> None:
    (a,) = await site.connected("a")
    profile = measuring(a)
    headless = replace(
        profile, layers=tuple(layer for layer in profile.layers if layer.kind is not LayerKind.HEAD)
    )
    empty = replace(profile, layers=tuple(replace(layer, decode=()) for layer in profile.layers))
    foreign = MeasuredLink(NodeId("id-b"), NodeId("id-a"), LINK)
    nowhere = MeasuredLink(NodeId("id-a"), NodeId("id-z"), LINK)
    for report, kind in (
        (ProfileReport(a.node_id, compute=(headless,)), InvalidArgumentError),
        (ProfileReport(a.node_id, compute=(empty,)), InvalidArgumentError),
        (ProfileReport(a.node_id, links=(foreign,)), InvalidArgumentError),
        (ProfileReport(a.node_id, links=(nowhere,)), NotFoundError),
        (ProfileReport(NodeId("id-z"), compute=(profile,)), NotFoundError),
    ):
        async with failing(kind):
            await a.stub.ReportProfile(report_to_wire(report), timeout=DEADLINE_S)
    assert not site.state.measured


def of_samples(profile: ComputeProfile, samples: tuple[Sample, ...]) -> ComputeProfile:
    return replace(
        profile, layers=tuple(replace(layer, prefill=samples) for layer in profile.layers)
    )


@pytest.mark.parametrize(
    ("samples", "field"),
    [
        (tuple(Sample(1, 0, 1e-3) for _ in range(200_000)), "compute.layers.prefill"),
        (tuple(Sample(count + 1, 0, 1e-3) for count in range(200)), "compute.layers.prefill"),
        ((Sample(1, 0, 5e-324),), "compute.layers.prefill.seconds"),
    ],
    ids=["samples", "counts", "seconds"],
)
async def test_a_profile_that_costs_too_much_to_fit_is_refused_at_once(
    site: Any, failing: Any, measuring: Any, samples: tuple[Sample, ...], field: str
) -> None:
    """Memory and time of a fit grow with the square of its samples and more."""
    (a,) = await site.connected("a")
    report = report_to_wire(ProfileReport(a.node_id, compute=(of_samples(measuring(a), samples),)))
    began = time.process_time()
    with pytest.raises(InvalidArgumentError) as refused:
        report_from_wire(report)
    assert time.process_time() - began < 0.1 and refused.value.field == field
    async with failing(InvalidArgumentError) as caught:
        await a.stub.ReportProfile(report, timeout=DEADLINE_S)
    assert caught[0].field == field and not site.state.measured


async def test_a_fit_is_off_the_event_loop_and_one_at_a_time_for_a_node(
    site: Any, failing: Any, measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = await site.connected("a")
    report = report_to_wire(ProfileReport(a.node_id, compute=(measuring(a),)))
    begun, end = threading.Event(), threading.Event()

    def slow(profile: ComputeProfile) -> None:
        begun.set()
        assert end.wait(DEADLINE_S)

    monkeypatch.setattr(node_reports, "check_profile", slow)
    first = a.stub.ReportProfile(report, timeout=DEADLINE_S)
    await asyncio.to_thread(begun.wait, DEADLINE_S)
    async with failing(UnavailableError) as caught:
        await a.stub.ReportProfile(report, timeout=DEADLINE_S)
    assert caught[0].reason == "PROFILE_UNDER_CHECK"
    end.set()
    await first
    assert site.state.measured[a.node_id].profiles


async def test_the_profiles_of_a_node_have_a_bound(measuring: Any, site: Any) -> None:
    (a,) = await site.connected("a")
    profile, known = measuring(a), Measurements()
    for number in range(MAX_PROFILES + 3):
        named = replace(profile, model_hash=f"{number:016x}")
        known = known.reported(ProfileReport(a.node_id, compute=(named,)), float(number))
    hashes = [key[0] for key in known.profiles]
    assert (
        len(hashes) == MAX_PROFILES
        and hashes[-1] == f"{MAX_PROFILES + 2:016x}"
        and f"{2:016x}" not in hashes
    )


async def test_a_measured_site_is_planned(site: Any, measuring: Any) -> None:
    a, b = await site.connected("a", "b")
    measuring(a, 1e-2)
    measuring(b, 1e-3)
    request = site.deploy_request(layers=(), objective="latency")
    before = await site.admin.Plan(admin_pb2.PlanRequest(spec=request.spec), timeout=DEADLINE_S)
    assert (
        not before.placement.HasField("predicted")
        and "not measured for tiny" in before.placement.note
    )
    await rest(site.admin.Profile(profile_request(), timeout=DEADLINE_S))
    after = placement_from_wire(
        (
            await site.admin.Plan(admin_pb2.PlanRequest(spec=request.spec), timeout=DEADLINE_S)
        ).placement
    )
    assert after.predicted is not None and [stage.node_name for stage in after.stages] == ["a", "b"]
    assert len(after.stages[0].layers) == 1 and not after.note
    await site.admin.Deploy(request, timeout=DEADLINE_S)
    await site.until_phase("tale", "ready")
    shown = await site.admin.GetDeployment(
        admin_pb2.GetDeploymentRequest(name="tale"), timeout=DEADLINE_S
    )
    assert deployment_from_wire(shown.deployment).placement == after
    await site.restart()
    assert site.state.deployments["tale"].placement == after


class SlowPlacer:
    """Works until it is let go, in whichever thread it was called."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def place(self, problem: Any) -> Any:
        self.begun.set()
        assert self.released.wait(DEADLINE_S)
        return SimplePlacer().place(problem.spec, problem.manifest, problem.candidates)


async def test_nobody_waits_for_a_long_solve(open_site: Any, measuring: Any) -> None:
    placer = SlowPlacer()
    site = await open_site(placer=placer)
    a, *_ = await site.connected("a", "b", "c")
    deploying = asyncio.ensure_future(site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S))
    await asyncio.to_thread(placer.begun.wait, DEADLINE_S)
    await site.heard(a)
    shown = await site.admin.GetNode(admin_pb2.GetNodeRequest(node="a"), timeout=DEADLINE_S)
    assert node_from_wire(shown.node).connected
    measuring(a)
    await rest(site.admin.Profile(profile_request("a"), timeout=DEADLINE_S))
    assert not deploying.done()
    placer.released.set()
    await deploying
    await site.until_phase("tale", "ready")


async def test_a_deployment_has_unmeasured_nodes_measured_first(site: Any, measuring: Any) -> None:
    for agent in await site.connected("a", "b"):
        measuring(agent)
    request = site.deploy_request(layers=())
    request.measure_s = DEADLINE_S
    deployed = deployment_from_wire(
        (await site.admin.Deploy(request, timeout=DEADLINE_S)).deployment
    )
    assert (
        deployed.placement.predicted is not None and "not measured" not in deployed.placement.note
    )
    assert not site.state.jobs


async def test_a_deployment_is_planned_again_only_where_something_was_measured_for_it(
    site: Any, measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objections are reported before any caller waits. If nothing is to be measured, one plan
    serves for both."""
    planned, place = list[str](), Planner.place_replicas

    async def counting(planner: Planner, state: Any, spec: Any, *rest: Any) -> Any:
        planned.append(spec.name)
        return await place(planner, state, spec, *rest)

    monkeypatch.setattr(Planner, "place_replicas", counting)
    for agent in await site.connected("a", "b"):
        measuring(agent)
    for name in ("tale", "other"):
        request = site.deploy_request(layers=(), operation_id=f"op-{name}")
        request.spec.name, request.measure_s = name, DEADLINE_S
        await site.admin.Deploy(request, timeout=DEADLINE_S)
    assert planned == ["tale", "tale", "other"]


async def test_what_is_not_measured_in_time_is_named_and_assumed(site: Any, measuring: Any) -> None:
    a, b = await site.connected("a", "b")
    measuring(b)
    a.held.add(MeasureCompute)
    request = site.deploy_request(layers=())
    request.measure_s = 1.0
    deployed = deployment_from_wire(
        (await site.admin.Deploy(request, timeout=DEADLINE_S)).deployment
    )
    assert [stage.node_name for stage in deployed.placement.stages] == ["a"]
    assert deployed.placement.note.startswith(
        "Placed by memory, on as few nodes as hold it: not measured for tiny"
    )
    assert deployed.placement.predicted is None
    assert [type(command) for command in a.commands].count(MeasureCompute) == 1


async def test_two_deployments_share_a_measurement(site: Any, measuring: Any) -> None:
    a, b = await site.connected("a", "b")
    for agent in (a, b):
        measuring(agent)
    a.held.add(MeasureCompute)
    calls = []
    for name in ("tale", "other"):
        request = site.deploy_request(layers=(), operation_id=f"op-{name}")
        request.spec.name, request.measure_s = name, DEADLINE_S
        calls.append(asyncio.ensure_future(site.admin.Deploy(request, timeout=DEADLINE_S)))
        await a.until(lambda agent: bool(agent.pending))
    await asyncio.sleep(0.1)
    assert not any(call.done() for call in calls) and len(a.pending) == 1
    await a.reply(*a.pending.pop())
    for call in calls:
        assert deployment_from_wire((await call).deployment).placement.predicted is not None
    for agent in (a, b):
        assert [type(command) for command in agent.commands].count(MeasureCompute) == 1


async def test_a_measurement_that_fails_fails_no_deployment(site: Any) -> None:
    for agent in await site.connected("a", "b"):
        agent.answer = lambda command: (
            InternalError("broken") if isinstance(command, MeasureCompute) else None
        )
    request = site.deploy_request(layers=())
    request.measure_s = DEADLINE_S
    deployed = deployment_from_wire(
        (await site.admin.Deploy(request, timeout=DEADLINE_S)).deployment
    )
    assert [stage.node_name for stage in deployed.placement.stages] == ["a"]


@pytest.mark.parametrize("seconds", [-1.0, 601.0, float("nan"), float("inf")])
async def test_a_time_to_measure_for_that_cannot_be(site: Any, seconds: float) -> None:
    await site.connected("a")
    request = site.deploy_request()
    request.measure_s = seconds
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await site.admin.Deploy(request, timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and not site.state.deployments
