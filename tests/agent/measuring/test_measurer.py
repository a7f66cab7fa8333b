"""Commands to measure, carried out: in a process of their own, over real sockets, and in the lab
without measuring."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from edgeshard_agent.core.measuring import MeasuringCommand, MeasuringTask
from edgeshard_agent.emulation import Emulation, load_emulation
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.measuring.facts import read_facts
from edgeshard_agent.measuring.measurer import Measurer
from edgeshard_agent.measuring.measuring_worker import MeasuringJob
from edgeshard_agent.measuring.node import MeasuredNode, Reports
from edgeshard_agent.net.link_receiver import StageServicer

from edgeshard.domain.control.commands import (
    CommandProgress,
    MeasureCompute,
    Peer,
    ProbeLinks,
    ProfileReport,
)
from edgeshard.domain.errors import (
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedModelError,
)
from edgeshard.domain.ids import NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import DiskProfile, Effort, LayerKind, config_hash
from edgeshard.forms import OWN
from edgeshard.planning.inputs.measured import MeasuredTimes
from edgeshard.planning.inputs.problem import StepShape
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.proto.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from edgeshard.rpc.server import Server
from tests.support.measuring_workers import measuring_worker, measuring_workers, until_stopped

pytestmark = pytest.mark.timing

ME = NodeId("me")
LAB = """
source = "near"
[[device]]
name = "near"
kind = "agx-orin"
[[device]]
name = "far"
kind = "orin-nx"
[[link]]
bandwidth_bps = 40e6
latency_s = 0.020
[[link]]
from = "far"
to = "near"
bandwidth_bps = 40e6
latency_s = 0.060
[model]
dtype = "float32"
[lab]
model = "llama2-7b"
"""


class Node:
    """A measurer and its reports."""

    def __init__(
        self, state_dir: Path, memory: int | None = None, emulation: Emulation | None = None
    ) -> None:
        self.reports: list[ProfileReport] = []
        self.progress: list[CommandProgress] = []
        facts = read_facts("cpu", memory)
        if emulation is not None:
            facts = emulation.facts(facts)
        node = MeasuredNode(ME, facts, "cpu", 1, memory, state_dir, None, emulation)
        self.worker = ComputeThread(1)
        self.measurer = Measurer(node, Reports(self._report, self.progress.append), self.worker)

    async def _report(self, report: ProfileReport) -> None:
        self.reports.append(report)

    async def do(self, command: MeasuringCommand, held: int | None = None) -> ProfileReport:
        await self.measurer.run(MeasuringTask(OperationId("op"), command), held)
        return self.reports.pop()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """The address of a node that answers probes."""
    server = Server("127.0.0.1:0", None)
    add_StageServiceServicer_to_server(StageServicer(), server.grpc)
    yield await server.start()
    await server.stop(0)


def measure(config: dict[str, Any], again: bool = False) -> MeasureCompute:
    return MeasureCompute(config, DType.FLOAT32, effort=Effort.QUICK, again=again)


async def test_layers_are_measured_apart_reported_and_remembered(
    node: Node, tiny_config: dict[str, Any]
) -> None:
    report = await node.do(measure(tiny_config))
    (profile,) = report.compute
    assert (profile.model_hash, profile.dtype, profile.effort) == (
        config_hash(tiny_config),
        DType.FLOAT32,
        Effort.QUICK,
    )
    assert (
        report.facts is not None and report.facts.memory_budget_bytes > 0 and report.node_id == ME
    )
    done = [news.done for news in node.progress]
    assert (
        done
        and done == sorted(done)
        and all(news.done < news.total and news.what for news in node.progress)
    )
    assert not measuring_workers()
    node.progress.clear()
    assert (await node.do(measure(tiny_config))).compute == (profile,)
    assert not node.progress, "it was measured again"
    other = (await node.do(measure(tiny_config, again=True))).compute[0]
    assert other != profile and other.fingerprint == profile.fingerprint


async def test_beside_stages_it_gives_way_to_steps_and_its_figures_are_marked(
    node: Node, tiny_config: dict[str, Any]
) -> None:
    measuring = asyncio.create_task(node.do(measure(tiny_config), held=1 << 20))
    worker = await measuring_worker()
    go_on, ended = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    node.worker.submit_steps(go_on.wait, 60)
    await until_stopped(worker)
    assert node.progress[-1].what == "waits while requests run"
    go_on.set()
    node.worker.submit_steps(loop.call_soon_threadsafe, ended.set)
    await asyncio.wait_for(ended.wait(), 60)
    await until_stopped(worker, stopped=False)
    report = await asyncio.wait_for(measuring, 120)
    (profile,) = report.compute
    assert profile.beside_stages and profile.disk is None
    assert report.facts is None, "what is free now is not what stages may have"
    assert (await node.do(measure(tiny_config), held=1 << 20)).compute == (profile,)
    store = node.measurer._store
    marks = profile.fingerprint, profile.model_hash, profile.dtype
    assert store.find(*marks, beside_stages=False) is None, (
        "it counts for nothing on a node without stages"
    )
    alone = replace(profile, beside_stages=False, disk=DiskProfile(1e9, 1 << 40))
    store.keep(alone)
    assert (await node.do(measure(tiny_config), held=1 << 20)).compute == (alone,), (
        "a better one stays"
    )
    assert (
        await node.measurer._disk(measure(tiny_config, again=True), beside_stages=True)
        == alone.disk
    )


async def test_steps_that_run_already_come_first(node: Node, tiny_config: dict[str, Any]) -> None:
    go_on = threading.Event()
    node.worker.submit_steps(go_on.wait, 60)
    measuring = asyncio.create_task(node.do(measure(tiny_config), held=0))
    worker = await measuring_worker()
    await until_stopped(worker)
    measuring.cancel()  # as a stage that comes has it
    await asyncio.gather(measuring, return_exceptions=True)
    assert not measuring_workers(), "what is stopped can be ended"
    go_on.set()


async def test_where_stages_leave_too_little_memory_the_error_says_what_to_do(
    node: Node, tiny_config: dict[str, Any]
) -> None:
    budget = node.measurer.node.facts.memory_budget_bytes
    with pytest.raises(
        ResourceExhaustedError, match=r"hold .* MiB: delete a deployment"
    ) as failure:
        await node.do(measure(tiny_config), held=budget)
    assert failure.value.reason == "NO_MEMORY_TO_MEASURE"


async def test_a_measurement_that_is_cancelled_leaves_no_process(
    node: Node, tiny_config: dict[str, Any]
) -> None:
    # So much of it that it is not over before anybody looks, however late that is.
    large = tiny_config | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
    }
    measuring = asyncio.create_task(
        node.do(MeasureCompute(large, DType.FLOAT32, effort=Effort.FULL, again=False))
    )
    await measuring_worker()
    measuring.cancel()
    await asyncio.gather(measuring, return_exceptions=True)
    assert (
        not measuring_workers()
        and not node.reports
        and not (list(node.measurer._store._directory.glob("*")))
    )


STOPPING_AGENT = """
import os, signal, subprocess, sys, time
command = [sys.executable, "-m", "edgeshard_agent.measuring.measuring_worker", str(os.getpid())]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
while not open(f"/proc/{worker.pid}/syscall").read().startswith("0 0x0 "):  # until it reads its job
    time.sleep(0.01)
