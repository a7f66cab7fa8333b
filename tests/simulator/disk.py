"""The coordinator's disk: acknowledged writes stay, a write that a crash interrupts may be there or
not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeshard_coordinator.core.deployments.deployments import restored_record
from edgeshard_coordinator.core.values.measurements import Measurements
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    KnownNode,
    ServedOperation,
    State,
    Timings,
)

from edgeshard.domain.deployments.traffic import Traffic
from edgeshard.domain.errors import InternalError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, OperationId
from tests.simulator.loop import Process


@dataclass
class Disk:
    """The files. `fails` decides whether the present write is refused."""

    deployments: dict[DeploymentName, DeploymentRecord] = field(default_factory=dict)
    retired: dict[DeploymentName, Epoch] = field(default_factory=dict)
    nodes: dict[NodeId, KnownNode] = field(default_factory=dict)
    operations: dict[OperationId, ServedOperation] = field(default_factory=dict)
    traffic: dict[Any, Traffic] = field(default_factory=dict)


class SimStore:
    """Replaces `StateStore`: one write after the other, each of which takes its time."""

    def __init__(
        self, process: Process, disk: Disk, dice: random.Random, fails: Callable[[], bool]
    ) -> None:
        self._process = process
        self._disk = disk
        self._dice = dice
        self._fails = fails
        self._free_at = 0.0
        self._open = False

    async def open(self, instance: str, timings: Timings, now: float = 0.0) -> State:
        def read() -> State:
            disk = self._disk
            return State(
                instance=instance,
                timings=timings,
                epoch_floor=Epoch(1_000_000),
                nodes={
                    node.node_id: KnownNode(
                        node.node_id,
                        node.name,
                        node.address,
                        node.wire_version,
                        node.facts,
                        saved=True,
                    )
                    for node in disk.nodes.values()
                },
                deployments={
                    name: restored_record(record)
                    for name, record in sorted(disk.deployments.items())
                },
                retired=dict(disk.retired),
            )

        state: State = await self._do(read, may_fail=False)
        return state

    async def save(self, *records: DeploymentRecord) -> None:
        def write() -> None:
            for record in records:
                self._disk.deployments[record.name] = record.on_disk
                for operation in record.operations:
                    self._disk.operations.setdefault(operation.operation_id, operation)

        await self._do(write)

    async def forget(self, record: DeploymentRecord) -> None:
        def write() -> None:
            self._disk.deployments.pop(record.name, None)
            self._disk.retired[record.name] = record.epoch

        await self._do(write)

    async def save_node(self, node: KnownNode) -> None:
        def write() -> None:
            self._disk.nodes[node.node_id] = node

        await self._do(write)

    async def save_measurements(
        self, node_id: NodeId, measurements: Measurements, now: float
    ) -> None:
        await self._do(lambda: None)

    async def load_traffic(self) -> dict[Any, Traffic]:
        return dict(self._disk.traffic)

    async def save_traffic(self, traffic: Mapping[Any, Traffic]) -> None:
        await self._do(lambda: self._disk.traffic.update(traffic))

    async def find_operation(self, operation_id: OperationId) -> ServedOperation | None:
        found: ServedOperation | None = await self._do(
            lambda: self._disk.operations.get(operation_id), may_fail=False
        )
        return found

    async def save_operation(self, operation: ServedOperation) -> None:
        await self._do(lambda: self._disk.operations.setdefault(operation.operation_id, operation))

    async def close(self) -> None:
        await self._do(lambda: None, may_fail=False)

    async def _do(self, work: Callable[[], Any], may_fail: bool = True) -> Any:
        """The write happens, and a moment later the process is notified: a crash may happen
        between."""
        loop = self._process.loop
        future = loop.create_future()
        self._free_at = max(self._free_at, loop.now) + self._dice.uniform(0.001, 0.02)

        def act() -> None:
            if may_fail and self._fails():
                result: Any = InternalError(
                    "the disk is full", field="state-dir", reason="STATE_STORE"
                )
            else:
                result = work()
            self._process.call_later(self._dice.uniform(0.0, 0.005), tell, result)

        def tell(result: Any) -> None:
            if future.done():
                return
            if isinstance(result, InternalError):
                future.set_exception(result)
            else:
                future.set_result(result)

        loop.call_global(self._free_at, act, context=self._process.context)
        return await future
