"""The daemons and clients of a simulated site, each put together as its process does it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgeshard_agent.core.events import CommandReceived
from edgeshard_agent.core.measuring import ControlLost, MeasuringTask
from edgeshard_agent.engine.compute_thread import HangCheck
from edgeshard_agent.hosting.around import (
    HeldWeights,
    HostServices,
    LoadedModel,
    LoadProgress,
    Tools,
)
from edgeshard_agent.hosting.host import DumpRequests, Hosting
from edgeshard_agent.hosting.hosted_stage import HostedStage
from edgeshard_agent.net.control import ControlClient
from edgeshard_agent.net.link_receiver import StageServicer
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.values.state import Timings

from edgeshard import WIRE_VERSION
from edgeshard.domain.control.commands import (
    ControlMessage,
    Deny,
    DropPacked,
    KeepStandby,
    ListPacked,
    PrepareStage,
    Registration,
    TakeDump,
)
from edgeshard.domain.errors import DataLossError, InternalError
from edgeshard.domain.ids import NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.proto.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from tests.simulator.calls import SimServer
from tests.simulator.channel import SimChannel
from tests.simulator.disk import Disk, SimStore
from tests.simulator.loop import Process, SimClock, VirtualLoop
from tests.simulator.model import SimModels, SimWorker, held, loaded
from tests.simulator.network import Network
from tests.simulator.watch import Watch

COORDINATOR = "coordinator:7600"
MEMORY_BYTES = 1 << 30
TIMINGS = Timings(probe_quiet_s=1e9, activate_timeout_s=12.0, load_timeout_s=15.0)
"""The product's timings, except that links are not measured and no wait lasts minutes."""


