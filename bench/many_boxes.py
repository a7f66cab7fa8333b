"""The cost of many nodes for their coordinator: its processor time, the time of a heartbeat, and
the time until a death is noticed.

The coordinator is a real process on loopback. The nodes are the agents' own control clients,
without an engine, all in one other process. Each has its connection, its control stream and its
heartbeats, and answers commands at once. A few deployments of three nodes each are ready, so that
their nodes say twice a second what their stages do.

A heartbeat is timed from its making until it is part of the coordinator's state. It carries the
time of the machine's clock in `others_share`. The coordinator's process notes the clock whenever it
has applied some (`Watch`, the only part that is not the product's). A death is noticed when the
node counts as away in the state. There are two sorts of deaths: the node's connection closes, or
the node is silent while its connection stays open. The latter takes `Timings.heartbeat_timeout_s`
and up to a tick by design. At last the coordinator is stopped and started again.

    python -m bench.many_boxes [--nodes 3 100 1000] [--seconds 20] [-o FILE]

writes JSON to FILE or stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import structlog
from edgeshard_agent.net.control import ControlClient
from edgeshard_coordinator import daemon
from edgeshard_coordinator.control.runtime import loop
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    Event,
    HeartbeatsReceived,
    NodeConnected,
    NodeDisconnected,
)
from edgeshard_coordinator.core.values.state import State

from bench.pages import with_trees
from bench.sizes import sized
from edgeshard import WIRE_VERSION
from edgeshard.cli.commands.site.demo import even_layers, model_directory
from edgeshard.client import Client
from edgeshard.domain.control.commands import (
    ActivateHead,
    CommandResult,
    ControlMessage,
    PrepareStage,
    Registration,
)
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import DeploymentName, NodeId, NodeName, OperationId
from edgeshard.domain.nodes.device import DeviceFacts, StagePhase, StageStatus
from edgeshard.domain.requests.head import HeadHello
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.proto.v1.head_pb2_grpc import HeadServiceStub
from edgeshard.rpc.channel import CONTROL_KEEPALIVE_S, open_channel
from edgeshard.rpc.environment import settle_grpc
from edgeshard.wire.head_stream import head_message_to_wire

GIB = 1 << 30
ROOMS = ("agent/edgeshard_agent/net", "coordinator", "edgeshard")
ROOT = Path(__file__).resolve().parent.parent
FACTS = DeviceFacts("cpu", "no node", 4, 64 * GIB, 64 * GIB, False, "none")
DEPLOYMENTS = 10
STAGES = 3
CALM_S = sized(12.0, 0.5)
"""From the last node's joining on: by then nothing of it is under way."""
DEATHS = 5
NOTICED_S = sized(15.0, 11.0)
"""In which a silent node is lost, and all are back after a restart."""
PROBING_S = sized(10.0, 0.1)
"""Time of a node for the links that its coordinator has it measure, one node after the other."""


class Watch:
    """In the coordinator's process: the heartbeats it has applied, and their times by the machine's
    clock."""

    def __init__(self) -> None:
        self.delays: list[tuple[float, float]] = []
        self.joined: list[float] = []
        self.gone: dict[str, float] = {}

    def apply(self, state: State, event: Event) -> State:
        after = apply(state, event)
        match event:
            case HeartbeatsReceived():
                now = time.monotonic()
                self.delays += [(now, now - heard.others_share) for heard in event.heartbeats]
            case NodeConnected():
                self.joined.append(time.monotonic())
            case NodeDisconnected() | ActionIssued():
                subject = event.action if isinstance(event, ActionIssued) else event
                node = after.nodes.get(getattr(subject, "node_id", NodeId("")))
                if node is not None and not node.connected:
                    self.gone.setdefault(node.name, time.monotonic())
        return after

    def write(self, path: Path) -> None:
        path.write_text(
            json.dumps({"delays": self.delays, "joined": self.joined, "gone": self.gone})
        )


