"""An enrolled node that holds no stage and lies: it sends each message of an agent, with any value.

Three in four of its messages are near to true ones. The others have any value in any field
(`tests.support.any_messages`). It knows all that the coordinator knows. It uses its own name and
id: certificates, which are not simulated, refuse others.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from edgeshard_coordinator.core.values.events import (
    CommandAnswered,
    Event,
    HeadAttached,
    HeartbeatsReceived,
    LinkReported,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    ProfileReported,
)
from edgeshard_coordinator.core.values.state import DeploymentRecord

from edgeshard import WIRE_VERSION
from edgeshard.domain.control.commands import (
    AgentMessage,
    CommandKey,
    CommandKind,
    CommandProgress,
    CommandResult,
    ControlHello,
    DumpPart,
    Heartbeat,
    HeartbeatChange,
    ProfileReport,
    Registration,
)
from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.ids import MAX_EPOCH, DeploymentName, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import Condition, DeviceFacts, StagePhase, StageStatus
from edgeshard.domain.nodes.profile import LinkProfile, MeasuredLink
from edgeshard.domain.requests.head import HeadHello, HeldRequest
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.proto.v1 import coordinator_pb2, head_pb2
from edgeshard.proto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from edgeshard.proto.v1.head_pb2_grpc import HeadServiceStub
from edgeshard.wire.control import agent_message_to_wire, registration_to_wire, report_to_wire
from edgeshard.wire.head_stream import head_message_to_wire
from tests.simulator.channel import SimChannel
from tests.simulator.loop import Process
from tests.support.any_messages import MessageBuilder

if TYPE_CHECKING:
    from tests.simulator.world import World

LIAR = NodeId("id-liar")
NOBODY = NodeId("id-nobody")
ItemT = TypeVar("ItemT")
MOST_ITEMS = 4200
MOST_BYTES = 64 << 10
"""Limit of a message, so that a seed stays short; the fuzzer of agents' messages has no such
limits."""


class Liar:
    """The process. Its memory budget is far below a stage's need, so it never gets one."""

    def __init__(self, world: World, coordinator: str, dice: random.Random) -> None:
        self._world, self._dice = world, dice
        self.process = process = Process(world.loop, "liar", ahead_s=dice.uniform(0, 1e5))
        channel: Any = SimChannel(world.network, process, coordinator)
        self._stub, self._heads = CoordinatorServiceStub(channel), HeadServiceStub(channel)
        self._incarnation = "liar-1"
        self._builder = MessageBuilder(dice, self._known, MOST_ITEMS, MOST_BYTES, many=0.01)
        self._kinds: list[Callable[[], AgentMessage]] = [
            *(
                self._heartbeat,
                self._heartbeat,
                self._change,
                self._result,
                self._result,
                self._result,
            ),
            *(self._link, self._condition, self._progress, self._dump),
        ]
        process.call_later(dice.uniform(0.2, 2.0), self._begin)

    def _begin(self) -> None:
        lying = self.process.spawn(self._lie())
        lying.add_done_callback(self._world.ended, context=self.process.context)

    async def _lie(self) -> None:
        dice = self._dice
        while True:
            try:
                await self._stub.Register(registration_to_wire(self._registration()), timeout=2.0)
                await self._hold_stream()
            except (
                grpc.aio.AioRpcError,
                grpc.aio.UsageError,
                asyncio.InvalidStateError,
                EdgeShardError,
            ) as error:
                self._refusal(error)
            await asyncio.sleep(dice.choice((0.1, 0.5, 1.0)))

    async def _hold_stream(self) -> None:
        """A control stream with some lies. Calls of other services come between."""
        dice, call = self._dice, self._stub.Control()
        await call.write(agent_message_to_wire(ControlHello(LIAR, self._incarnation)))
        try:
            for _ in range(dice.randint(1, 40)):
                await self._say_once(call)
                # Later on, only now and then: the run has a limit of steps.
                pauses = (0.001, 0.01, 0.1) if self._world.calm_since is None else (0.2, 0.5)
                await asyncio.sleep(dice.choice(pauses))
        finally:
            call.cancel()

    async def _say_once(self, call: Any) -> None:
        dice = self._dice
        chance = dice.random()
        if dice.random() < 0.25:
            await self._say_any(call, chance)
        elif chance < 0.04:
            await self._stub.ReportProfile(report_to_wire(self._report()), timeout=2.0)
        elif chance < 0.07:
            await self._attach()
        elif chance < 0.09:
            await self._stub.Register(registration_to_wire(self._registration()), timeout=2.0)
        else:
            await call.write(agent_message_to_wire(dice.choice(self._kinds)()))

    async def _say_any(self, call: Any, chance: float) -> None:
        """A message with any value in any field, except its own name and id if a certificate is
        compared with them."""
        if chance < 0.08:
            report = self._builder.build(coordinator_pb2.ReportProfileRequest)
            report.node_id = LIAR
            await self._refused(self._stub.ReportProfile(report, timeout=2.0))
        elif chance < 0.16:
            registration = self._builder.build(coordinator_pb2.RegisterRequest)
            registration.node_id = LIAR
            registration.name = "liar"
            registration.wire_version = WIRE_VERSION
            await self._refused(self._stub.Register(registration, timeout=2.0))
        elif chance < 0.24:
            hello = self._builder.build(head_pb2.HeadHello)
            hello.node_id = LIAR
            attach = self._heads.Attach()
            await attach.write(head_pb2.AttachRequest(hello=hello))
            await attach.write(self._builder.build(head_pb2.AttachRequest))
            await self._refused(asyncio.wait_for(attach.read(), 0.5))
            attach.cancel()
        else:
            await call.write(self._builder.build(coordinator_pb2.ControlRequest))

    async def _refused(self, call: Any) -> None:
        """Wait for the answer, which may be a refusal: the stream continues."""
        try:
            await call
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            self._refusal(error)

    def _refusal(self, error: Exception) -> None:
        """Note a refusal. It must be a typed one."""
        self._world.note(f"the liar is refused: {error!r:.100}")
        is_internal = (
            isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.INTERNAL
        )
        self._world.watch.hold(not is_internal, f"a lie ended a call with {error!r:.200}")

    def _known(self, field: str) -> Sequence[Any]:
        """Values that the coordinator knows, by the name of a field."""
        match field:
            case "node_id" | "sender_id":
                return (LIAR,)
            case "receiver_id":
                return ("id-a", "id-b", "id-none")
            case "incarnation":
                return (self._incarnation,)
            case "deployment":
                return (self._name(),)
            case "epoch":
                return (self._epoch(),)
            case "stage" | "from_stage" | "to_stage" | "first":
                return range(6)
            case "request_id":
                return self._request_ids()
            case "operation_id":
                return (self._operation_id(),)
            case _:
                return ()

    async def _attach(self) -> None:
        held = tuple(HeldRequest(app_id, "run", tokens=9) for app_id in self._request_ids())
        attach = self._heads.Attach()
        await attach.write(head_message_to_wire(HeadHello(LIAR, self._name(), self._epoch(), held)))
        try:
            await asyncio.wait_for(attach.read(), 0.5)
        except (grpc.aio.AioRpcError, TimeoutError):
            pass
        finally:
            attach.cancel()

    # Values

    def _one_of(self, items: Sequence[ItemT]) -> ItemT:
        return self._dice.choice(items)

    def _records(self) -> list[DeploymentRecord]:
        boss = self._world.boss
        return [] if boss is None else list(boss.coordinator.loop.state.deployments.values())

    def _request_ids(self) -> list[Any]:
        boss = self._world.boss
        return [] if boss is None else list(boss.coordinator.front._requests)[:3]

    def _name(self) -> DeploymentName:
        return DeploymentName(
            self._one_of(
                [*(str(record.name) for record in self._records()), "tale", "poem", "none"]
            )
        )

    def _epoch(self) -> Epoch:
        now = [record.epoch for record in self._records()] or [Epoch(1)]
        near = self._one_of(now) + self._dice.choice((0, 0, 0, 1, -1))
        far = self._dice.choice((0, 1, 7, 1 << 62, MAX_EPOCH, MAX_EPOCH, (1 << 64) - 1))
        return Epoch(max(0, near if self._dice.random() < 0.7 else far))

    def _status(self) -> StageStatus:
        phase, first = self._one_of(list(StagePhase)), self._dice.randrange(6)
        return StageStatus(
            *(
                self._name(),
                self._epoch(),
                self._dice.randrange(4),
                LayerRange(first, first + 1),
                phase,
            ),
            fetched_bytes=self._dice.randrange(1 << 40),
            failure_reason=self._one_of(("", "LIE")),
        )

    def _statuses(self) -> tuple[StageStatus, ...]:
        return tuple(self._status() for _ in range(self._dice.choice((0, 1, 3, 12))))

    def _heartbeat(self) -> Heartbeat:
        share = self._one_of((0.0, 1.0, -1.0, math.nan))
        return Heartbeat(
            LIAR, self._incarnation, self._statuses(), self._dice.randrange(1 << 50), None, share
        )

    def _change(self) -> HeartbeatChange:
        statuses = self._statuses()
        removed = tuple(status.key for status in self._statuses())
        return HeartbeatChange(statuses, removed, urgent=self._dice.random() < 0.5)

    def _operation_id(self) -> OperationId:
        records = self._records()
        if not records or self._dice.random() < 0.1:
            return OperationId(self._one_of(("", "a/b", "u/1/prepare/0", "x" * 300)))
        record = self._one_of(records)
        numbers = [*range(3), *(entry.number for entry in record.standbys)]
        epoch = self._one_of((record.epoch, self._epoch()))
        return CommandKey(
            record.uid, epoch, self._one_of(list(CommandKind)), self._one_of(numbers)
        ).operation_id

    def _result(self) -> CommandResult:
        failure = None if self._dice.random() < 0.5 else UnavailableError("a lie", reason="LIE")
        stage = None if self._dice.random() < 0.3 else self._status()
        return CommandResult(self._operation_id(), failure, stage)

    def _link(self) -> LinkSuspected:
        recovered = self._dice.random() < 0.2
        return LinkSuspected(
            self._name(),
            self._epoch(),
            self._dice.randrange(4),
            self._dice.randrange(4),
            recovered,
            "a lie",
        )

    def _condition(self) -> Condition:
        return Condition(
            "a lie",
            self._one_of((0.0, math.inf, -math.inf, math.nan)),
            self._dice.randrange(1 << 20),
        )

    def _progress(self) -> CommandProgress:
        return CommandProgress(self._operation_id(), 1 << 31, 0, "a lie")

    def _dump(self) -> DumpPart:
        return DumpPart(self._operation_id(), b"{", self._dice.random() < 0.5)

    def _facts(self) -> DeviceFacts:
        return DeviceFacts(
            "cpu",
            "liar",
            1 + self._dice.randrange(64),
            1 << 30,
            self._dice.randrange(1000),
            False,
            "x",
        )

    def _registration(self) -> Registration:
        if self._dice.random() < 0.2:
            self._incarnation = f"liar-{self._dice.randrange(1 << 30)}"
        labels = {"zone": self._one_of(("hall1", "hall2"))}
        address = f"{self._one_of(('liar', 'a'))}:{self._dice.randrange(1, 60_000)}"
        made = Registration(
            LIAR, NodeName("liar"), address, WIRE_VERSION, self._facts(), self._incarnation
        )
        return replace(made, labels=labels, starting=self._dice.random() < 0.3)

    def _report(self) -> ProfileReport:
        profile = LinkProfile(1e-9, 1e12, 0.0, 2, 1)
        receiver = NodeId(self._one_of(("id-a", "id-b", "id-none")))
        links = (MeasuredLink(LIAR, receiver, profile),)
        return ProfileReport(LIAR, self._facts(), links=links if self._dice.random() < 0.3 else ())


def without_liar(event: Event) -> Event | None:
    """The event without the liar's part in it; None if it has none."""
    nothing = NodeDisconnected(NOBODY, 0, event.now)
    match event:
        case HeartbeatsReceived(heartbeats):
            others = tuple(heard for heard in heartbeats if heard.node_id != LIAR)
            return None if len(others) == len(heartbeats) else replace(event, heartbeats=others)
        case (
            CommandAnswered()
            | LinkReported()
            | HeadAttached()
            | NodeConnected()
            | NodeDisconnected()
        ):
            return nothing if event.node_id == LIAR else None
        case NodeRegistered():
            return nothing if event.registration.node_id == LIAR else None
        case ProfileReported():
            return nothing if event.report.node_id == LIAR else None
        case _:
            return None
