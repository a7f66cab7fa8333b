"""Deployments on a real site: refused calls change nothing, and a death is noticed, reported, and
mended on return."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeshard import WIRE_VERSION, Client
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import (
    AbortedError,
    AlreadyExistsError,
    DataLossError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    PlacementError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedModelError,
    WireVersionError,
)
from edgeshard.proto.v1 import common_pb2, coordinator_pb2
from edgeshard.proto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from edgeshard.rpc.channel import open_channel
from edgeshard.wire.status import from_rpc_error
from tests.support.site import MakeSpec, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"layers": "a=0:4,b=5:9,c=9:12"}, PlacementError, "LAYER_GAP"),
        ({"layers": "a=0:4,b=3:9,c=9:12"}, PlacementError, "LAYER_OVERLAP"),
        ({"layers": "a=0:4,b=4:9,c=9:13"}, PlacementError, "LAYER_OUT_OF_RANGE"),
        ({"layers": "a=0:4,b=4:9"}, PlacementError, "LAYER_GAP"),
        ({"layers": "b=0:4,a=4:12"}, PlacementError, "SOURCE_NOT_FIRST"),
        (
            {"layers": "a=0:12", "concurrency": 4096, "max_context": 512, "reserve": {"a": 2**40}},
            ResourceExhaustedError,
            None,
        ),
        ({"model": "nothing"}, NotFoundError, None),
        ({"source": "nobody", "layers": None}, EdgeShardError, None),
        ({"max_context": 513}, InvalidArgumentError, None),
    ],
    ids=str,
)
async def test_a_wrong_deployment_is_refused_and_changes_nothing(
    site: Site,
    make_spec: MakeSpec,
    changes: dict[str, Any],
    kind: type[EdgeShardError],
    reason: str | None,
) -> None:
    before = await site.state()
    with pytest.raises((InvalidArgumentError, kind)) as refusal:
        await site.client.deploy(make_spec(**changes))
    assert isinstance(refusal.value, (kind, InvalidArgumentError)) and refusal.value.field
    assert reason is None or refusal.value.reason == reason
    assert await site.state() == before


async def test_a_node_without_memory_for_its_share_says_how_much_is_short(
    site: Site, make_spec: MakeSpec
) -> None:
    with pytest.raises(ResourceExhaustedError) as refusal:
        await site.client.deploy(make_spec(reserve={"b": 2**40}))
    assert "b" in refusal.value.message and "short" in refusal.value.message


async def test_layers_in_proportion_to_memory_when_none_are_given(
    site: Site, make_spec: MakeSpec
) -> None:
    placement = await site.client.plan(make_spec(layers=None))
    assert placement.stages[0].node_name == "a"
    assert sum(len(stage.layers) for stage in placement.stages) == 12
    assert not await site.client.deployments(), "a plan deploys nothing"


async def test_an_agent_gone_while_loading_fails_the_deployment_and_frees_the_others(
    site: Site, make_spec: MakeSpec
) -> None:
    agent = site.cluster.agents["c"]

    async def loading() -> bool:
        """False if the node had stalled for so long that it counted as gone before it was
        needed."""
        agent.send_signal(signal.SIGSTOP)
        try:
            deployment = await site.client.deploy(make_spec(), wait=False)
        except (UnavailableError, AbortedError):
            agent.send_signal(signal.SIGCONT)
            await site.until(lambda: is_connected("c"))
            return False
        assert deployment.phase is DeploymentPhase.LOADING
        return True

    async def is_connected(name: str) -> bool:
        return (await site.client.node(name)).connected

    await site.until(loading)
    await agent.kill()

    async def failed() -> bool:
        return (await site.client.deployment("tales")).phase is DeploymentPhase.FAILED

    await site.until(failed)
    deployment = await site.client.deployment("tales")
    assert deployment.failure is not None and "c" in deployment.failure.message

    async def released() -> bool:
        return not any(node.stages for node in await site.client.nodes() if node.name != "c")

    await site.until(released)
    await site.client.delete_deployment("tales")
    node_id = (await site.client.node("c")).node_id
    await site.cluster.start_agent("c")
    node = await site.client.node("c")
    assert node.connected, "a node that is ready can be deployed to"
    assert node.node_id == node_id, "a restarted node is the same node"


@pytest.mark.long
async def test_without_a_node_left_a_request_is_told_in_time_and_the_deployment_returns_with_them(
    site: Site, make_spec: MakeSpec
) -> None:
    await site.client.deploy(make_spec())

    async def phase_is(phase: DeploymentPhase) -> bool:
        return (await site.client.deployment("tales")).phase is phase

    async def lost_under_a_request() -> UnavailableError | None:
        """None if the request was over before the nodes were gone; they have then returned."""
        stream = site.client.generate(
            "tales", "Once upon a time", max_new_tokens=400, ignore_eos=True, timeout_s=5
        )
        await anext(stream)
        for agent in site.cluster.agents.values():
            await agent.kill()
        try:
            async for _ in stream:
                pass
        except UnavailableError as lost:
            return lost
        await all_back()
        return None

    async def all_back() -> None:
        for name in site.cluster.agents:
            await site.cluster.start_agent(name)
        await site.until(lambda: phase_is(DeploymentPhase.READY))

    while (lost := await lost_under_a_request()) is None:
        pass
    assert lost.reason == "NOT_RECOVERED" and lost.retry_after_s
    # All at once: the coordinator looks for the fault in itself for a while.
    await site.until(lambda: phase_is(DeploymentPhase.WAITING))
    with pytest.raises(EdgeShardError) as refused:
        await site.client.complete("tales", "Once", max_new_tokens=2)
    assert refused.value.retry_after_s
    await all_back()
    assert (await site.client.deployment("tales")).epoch > 1
    answer = await site.client.complete("tales", "Once upon a time", max_new_tokens=4)
    assert len(answer.token_ids) == 4
    await site.client.delete_deployment("tales")


async def test_a_restarted_coordinator_takes_its_deployments_up_again(
    site: Site, make_spec: MakeSpec
) -> None:
    """The agents stay up and keep their weights."""
    await site.client.deploy(make_spec())
    address = site.cluster.address
    site.cluster.coordinator.keep_address()
    await site.cluster.coordinator.kill()
    await site.cluster.start_coordinator()
    async with Client(address) as client:

        async def ready() -> bool:
            try:
                return (await client.deployment("tales")).phase is DeploymentPhase.READY
            except UnavailableError:
                return False

        await site.until(ready)
        answer = await client.complete("tales", "Once upon a time", max_new_tokens=4)
        assert len(answer.token_ids) == 4
        await client.delete_deployment("tales")

        async def released() -> bool:  # A heartbeat that was under way may name a stage once more.
            return not any(node.stages for node in await client.nodes())

        await site.until(released)


async def test_an_agent_of_another_wire_version_is_refused(site: Site) -> None:
    async with open_channel(site.cluster.address, None) as channel:
        request = coordinator_pb2.RegisterRequest(
            node_id="stranger",
            name="stranger",
            address="127.0.0.1:1",
            wire_version=WIRE_VERSION + 1,
            facts=common_pb2.DeviceFacts(kind="cpu"),
            incarnation="x",
        )
        with pytest.raises(Exception) as refusal:
            await CoordinatorServiceStub(channel).Register(request)
    error = from_rpc_error(refusal.value)  # type: ignore[arg-type]
    assert error.reason == WireVersionError.default_reason and str(WIRE_VERSION) in error.message
    assert "stranger" not in [node.name for node in await site.client.nodes()]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "names"),
    [
        (["--listen", "0.0.0.0:0"], 4, "listen"),
        (["--listen", "nonsense"], 2, "listen"),
        (["--name", "Not A Name"], 2, "name"),
        (["--device", "cuda:9"], 2, "device"),
        (["--threads", "0"], 2, "threads"),
        (["--name", "a"], 1, "name"),
    ],
    ids=str,
)
@pytest.mark.one_in(3)
async def test_an_agent_that_cannot_start_says_why(
    site: Site, tmp_path: Path, arguments: list[str], exit_code: int, names: str
) -> None:
    base = {"--name": "d", "--listen": "127.0.0.1:0", "--coordinator": site.cluster.address}
    merged = {
        **base,
        **dict(zip(arguments[::2], arguments[1::2], strict=True)),
        "--state-dir": str(tmp_path),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgeshard_agent",
        *[part for pair in merged.items() for part in pair],
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    last = stderr.decode().strip().splitlines()[-1]
    assert process.returncode == exit_code, stderr.decode()
    assert last.startswith("error: ") and names in last


async def test_two_agents_do_not_share_a_state_directory(site: Site) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgeshard_agent", "--name", "d",
        "--coordinator", site.cluster.address, "--state-dir", str(site.cluster.directory / "a"),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode == 1 and b"state-dir" in stderr.splitlines()[-1]
    assert (await site.client.node("a")).connected


async def test_a_taken_port_is_named(site: Site, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgeshard_coordinator", "--listen", site.cluster.address,
        "--state-dir", str(tmp_path), stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode == 5 and b"in use" in stderr


async def test_models_that_cannot_be_run_are_refused_when_added(site: Site, tmp_path: Path) -> None:
    def copy(name: str, **config: object) -> Path:
        path = tmp_path / name
        shutil.copytree(DEMO_MODEL, path)
        values = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**values, **config}))
        return path

    before = await site.state()
    bad: dict[str, dict[str, Any]] = {
        "arch": {"model_type": "bert"},
        "spiral": {"rope_parameters": {"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}},
        "layers": {"num_hidden_layers": 13},
    }
    for name, config in bad.items():
        with pytest.raises((UnsupportedModelError, DataLossError)) as refusal:
            await site.client.add_model(copy(name, **config), name)
        assert refusal.value.field
    truncated = copy("truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(DataLossError):
        await site.client.add_model(truncated, "truncated")
    with pytest.raises(EdgeShardError):
        await site.client.add_model(tmp_path / "nowhere", "nowhere")
    other = copy("other", rms_norm_eps=1e-6)
    with pytest.raises(AlreadyExistsError):
        await site.client.add_model(other, "fairy-tales")
    assert await site.state() == before