def serve(path: Path, arguments: Sequence[str]) -> None:
    """The coordinator's process: the daemon, watched."""
    watch = Watch()
    loop.apply = watch.apply  # type: ignore[attr-defined]
    try:
        daemon.run(arguments)
    finally:
        watch.write(path)


class Node:
    """A control client that holds what its commands require, and sends heartbeats that carry the
    time."""

    def __init__(self, number: int, address: str) -> None:
        self.name = NodeName(f"n{number}")
        self.silent = asyncio.Event()
        self._node_id = NodeId(f"id-{number}")
        self._channel = open_channel(address, None, keepalive_s=CONTROL_KEEPALIVE_S)
        self._held: dict[DeploymentName, StageStatus] = {}
        self._steps = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._heads: list[Any] = []
        registration = Registration(
            self._node_id, self.name, f"127.0.0.1:{number}", WIRE_VERSION, FACTS, "i1"
        )
        self.client = ControlClient(
            self._channel,
            address,
            registration,
            self._on_command,
            self._statuses,
            lambda: GIB,
            self._huge_pages,
            others_share=time.monotonic,
        )

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self.client.run()))

    async def close(self) -> None:
        """As when its process ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def _statuses(self) -> tuple[StageStatus, ...]:
        """The status of a working stage, which changes all the time."""
        self._steps += 1
        return tuple(_working(status, self._steps) for status in self._held.values())

    async def _huge_pages(self, stages: object) -> None:
        """Called before each heartbeat: a silent node has none any more."""
        if self.silent.is_set():
            await asyncio.Event().wait()

    def _on_command(self, operation_id: OperationId, command: ControlMessage) -> None:
        self._tasks.append(asyncio.create_task(self._answer(operation_id, command)))

    async def _answer(self, operation_id: OperationId, command: ControlMessage) -> None:
        result = CommandResult(operation_id)
        match command:
            case PrepareStage():
                held = (
                    command.deployment,
                    command.epoch,
                    command.stage,
                    command.placed.layers,
                    StagePhase.READY,
                )
                status = self._held[command.deployment] = StageStatus(*held)
                result = CommandResult(operation_id, stage=status)
            case ActivateHead():
                call = HeadServiceStub(self._channel).Attach()
                self._heads.append(call)
                await call.write(
                    head_message_to_wire(
                        HeadHello(self._node_id, command.deployment, command.epoch)
                    )
                )
                await call.initial_metadata()
            case _:
                await asyncio.sleep(PROBING_S)
                result = CommandResult(operation_id, UnavailableError("this node measures nothing"))
        self.client.send_results((result,))
        self.client.changed()


def _working(status: StageStatus, steps: int) -> StageStatus:
    return StageStatus(
        status.deployment,
        status.epoch,
        status.stage,
        status.layers,
        StagePhase.ACTIVE,
        steps_done=steps,
        busy_share=0.5,
    )


class Served(ChildDaemon):
    """The coordinator's process, which leaves notes; `arguments` are more of its own."""

    def __init__(self, directory: Path, arguments: Sequence[str] = ()) -> None:
        self._notes = directory / "notes.json"
        command = [
            "--serve",
            str(self._notes),
            "--",
            "--state-dir",
            str(directory / "state"),
            "--plaintext",
        ]
        listen = {"--listen": "127.0.0.1:0"}
        super().__init__(
            "coordinator", "bench.many_boxes", [*command, *arguments], directory, listen=listen
        )

    async def start(self) -> None:
        os.environ["PYTHONPATH"] = str(ROOT)  # it does not run in the checkout
        await super().start()
        await self.wait_ready(60)

    async def notes(self) -> dict[str, Any]:
        """End it, and read its notes."""
        await self.stop(60)
        found: dict[str, Any] = json.loads(self._notes.read_text()) if self._notes.exists() else {}
        return found

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