class Troubles:
    """The faults inside a process now: chances from 0 to 1, of each write and of each load."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.disk = 0.0
        self.disk_failed = False
        """Whether a write was ever refused: a coordinator that crashes then forgets that a
        deployment served."""
        self.load = 0.0

    def disk_fails(self) -> bool:
        fails = self._dice.random() < self.disk
        self.disk_failed = self.disk_failed or fails
        return fails

    def load_fails(self) -> bool:
        return self._dice.random() < self.load


class Node:
    """An agent's process: control stream, stages, links, heads."""

    def __init__(
        self,
        network: Network,
        name: str,
        run: int,
        watch: Watch,
        troubles: Troubles,
        dice: random.Random,
    ):
        loop: VirtualLoop = network.loop
        self.name = name
        self.node_id = NodeId(f"id-{name}")
        self.process = process = Process(loop, name, ahead_s=dice.uniform(0, 1e5))
        self._troubles = troubles
        self._dice = dice
        self._watch = watch
        address = f"{name}:7000"
        clock = SimClock(loop, process)
        facts = DeviceFacts("cpu", "sim", 2, MEMORY_BYTES, MEMORY_BYTES, False, "sim")
        self.facts = replace(facts, takes_guesses=True, keeps_states_of_guesses=True)
        registration = Registration(
            self.node_id,
            NodeName(name),
            address,
            WIRE_VERSION,
            self.facts,
            f"{name}-{run}",
            starting=True,
        )
        worker: Any = SimWorker(process, lambda: dice.uniform(0.004, 0.03))
        self.servicer = StageServicer()
        self.server = SimServer(network, process, address)
        add_StageServiceServicer_to_server(self.servicer, self.server)
        control: Any = SimChannel(network, process, COORDINATOR)

        async def no_huge_pages(stages: object) -> None:
            return None

        self.client = ControlClient(
            control,
            COORDINATOR,
            registration,
            self._on_command,
            lambda: self.hosting.statuses(),
            lambda: MEMORY_BYTES,
            no_huge_pages,
            lambda: self.hosting.post(ControlLost()),
            now=clock.now,
        )
        around = HostServices(
            self.node_id,
            worker,
            self.servicer,
            lambda: SimChannel(network, process, COORDINATOR),  # type: ignore[arg-type,return-value]
            None,
            clock,
            self.client.changed,
            None,
            None,
            self.client.send,
        )
        self.hosting = Hosting(around, self.client.send_results, self.client.started)
        self._dumps = DumpRequests(
            self.hosting, dict, self.client.send_dump, self.client.send_results
        )
        self._check = HangCheck(self.hosting.stages, worker, clock)
        self._process_start()

    def _process_start(self) -> None:
        self._watch.node_starts(self.node_id, self.hosting)
        self.process.spawn(self._run())

    async def _run(self) -> None:
        await self.server.start()
        self.process.spawn(self.client.run())
        # The imports for computing run meanwhile.
        self.process.call_later(self._dice.choice((0.0, 0.05, 0.6)), self._started)

    def _started(self) -> None:
        self.hosting.start(
            Tools(self._load, self._load_standby, self._measure, self._wire), self.facts
        )
        self.process.spawn(self._check.run())

    def _on_command(self, operation_id: OperationId, command: ControlMessage) -> None:
        if isinstance(command, TakeDump | ListPacked | DropPacked | Deny):
            self._dumps.take(operation_id)
        else:
            self.hosting.post(CommandReceived(operation_id, command))

    async def _load(
        self, prepare: PrepareStage, progress: LoadProgress, held: Sequence[HeldWeights]
    ) -> LoadedModel:
        await asyncio.sleep(self._dice.choice((0.02, 0.1, 0.4)))
        progress.fetched(1, 2)
        await asyncio.sleep(self._dice.choice((0.01, 0.2)))
        if self._troubles.load_fails():
            raise DataLossError("a tensor does not match its digest", field="tensors")
        return loaded(prepare, self._watch)

    async def _load_standby(
        self,
        command: KeepStandby,
        layers: LayerRange,
        progress: LoadProgress,
        _: Sequence[HeldWeights],
    ) -> HeldWeights:
        await asyncio.sleep(self._dice.choice((0.05, 0.5)))
        if self._troubles.load_fails():
            raise DataLossError("a tensor does not match its digest", field="tensors")
        return held(command, layers)

    async def _measure(self, task: MeasuringTask, held: int | None) -> None:
        raise InternalError("nothing is measured here")

    def _wire(self, prepare: Any, model: Any, around: Any, broke: Any, head: Any) -> HostedStage:
        stage = HostedStage(prepare, model, around, broke, head)
        stream = stage._stream
        if stream is not None:
            emit = stream.emit

            def watched(output: Any) -> None:
                self._watch.emits(self.hosting, prepare.deployment, output)
                emit(output)

            stream.emit = watched  # type: ignore[method-assign,assignment]
            epoch = stage.head._epoch if stage.head is not None else None
            if epoch is not None:
                object.__setattr__(epoch, "emit", watched)
        return stage

    def crash(self, network: Network, silently: bool) -> None:
        self._watch.node_ends(self.node_id)
        self.process.crash()
        network.crashed(self.process, silently)


class Boss:
    """The coordinator's process, on a disk."""

    def __init__(
        self, network: Network, disk: Disk, watch: Watch, troubles: Troubles, dice: random.Random
    ) -> None:
        self.process = process = Process(network.loop, "coordinator", ahead_s=dice.uniform(0, 1e5))
        self._watch = watch
        self.stopping = False
        store: Any = SimStore(process, disk, dice, troubles.disk_fails)
        server: Any = SimServer(network, process, COORDINATOR)
        self.coordinator = process.context.run(
            Coordinator,
            server,
            store,
            SimModels(),
            None,
            PlanningPlacer(),
            SimClock(network.loop, process),
            TIMINGS,
        )
        watch.coordinator_starts(self.coordinator)
        process.spawn(self._start(disk is watch.disk))

    async def _start(self, on_its_disk: bool) -> None:
        start = self.coordinator.start
        await start()
        if not on_its_disk:
            self._watch.strangers |= {self.coordinator.loop.state.instance}

    def stop(self) -> Any:
        """An orderly end; the task that ends it."""
        self.stopping = True
        return self.process.spawn(self.coordinator.stop())

    def crash(self, network: Network, silently: bool) -> None:
        self._watch.coordinator_ends()
        self.process.crash()
        network.crashed(self.process, silently)
