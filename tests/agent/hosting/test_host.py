"""Loading and removing stages: after any interruption, no pin, task, receiver or weight remains."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.core.events import CommandReceived
from edgeshard_agent.core.measuring import ControlLost, MeasuringTask
from edgeshard_agent.core.node_state import machine
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.hosting import host
from edgeshard_agent.hosting.around import (
    ForHead,
    HeldWeights,
    HostServices,
    LoadedModel,
    LoadProgress,
    Tools,
    model_key,
    weights_key,
)
from edgeshard_agent.hosting.host import DumpRequests, Hosting
from edgeshard_agent.hosting.hosted_stage import HostedStage
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weight_store import ReadObserver
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.net.link_receiver import StageServicer
from edgeshard_agent.store.blob_cache import BlobCache

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.domain.control.commands import (
    Command,
    CommandResult,
    KeepStandby,
    MeasureCompute,
    PrepareStage,
    ReleaseStage,
    TraceSteps,
)
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts, StageKey, StagePhase
from edgeshard.domain.nodes.profile import Effort
from edgeshard.domain.requests.trace import ReadRecord, StageTrace
from edgeshard.process.clock import SystemClock
from edgeshard.rpc.channel import open_channel

pytestmark = pytest.mark.timing

NAME = DeploymentName("tales")
FACTS = DeviceFacts("cpu", "Test CPU", 4, 8 << 30, 4 << 30, False, "Linux")
MEASURE = MeasureCompute({}, DType.FLOAT32, effort=Effort.QUICK, again=False)
BLOB = Digest("a" * 64)


class Node:
    """A `Hosting` over real weights; the neighbour is an address without a listener."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.cache = BlobCache(directory, 1 << 30)
        self.worker = ComputeThread(1)
        self.servicer = StageServicer()
        dial = partial(open_channel, "127.0.0.1:9", None)
        self.answers: dict[str, CommandResult] = {}
        self.models: list[weakref.ref[StageModel]] = []
        self.alive_at_load: list[int] = []
        self.surveying: list[str] = []
        self.measurements = 0
        self.held: list[int | None] = []
        """The stages' bytes when each measurement began."""
        self.manifest = Digest("0" * 64)
        self.shared: list[set[int]] = []
        """Layers that each load got from held weights."""
        self.standby_may_load = asyncio.Event()
        self.standby_may_load.set()
        self.surveyed = asyncio.Event()
        self.neighbour = "127.0.0.1:9"
        self.layers = LayerRange(0, 2)
        self._model = model
        self._config = json.loads((model / "config.json").read_text())
        around = HostServices(
            NodeId("n"), self.worker, self.servicer, dial, None, SystemClock(), lambda: None
        )
        self.reported: list[DeviceFacts] = []
        self.hosting = Hosting(around, self._answered, self.reported.append)

    def start(self) -> None:
        self.hosting.start(Tools(self.load, self.load_standby, self.measuring, HostedStage), FACTS)

    async def measuring(self, task: MeasuringTask, held: int | None) -> None:
        self.surveying.append(task.operation_id)
        self.held.append(held)
        self.measurements += 1
        try:
            await self.surveyed.wait()
        finally:
            try:
                await asyncio.sleep(0)  # a process takes a moment to end
            finally:
                self.surveying.pop()

    async def load(
        self, prepare: PrepareStage, progress: LoadProgress, held: Sequence[HeldWeights]
    ) -> LoadedModel:
        assert not self.surveying, "the memory of a measurement is not free yet"
        self.alive_at_load.append(sum(model() is not None for model in self.models))
        pin = self.cache.pin([BLOB])
        try:
            weights = await self.worker.run(self._weights, prepare.placed.layers, held)
        except BaseException:
            pin.release()
            raise
        self.models.append(weakref.ref(weights))
        return LoadedModel(model_key(prepare), weights, ForHead(None, frozenset()), pin, 0.0)

    def _weights(self, layers: LayerRange, held: Sequence[HeldWeights]) -> StageModel:
        self.shared.append({layer for item in held for layer in item.weights.shareable(layers)})
        return StageModel.with_kv(
            StageWeights.load(
                SafetensorsDirectory(self._model),
                self._config,
                layers,
                dtype=DType.FLOAT32,
                device="cpu",
                reuse=[item.weights for item in held],
            ),
            KvMemory(DType.FLOAT32, 4, 16),
        )

    async def load_standby(
        self,
        command: KeepStandby,
        layers: LayerRange,
        progress: LoadProgress,
        held: Sequence[HeldWeights],
    ) -> HeldWeights:
        pin = self.cache.pin([BLOB])
        try:
            await self.standby_may_load.wait()
            weights = await self.worker.run(self._standby, layers, held)
        except BaseException:
            pin.release()
            raise
        return HeldWeights(weights_key(command), weights, None, pin, 0.0)

    def _standby(self, layers: LayerRange, held: Sequence[HeldWeights]) -> StageWeights:
        self.shared.append({layer for item in held for layer in item.weights.shareable(layers)})
        return StageWeights.load(
            SafetensorsDirectory(self._model),
            self._config,
            layers,
            dtype=DType.FLOAT32,
            device="cpu",
            reuse=[item.weights for item in held],
        )

    def _answered(self, results: tuple[CommandResult, ...]) -> None:
        self.answers.update({result.operation_id: result for result in results})

    def prepare(self, epoch: int) -> PrepareStage:
        cuts = (self.layers, LayerRange(self.layers.end, 4))
        placed = tuple(
            PlacedStage(i, NodeId(f"n{i}"), NodeName(f"n{i}"), self.neighbour, cut, 0, 0)
            for i, cut in enumerate(cuts)
        )
        spec = DeploymentSpec(name=NAME, model="tiny", source="n0", dtype=DType.FLOAT32)
        return PrepareStage(spec, Placement(placed, 16, 4, 1, 1), 0, Epoch(epoch), self.manifest)

    def standby(self, epoch: int, layers: LayerRange | None) -> KeepStandby:
        return KeepStandby(
            self.prepare(epoch).spec, Epoch(epoch), self.manifest, NodeName("n0"), layers
        )

    def command(self, operation: str, command: Command) -> None:
        self.hosting.post(CommandReceived(OperationId(operation), command))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 (what is watched has no event)
                await asyncio.sleep(0.002)

    async def answer(self, operation: str) -> CommandResult:
        await self.until(lambda: operation in self.answers)
        return self.answers[operation]

    @property
    def pins(self) -> int:
        return self.cache._pins[BLOB]