async def measure(count: int, seconds: float) -> dict[str, Any]:
    """`count` nodes at one coordinator."""
    deployments = min(DEPLOYMENTS, count // STAGES)
    with (
        tempfile.TemporaryDirectory(prefix="edgeshard-bench-") as directory,
        model_directory(None) as model,
    ):
        served = Served(Path(directory))
        await served.start()
        nodes = [Node(number, served.address) for number in range(count)]
        joining_s = await join(nodes)
        async with Client(served.address, plaintext=True) as client:
            await deploy(client, model, deployments, count)
        await asyncio.sleep(CALM_S)
        began = time.monotonic()
        cpu_s = served.cpu_s()
        own_s = time.process_time()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        coordinator = (served.cpu_s() - cpu_s) / (ended - began)
        own = (time.process_time() - own_s) / (ended - began)
        closed, silent = await die(nodes)
        notes = await served.notes()
        delays = sorted(delay for at, delay in notes["delays"] if began <= at < ended)
        back_s = await come_back(served, nodes, count - len(closed) - len(silent))
        for node in nodes:
            await node.close()
    gone = notes["gone"]
    return {
        "benchmark": "many_boxes",
        "nodes": count,
        "nodes_with_stages": STAGES * deployments,
        "heartbeats_per_second": len(delays) / (ended - began),
        "coordinator_processor_share": coordinator,
        "nodes_processor_share": own,
        "heartbeat_milliseconds": {name: 1000 * value for name, value in quantiles(delays).items()},
        "death_noticed_seconds": {
            "connection_closed": [gone[name] - at for name, at in closed.items() if name in gone],
            "silent": [gone[name] - at for name, at in silent.items() if name in gone],
        },
        "joining_seconds": joining_s,
        "seconds_until_all_are_back_after_a_restart": back_s,
        "load_1_minute": os.getloadavg()[0],
    }


async def join(nodes: Sequence[Node]) -> float:
    """All at once; seconds until the last is placeable."""
    began = time.monotonic()
    for node in nodes:
        node.start()
    async with asyncio.timeout(300):
        for node in nodes:
            await node.client.placeable.wait()
    return time.monotonic() - began


async def deploy(client: Client, model: Path, count: int, nodes_count: int) -> None:
    """`count` deployments, each on the next three of the nodes, and from the last node on again
    from the first."""
    await client.add_model(model, "demo")
    layer_count = (await client.stored_model("demo")).layer_count
    for number in range(count):
        nodes = tuple(f"n{(STAGES * number + stage) % nodes_count}" for stage in range(STAGES))
        spec = {"name": f"d{number}", "model": "demo", "source": nodes[0], "dtype": "float32"}
        await client.deploy(
            parse_spec({**spec, "layers": even_layers(layer_count, nodes)}), timeout_s=60
        )


async def die(nodes: Sequence[Node]) -> tuple[dict[str, float], dict[str, float]]:
    """When which nodes closed their connection, one after the other, and when one fell silent."""
    closed: dict[str, float] = {}
    last = nodes[-1]
    last.silent.set()
    silent = {str(last.name): time.monotonic()}
    await asyncio.sleep(NOTICED_S)
    for node in list(reversed(nodes))[1 : 1 + min(DEATHS, len(nodes) - 2)]:
        closed[node.name] = time.monotonic()
        await node.close()
        await asyncio.sleep(0.5)
    return closed, silent


async def come_back(served: Served, nodes: Sequence[Node], count: int) -> float | None:
    """Seconds from the start of the new coordinator's listening until `count` nodes are connected
    to it."""
    served.keep_address()
    await served.start()
    began = time.monotonic()
    await asyncio.sleep(NOTICED_S)
    notes = await served.notes()
    joined = sorted(at - began for at in notes["joined"])
    return joined[count - 1] if len(joined) >= count else None


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "most": values[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 100, 1000])
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of each measurement of processor time and delays",
    )
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.serve is not None:
        serve(options.serve, [argument for argument in rest if argument != "--"])
        return
    settle_grpc()  # for the coordinator's process, which inherits it
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = []
    for count in options.nodes:
        rows.append(asyncio.run(measure(count, options.seconds)))
        print(json.dumps(rows[-1]), file=sys.stderr)
    text = json.dumps(with_trees(rows, ROOMS), indent=2)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
