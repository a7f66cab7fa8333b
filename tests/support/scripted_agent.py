"""An agent and a head without an engine: they use the wire protocol with a real coordinator,
controlled by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc

from edgeshard.domain.control.commands import (
    ActivateHead,
    AgentMessage,
    CommandProgress,
    CommandResult,
    ControlHello,
    ControlMessage,
    Heartbeat,
    PrepareStage,
    ProfileReport,
    Registration,
    ReleaseStage,
)
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import NodeId, OperationId
from edgeshard.domain.models.packed_units import PackedUnit
from edgeshard.domain.nodes.device import HugePages, StagePhase, StageStatus
from edgeshard.domain.requests.trace import StageTrace
from edgeshard.proto.v1 import common_pb2, coordinator_pb2_grpc, head_pb2, head_pb2_grpc
from edgeshard.wire.codec import to_failure
from edgeshard.wire.control import (
    agent_message_to_wire,
    command_from_wire,
    registration_to_wire,
    report_to_wire,
)
from edgeshard.wire.debug import parts_of
from edgeshard.wire.status import from_rpc_error

DEADLINE_S = 30.0
FREE_BYTES = 1 << 30

Answer = Callable[[ControlMessage], EdgeShardError | None]


class FakeAgent:
    """An agent that speaks Register, Control and Attach.

    It answers every command with success unless `answer` returns a failure for it, after it has
    reported the result of `measured`. Commands of a kind in `held` wait in `pending` until the test
    answers them.
    """

    def __init__(self, channel: grpc.aio.Channel, registration: Registration) -> None:
        self.registration = registration
        self.stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self.commands: list[ControlMessage] = []
        self.held: set[type] = set()
        self.pending: list[tuple[OperationId, ControlMessage]] = []
        self.operation_ids: list[OperationId] = []
        self.answer: Answer = lambda command: None
        self.measured: Callable[[ControlMessage], ProfileReport | None] = lambda command: None
        self.changed = asyncio.Condition()
        self.heads: list[FakeHead] = []
        self.held_requests: list[head_pb2.HeldRequest] = []
        """The requests that its next head has from earlier runs of the coordinator."""
        self.pages = HugePages(0, 0)
        self._channel = channel
        self._call: Any = None
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def node_id(self) -> NodeId:
        return self.registration.node_id

    async def register(self) -> Any:
        return await self.stub.Register(registration_to_wire(self.registration), timeout=DEADLINE_S)

    async def connect(self) -> None:
        await self.register()
        await self.open_stream()

    async def open_stream(self) -> None:
        """A control stream of a node that is registered."""
        self._call, self._writing = self.stub.Control(), asyncio.Lock()
        await self.say(ControlHello(self.node_id, self.registration.incarnation))
        self._task = asyncio.create_task(self._serve(self._call))

    async def heartbeat(self, *stages: StageStatus) -> None:
        """A whole one. It has no answer; each is identified by its `pages`, which are in the state
        then."""
        self.pages = HugePages(self.pages.wanted_bytes + 1, 0)
        await self.say(
            Heartbeat(self.node_id, self.registration.incarnation, stages, FREE_BYTES, self.pages)
        )

    async def say(self, message: AgentMessage) -> None:
        async with self._writing:
            await self._call.write(agent_message_to_wire(message))

    async def vanish(self) -> None:
        """The process dies: every stream ends at once."""
        for head in self.heads:
            head.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._task is not None:
            # A write into a call that was cancelled under it may never return.
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def ended(self) -> None:
        """Wait for the coordinator to end the control stream in order."""
        assert self._task is not None
        await asyncio.wait_for(self._task, DEADLINE_S)

    async def restart(self) -> None:
        incarnation = self.registration.incarnation + "+"
        self.registration = replace(self.registration, incarnation=incarnation)
        await self.connect()

    async def reply(
        self,
        operation_id: OperationId,
        command: ControlMessage,
        failure: EdgeShardError | None = None,
        trace: StageTrace | None = None,
        packed: tuple[PackedUnit, ...] = (),
    ) -> None:
        stage = None
        if isinstance(command, PrepareStage) and failure is None:
            placed = command.placed
            stage = StageStatus(
                command.deployment,
                command.epoch,
                command.stage,
                placed.layers,
                StagePhase.READY,
                placed.parameter_bytes,
            )
        if isinstance(command, ActivateHead) and failure is None:
            head = FakeHead(self._channel, self.node_id, command.deployment, command.epoch)
            self.heads.append(head)
            await head.attach(self.held_requests)
        report = self.measured(command) if failure is None else None
        if report is not None:
            await self.report(report)
        await self.say(CommandResult(operation_id, failure, stage, trace, packed))

    async def send_dump(self, operation_id: OperationId, text: bytes) -> None:
        for part in parts_of(operation_id, text):
            await self.say(part)

    async def report(self, report: ProfileReport) -> None:
        await self.stub.ReportProfile(report_to_wire(report), timeout=DEADLINE_S)

    async def progress(self, operation_id: OperationId, done: int, total: int, what: str) -> None:
        await self.say(CommandProgress(operation_id, done, total, what))

    async def until(self, condition: Callable[[FakeAgent], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(lambda: condition(self))

    async def take_pending(self) -> tuple[OperationId, ControlMessage]:
        await self.until(lambda agent: bool(agent.pending))
        return self.pending.pop(0)

    def kinds(self) -> list[type]:
        return [type(command) for command in self.commands]

    def released(self) -> list[ReleaseStage]:
        return [command for command in self.commands if isinstance(command, ReleaseStage)]

    async def _serve(self, call: Any) -> None:
        async for message in call:
            operation_id, command = command_from_wire(message)
            async with self.changed:
                self.commands.append(command)
                self.operation_ids.append(operation_id)
                if type(command) in self.held:
                    self.pending.append((operation_id, command))
                self.changed.notify_all()
            if type(command) not in self.held:
                await self.reply(operation_id, command, self.answer(command))


def held_of(start: head_pb2.StartRequest, tokens: int = 0) -> head_pb2.HeldRequest:
    """The report of a head that still has it, with `tokens` new tokens."""
    return head_pb2.HeldRequest(
        request_id=start.request_id,
        instance=start.instance,
        client=start.client,
        digest=start.digest,
        tokens=tokens,
        scored=start.scored,
    )


class FakeHead:
    """A head's Attach stream: records received messages, sends the test's."""

    def __init__(
        self, channel: grpc.aio.Channel, node_id: str, deployment: str, epoch: int
    ) -> None:
        self.epoch = epoch
        self.down: asyncio.Queue[head_pb2.AttachResponse] = asyncio.Queue()
        self._hello = head_pb2.HeadHello(node_id=node_id, deployment=deployment, epoch=epoch)
        self._stub = head_pb2_grpc.HeadServiceStub(channel)
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None
        self.error: EdgeShardError | None = None
        self.forgotten: list[str] = []

    async def attach(
        self, held: Iterable[head_pb2.HeldRequest] = (), *, beacons: bool = False
    ) -> None:
        """`held` are the requests it has; `beacons`: it answers them, which is the test's duty."""
        self._call = self._stub.Attach()
        hello = head_pb2.HeadHello(
            node_id=self._hello.node_id,
            deployment=self._hello.deployment,
            epoch=self._hello.epoch,
            held=held,
            beacons=beacons,
        )
        await self._call.write(head_pb2.AttachRequest(hello=hello))
        self._task = asyncio.create_task(self._read())

    def cancel(self) -> None:
        self._call.cancel()

    async def ended(self) -> EdgeShardError | None:
        """Wait for the coordinator to end the stream; return its error, None if the end is
        orderly."""
        assert self._task is not None
        await asyncio.wait_for(self._task, DEADLINE_S)
        return self.error

    async def next_start(self) -> head_pb2.StartRequest:
        message = await asyncio.wait_for(self.down.get(), DEADLINE_S)
        assert message.WhichOneof("message") == "start", message.WhichOneof("message")
        return message.start

    async def next_cancel(self) -> str:
        message = await asyncio.wait_for(self.down.get(), DEADLINE_S)
        assert message.WhichOneof("message") == "cancel", message.WhichOneof("message")
        return str(message.cancel.request_id)

    async def accept(
        self, request_id: str, prompt_tokens: Iterable[int] = (5, 6, 7), epoch: int | None = None
    ) -> None:
        accepted = head_pb2.HeadAccepted(
            request_id=request_id,
            epoch=self.epoch if epoch is None else epoch,
            prompt_tokens=prompt_tokens,
        )
        await self._call.write(head_pb2.AttachRequest(accepted=accepted))

    async def answer(self) -> None:
        """Send a keepalive."""
        await self._call.write(head_pb2.AttachRequest(beacon=head_pb2.HeadBeacon()))

    async def token(
        self,
        request_id: str,
        position: int,
        token: int = 1,
        epoch: int | None = None,
        text: str | None = None,
        top: int = 0,
        stages: int = 0,
        logprob: float = 0.0,
    ) -> None:
        """Send a token, with `top` likeliest tokens and the timings of this number of stages."""
        message = self._token(request_id, position, token, epoch, text)
        message.logprob = logprob
        message.timings.extend([common_pb2.StageTiming(compute_s=0.5)] * stages)
        message.top.extend([common_pb2.TokenLogprob(token=1, logprob=-1.0)] * top)
        await self._call.write(head_pb2.AttachRequest(token=message))

    async def tokens(self, *tokens: tuple[str, int, int]) -> None:
        """Several (request, position, token) in one message."""
        message = head_pb2.HeadTokens(tokens=[self._token(*token) for token in tokens])
        await self._call.write(head_pb2.AttachRequest(tokens=message))

    def _token(
        self,
        request_id: str,
        position: int,
        token: int,
        epoch: int | None = None,
        text: str | None = None,
    ) -> head_pb2.HeadToken:
        return head_pb2.HeadToken(
            request_id=request_id,
            epoch=self.epoch if epoch is None else epoch,
            position=position,
            token=token,
            text=f"<{token}>" if text is None else text,
        )

    async def prompt_logprobs(
        self,
        request_id: str,
        position: int,
        count: int,
        *,
        top: bool = False,
        logprob: float = -1.0,
    ) -> None:
        logprobs = common_pb2.PromptLogprobs(position=position, logprobs=[logprob] * count)
        logprobs.top_tokens.extend([1] * count * top)
        logprobs.top_logprobs.extend([-1.0] * count * top)
        message = head_pb2.HeadPromptLogprobs(
            request_id=request_id, epoch=self.epoch, prompt_logprobs=logprobs
        )
        await self._call.write(head_pb2.AttachRequest(prompt_logprobs=message))

    async def finish(
        self, request_id: str, reason: Any = head_pb2.FINISH_REASON_LENGTH, text: str = ""
    ) -> None:
        finished = head_pb2.HeadFinished(
            request_id=request_id, epoch=self.epoch, reason=reason, text=text
        )
        await self._call.write(head_pb2.AttachRequest(finished=finished))

    async def admit(self, request_id: str, read: int = 0) -> None:
        admitted = head_pb2.HeadAdmitted(request_id=request_id, epoch=self.epoch, read=read)
        await self._call.write(head_pb2.AttachRequest(admitted=admitted))

    async def fail(self, request_id: str, error: EdgeShardError) -> None:
        failed = head_pb2.HeadFailed(
            request_id=request_id, epoch=self.epoch, failure=to_failure(error)
        )
        await self._call.write(head_pb2.AttachRequest(failed=failed))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                if message.WhichOneof("message") == "forget":
                    self.forgotten.append(message.forget.request_id)
                else:
                    self.down.put_nowait(message)
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error)
        except asyncio.CancelledError:
            pass