def stage_tasks() -> list[str]:
    """Tasks of stages' links and heads, by name."""
    names = [task.get_name() for task in asyncio.all_tasks() if not task.done()]
    return [name for name in names if name.startswith(("link-", "attach-"))]


@pytest.fixture
async def starting(tiny_llama: Path, tmp_path: Path) -> AsyncIterator[Node]:
    """A node that has joined and has no tools yet."""
    node = Node(tiny_llama, tmp_path)
    yield node
    await node.hosting.close()
    node.worker.close()


@pytest.fixture
def node(starting: Node) -> Node:
    starting.start()
    return starting


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cyclic garbage stays until the test collects it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("last", ["prepare", "release"])
@pytest.mark.one_in(3)
async def test_an_epoch_that_is_overtaken_while_it_takes_over_leaves_nothing(
    node: Node, turns: int, last: str
) -> None:
    node.command("p1", node.prepare(1))
    assert (await node.answer("p1")).failure is None
    busy = threading.Event()
    # another stage computes: the next epoch must wait
    blocking = asyncio.create_task(node.worker.run(busy.wait))
    node.command("p2", node.prepare(2))
    for _ in range(turns):
        await asyncio.sleep(0)
    if last == "prepare":
        node.command("p3", node.prepare(3))
    else:
        node.command("r2", ReleaseStage(NAME, Epoch(2)))
    for _ in range(4):
        await asyncio.sleep(0)
    busy.set()
    await blocking
    if last == "prepare":
        assert (await node.answer("p3")).failure is None
        assert len(node.models) == 1, "the same weights serve every epoch"
        assert len(stage_tasks()) == 1 and node.pins == 1, stage_tasks()
        node.command("r3", ReleaseStage(NAME, Epoch(3)))
        await node.answer("r3")
    else:
        await node.answer("r2")
    assert node.pins == 0 and not node.hosting.statuses()
    assert not stage_tasks()


async def test_a_stage_that_cannot_start_after_its_load_leaves_nothing(node: Node) -> None:
    node.neighbour = "192.0.2.1:1"  # beyond loopback, and this node has no TLS
    node.command("p", node.prepare(1))
    failure = (await node.answer("p")).failure
    assert failure is not None and failure.reason == "TLS_REQUIRED"
    await node.until(lambda: not node.hosting.statuses() and node.pins == 0)
    assert not stage_tasks() and not node.servicer._receivers