worker.send_signal(signal.SIGSTOP)
print(worker.pid, flush=True)
time.sleep(60)
"""


def test_a_measurement_ends_with_the_agent_that_wanted_it(tiny_config: dict[str, Any]) -> None:
    job = MeasuringJob(tiny_config, DType.FLOAT32, "cpu", 1, Effort.FULL, None)
    worker = subprocess.Popen(
        [sys.executable, "-m", "edgeshard_agent.measuring.measuring_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(OWN.to_text(MeasuringJob, job).encode() + b"\n")
    worker.stdin.close()  # as the kernel does for an agent that was killed
    assert worker.wait(timeout=60) == 1
    worker.stdout.close()


def test_a_measurement_that_is_stopped_ends_with_its_agent_too() -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", STOPPING_AGENT], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    worker = psutil.Process(int(agent.stdout.readline()))
    agent.kill()
    agent.wait()
    agent.stdout.close()
    worker.wait(timeout=60)


async def test_a_model_that_is_not_run_is_refused_before_anything_starts(
    node: Node, tiny_config: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        await node.do(measure(tiny_config | {"model_type": "abacus"}))
    assert refusal.value.field == "model_type" and not node.progress


async def test_errors_of_the_process_keep_their_name(
    tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ResourceExhaustedError) as refusal:
        await Node(tmp_path, memory=1 << 10).do(measure(tiny_config))
    assert (refusal.value.reason, refusal.value.field) == ("NO_MEMORY_TO_MEASURE", "config")


@pytest.mark.timing
async def test_peers_are_probed_in_turn_and_one_that_is_away_is_left_out(
    node: Node, address: str
) -> None:
    gone = Server("127.0.0.1:0", None)
    nowhere = await gone.start()
    await gone.stop(0)
    peers = (
        Peer(NodeId("gone"), NodeName("gone"), nowhere),
        # beyond loopback, and there is no TLS
        Peer(NodeId("open"), NodeName("open"), "192.0.2.1:1"),
        Peer(NodeId("there"), NodeName("there"), address),
    )
    report = await node.do(ProbeLinks(peers))
    assert report.compute == () and report.facts is None
    (link,) = report.links
    assert (link.sender, link.receiver) == (ME, NodeId("there"))
    assert 1e6 < link.profile.bandwidth_bps < 1e12, "loopback, on a machine however busy"
    assert [news.what for news in node.progress] == [
        "link to gone",
        "link to open",
        "link to there",
    ]


async def test_what_the_coordinator_answers_to_the_report_is_the_result(
    tmp_path: Path, address: str
) -> None:
    async def refuse(report: ProfileReport) -> None:
        raise UnavailableError("gone")

    facts = read_facts("cpu", None)
    node = MeasuredNode(ME, facts, "cpu", 1, None, tmp_path, None)
    measurer = Measurer(node, Reports(refuse, lambda news: None), ComputeThread(1))
    with pytest.raises(UnavailableError):
        await measurer.run(MeasuringTask(OperationId("op"), ProbeLinks(())), None)


@pytest.fixture
def emulation(tmp_path: Path) -> Emulation:
    (tmp_path / "lab.toml").write_text(LAB)
    return load_emulation(tmp_path / "lab.toml", "near")


async def test_in_the_lab_a_probe_sees_the_shaped_link(
    emulation: Emulation, tmp_path: Path, address: str
) -> None:
    peers = (
        Peer(NodeId("far"), NodeName("far"), address),
        Peer(NodeId("x"), NodeName("not-in-the-lab"), address),
    )
    report = await Node(tmp_path, emulation=emulation).do(ProbeLinks(peers))
    (link,) = report.links
    assert link.receiver == "far"
    # A busy machine adds to both, and additional time of small payloads only makes large ones look
    # a little faster. The link beneath is loopback: a hundred times as fast, and without a delay.
    assert 40e6 / 10 < link.profile.bandwidth_bps < 1.5 * 40e6
    assert 0.7 * (0.020 + 0.060) / 2 < link.profile.latency_s < 1, "half of the round trip"


async def test_in_the_lab_a_node_tells_what_the_emulator_charges(
    emulation: Emulation, tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    stand_in = tiny_config | {"num_hidden_layers": 32, "max_position_embeddings": 4096}
    node = Node(tmp_path, emulation=emulation)
    (profile,) = (await node.do(measure(stand_in))).compute
    assert not node.progress and not measuring_workers(), "an emulated node measures nothing"
    assert profile.model_hash == config_hash(stand_in)
    assert [layer.kind for layer in profile.layers] == [
        LayerKind.EMBEDDING,
        LayerKind.BLOCK,
        LayerKind.HEAD,
    ]
    told, charged = MeasuredTimes.of(profile), emulation.times
    shown, emulated = model_from_config("stand-in", stand_in).blocks[0], emulation.model.blocks[0]
    for phase in (
        StepShape(1, 1, 65, 65),
        StepShape(4, 1, 300, 300),
        StepShape(1, 32, 16.5, 32),
        StepShape(1, 512, 256.5, 512),
    ):
        assert told.block_s(shown, phase) == pytest.approx(
            charged.block_s(emulated, phase), rel=0.05
        )
    assert told.head_s(StepShape(2, 1, 1, 1)) == pytest.approx(
        charged.head_s(StepShape(2, 1, 1, 1))
    )
    assert told.step_s(1e6) == pytest.approx(charged.step_s(1e6))


async def test_in_the_lab_another_model_is_refused_by_name(
    emulation: Emulation, tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    with pytest.raises(
        FailedPreconditionError, match=r"llama2-7b with 32 layers, but the model has 6"
    ) as refusal:
        await Node(tmp_path, emulation=emulation).do(measure(tiny_config))
    assert refusal.value.reason == "NOT_THE_STAND_IN"