async def test_weights_that_are_not_used_again_are_gone_before_new_ones_come(
    node: Node, no_collector: None
) -> None:
    node.command("p1", node.prepare(1))
    await node.answer("p1")
    node.manifest = Digest("1" * 64)
    node.command("p2", node.prepare(2))
    assert (await node.answer("p2")).failure is None
    assert node.shared == [set(), set()] and node.alive_at_load == [0, 0], (
        "two stages' weights were in memory at once"
    )


async def test_a_released_stage_gives_its_memory_back(node: Node, no_collector: None) -> None:
    node.command("p", node.prepare(1))
    await node.answer("p")
    node.command("r", ReleaseStage(NAME, Epoch(1)))
    assert (await node.answer("r")).failure is None
    assert [model() for model in node.models] == [None]


async def test_a_released_stage_gives_its_memory_back_though_a_call_still_refers_to_it(
    node: Node, no_collector: None
) -> None:
    node.command("p", node.prepare(1))
    await node.answer("p")
    held = node.hosting._stages[NAME]
    model = held.loaded.model
    parts: list[weakref.ref[Any]] = [weakref.ref(model._modules), weakref.ref(model.pool.arena(0))]
    node.command("r", ReleaseStage(NAME, Epoch(1)))
    assert (await node.answer("r")).failure is None
    assert [part() for part in parts] == [None, None] and model is not None


async def test_a_measurement_gives_way_to_a_stage(node: Node) -> None:
    node.command("m", MEASURE)
    await node.until(lambda: bool(node.surveying))
    node.command("p", node.prepare(1))
    assert (await node.answer("p")).failure is None
    failure = (await node.answer("m")).failure
    assert failure is not None and failure.reason == "STAGE_CAME" and not node.surveying
    node.command("beside", MEASURE)
    await node.until(lambda: node.surveying == ["beside"])
    assert node.held == [None, 0], "nothing is planned for the stage of this test"
    node.command("next", node.prepare(2))
    assert (await node.answer("next")).failure is None
    failure = (await node.answer("beside")).failure
    assert failure is not None and failure.reason == "STAGE_CAME" and not node.surveying


async def test_a_measurement_is_asked_for_again_after_the_control_stream_was_lost(
    node: Node,
) -> None:
    node.command("m", MEASURE)
    await node.until(lambda: bool(node.surveying))
    node.hosting.post(ControlLost())
    node.command("m", MEASURE)
    await node.until(lambda: node.measurements == 2)
    assert node.surveying == ["m"]
    node.surveyed.set()
    assert (await node.answer("m")).failure is None


@pytest.mark.parametrize("turns", range(3))
async def test_no_measurement_outlives_the_agent(node: Node, turns: int) -> None:
    node.command("m", MEASURE)
    await node.until(lambda: bool(node.surveying))
    node.hosting.post(ControlLost())  # as the end of the control client does just before
    for _ in range(turns):
        await asyncio.sleep(0)
    await node.hosting.close()
    assert not node.surveying


async def test_a_trace_is_of_the_stage_that_runs(node: Node) -> None:
    node.command("p", node.prepare(1))
    await node.answer("p")
    node.command("t", TraceSteps(NAME, Epoch(1), 0.1))
    answer = await node.answer("t")
    assert answer.failure is None and answer.trace is not None
    assert (answer.trace.stage, answer.trace.node, answer.trace.layers) == (0, "n0", node.layers)


async def test_a_trace_hears_of_the_weights_that_are_read_meanwhile(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    listens: list[bool] = []

    def observe(_: StageModel, observer: ReadObserver | None) -> None:
        listens.append(observer is not None)
        if observer is not None:
            observer.read(1, 100, 3.0, 3.5)

    monkeypatch.setattr(StageModel, "observe_reads", observe)
    node.command("p", node.prepare(1))
    await node.answer("p")
    node.command("t", TraceSteps(NAME, Epoch(1), 0.1))
    trace = (await node.answer("t")).trace
    assert trace is not None and trace.reads == (ReadRecord(1, 100, 3.0, 3.5),)
    assert listens == [True, False], "nobody listens behind it"


async def test_a_stage_that_goes_while_it_is_traced_is_no_trace(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HostedStage.trace

    async def trace(stage: HostedStage, seconds: float) -> StageTrace:
        found = await real(stage, seconds)
        await node.answer("r")  # however long that takes, the trace is not over before
        return found

    monkeypatch.setattr(HostedStage, "trace", trace)
    node.command("p", node.prepare(1))
    await node.answer("p")
    node.command("t", TraceSteps(NAME, Epoch(1), 0.1))
    node.command("r", ReleaseStage(NAME, Epoch(1)))
    answer = await node.answer("t")
    assert (
        answer.failure is not None and answer.failure.reason == "NO_STAGE" and answer.trace is None
    )
    assert node.pins == 0


async def test_closing_a_node_ends_its_traces(node: Node) -> None:
    node.command("p", node.prepare(1))
    await node.answer("p")
    node.command("t", TraceSteps(NAME, Epoch(1), 60.0))
    await asyncio.wait_for(node.hosting.close(), 30)
    assert not [task for task in asyncio.all_tasks() if "(trace)" in task.get_name()]


async def test_a_dump_of_a_node_replays_and_says_what_it_is(node: Node) -> None:
    sent: dict[str, bytes] = {}
    dumps = DumpRequests(
        node.hosting, lambda: {"versions": {"edgeshard": "1"}}, sent.__setitem__, node._answered
    )
    node.command("p", node.prepare(1))
    await node.answer("p")
    dumps.take(OperationId("d"))
    await node.until(lambda: "d" in sent)
    document = json.loads(sent["d"])
    assert document["versions"] == {"edgeshard": "1"} and not machine().replay(document).differs
    kinds = [
        entry["event"].get("action", entry["event"])["type"]
        for entry in document["ring"]["entries"]
    ]
    assert kinds == [
        "Started",
        "ReportStarted",
        "CommandReceived",
        "LoadStage",
        "StageLoaded",
        "SendResults",
    ]


async def test_a_dump_that_crashes_is_answered(node: Node) -> None:
    def about() -> dict[str, object]:
        raise OSError("no /proc here")

    sent: dict[str, bytes] = {}
    DumpRequests(node.hosting, about, sent.__setitem__, node._answered).take(OperationId("d"))
    answer = await node.answer("d")
    assert answer.failure is not None and not sent


@pytest.mark.parametrize("level", ["debug", "info"])
async def test_every_event_and_action_is_said_at_debug_and_none_is_worded_above(
    node: Node, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worded: list[str] = []
    monkeypatch.setattr(host, "debug_logged", lambda: level == "debug")

    def labels(value: object) -> dict[str, str]:
        worded.append(type(value).__name__)
        return {}

    monkeypatch.setattr(host, "labels", labels)
    node.command("r", ReleaseStage(NAME, Epoch(1)))
    assert worded == {"debug": ["CommandReceived", "SendResults"], "info": []}[level]


async def test_commands_that_come_while_the_node_starts_are_carried_out_once_it_has(
    starting: Node,
) -> None:
    starting.command("gone", ReleaseStage(NAME, Epoch(1)))
    starting.command("prepare", starting.prepare(1))
    assert (await starting.answer("gone")).failure is None
    assert not starting.alive_at_load and not starting.hosting.statuses() and not starting.reported
    starting.start()
    assert starting.reported == [FACTS]
    assert (await starting.answer("prepare")).failure is None
    starting.command("measure", MEASURE)
    starting.hosting.post(ControlLost())
    assert starting.reported == [FACTS]


async def test_the_start_is_in_the_dump_and_replays(starting: Node) -> None:
    starting.command("measure", MEASURE)
    starting.start()
    await starting.until(lambda: bool(starting.surveying))
    state, ring = starting.hosting.recorded()
    document = json.loads(json.dumps(machine().document(state, ring)))
    assert state.facts == FACTS and not machine().replay(document).differs


async def test_a_node_whose_compute_thread_hangs_refuses_a_stage_and_releases_one(
    node: Node,
) -> None:
    """Its coordinator must not wait for it: it continues without this node."""
    node.command("p1", node.prepare(1))
    assert (await node.answer("p1")).failure is None
    busy = threading.Event()
    node.worker.submit(busy.wait, 60)
    node.worker.give_up()
    node.command("p2", node.prepare(2))
    failure = (await node.answer("p2")).failure
    assert failure is not None and failure.reason == "STAGE_HUNG"
    node.command("r2", ReleaseStage(NAME, Epoch(2)))
    assert (await node.answer("r2")).failure is None and node.pins == 0
    busy.set()
    await node.until(lambda: not node.worker.hangs)
    node.command("p3", node.prepare(3))
    assert (await node.answer("p3")).failure is None


async def test_stages_live_on_when_the_control_stream_is_lost(node: Node) -> None:
    node.command("p1", node.prepare(1))
    assert (await node.answer("p1")).failure is None
    node.hosting.post(ControlLost())
    await asyncio.sleep(0)
    assert [status.epoch for status in node.hosting.statuses()] == [1] and stage_tasks()
    node.command("p1", node.prepare(1))
    await node.until(lambda: node.hosting.recorded()[0].unsent == ())
    assert len(node.models) == 1, "asked again over the next stream, it has it still"


# -- standbys --------------------------------------------------------------------------------------


async def test_a_stage_takes_its_weights_from_a_standby(node: Node) -> None:
    node.command("s", node.standby(1, LayerRange(0, 4)))
    assert (await node.answer("s")).failure is None
    (status,) = node.hosting.statuses()
    assert (status.phase, status.layers, status.epoch) == (StagePhase.STANDBY, LayerRange(0, 4), 1)
    assert status.parameter_bytes > 0 and status.key == StageKey(NAME, 0, standby=True)
    node.command("p", node.prepare(2))
    assert (await node.answer("p")).failure is None
    assert node.shared == [set(), {0, 1}]
    assert {status.phase for status in node.hosting.statuses()} == {
        StagePhase.READY,
        StagePhase.STANDBY,
    }
    node.command("none", node.standby(2, None))
    node.command("r", ReleaseStage(NAME, Epoch(2)))
    await node.answer("r")
    await node.until(lambda: node.pins == 0 and not node.hosting.statuses())


async def test_a_standby_follows_its_newest_command(node: Node) -> None:
    node.command("s1", node.standby(1, LayerRange(0, 3)))
    await node.answer("s1")
    node.command("s2", node.standby(2, LayerRange(0, 3)))
    assert (await node.answer("s2")).failure is None
    assert len(node.shared) == 1, "the same weights were loaded again"
    assert [status.epoch for status in node.hosting.statuses()] == [2]
    node.command("s3", node.standby(2, LayerRange(1, 4)))
    assert (await node.answer("s3")).failure is None
    assert node.shared[1] == {1, 2} and node.pins == 1
    node.command("late", node.standby(1, LayerRange(0, 1)))
    failure = (await node.answer("late")).failure
    assert failure is not None and failure.reason == "STALE_EPOCH"


async def test_a_standby_goes_with_its_deployment(node: Node) -> None:
    node.command("s", node.standby(3, LayerRange(2, 4)))
    await node.answer("s")
    node.command("old", ReleaseStage(NAME, Epoch(2)))
    assert (await node.answer("old")).failure is None
    assert node.pins == 1
    node.command("r", ReleaseStage(NAME, Epoch(3)))
    await node.until(lambda: node.pins == 0 and not node.hosting.statuses())


async def test_a_stage_that_a_standby_does_not_serve_has_its_memory(node: Node) -> None:
    node.command("s", node.standby(1, LayerRange(3, 4)))
    await node.answer("s")
    node.command("p", node.prepare(2))
    assert (await node.answer("p")).failure is None
    assert node.shared[1] == set() and node.pins == 1
    assert [status.phase for status in node.hosting.statuses()] == [StagePhase.READY]


async def test_a_stage_does_not_wait_for_a_standby_on_its_way(node: Node) -> None:
    node.standby_may_load.clear()
    node.command("s", node.standby(1, LayerRange(0, 4)))
    await node.until(lambda: node.pins == 1)
    node.command("p", node.prepare(2))
    assert (await node.answer("p")).failure is None
    assert node.pins == 1 and [status.phase for status in node.hosting.statuses()] == [
        StagePhase.READY
    ]
    node.standby_may_load.set()
    node.command("s2", node.standby(2, LayerRange(2, 4)))
    assert (await node.answer("s2")).failure is None


async def test_a_stage_whose_layers_change_keeps_those_it_had(node: Node) -> None:
    node.command("p1", node.prepare(1))
    await node.answer("p1")
    node.layers = LayerRange(0, 3)
    node.command("p2", node.prepare(2))
    assert (await node.answer("p2")).failure is None
    assert node.shared == [set(), {0, 1}] and node.pins == 1
