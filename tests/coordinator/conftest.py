"""A real coordinator on loopback, and scripted agents and clients that speak the wire protocol to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.persistence import StateStore
from edgeshard_coordinator.core.placing import Placer
from edgeshard_coordinator.core.planned import PlanningPlacer
from edgeshard_coordinator.core.state import Timings, validate_state

from edgeshard import WIRE_VERSION
from edgeshard.architectures import expected_tensors
from edgeshard.domain.commands import (
    ActivateHead,
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
from edgeshard.domain.deployment import parse_spec
from edgeshard.domain.device import DeviceFacts, StagePhase, StageStatus
from edgeshard.domain.dtypes import DType
from edgeshard.domain.errors import EdgeShardError, NotFoundError
from edgeshard.domain.ids import Digest, ModelName, NodeId, NodeName, OperationId
from edgeshard.domain.model import ModelManifest, TensorInfo
from edgeshard.domain.trace import StageTrace
from edgeshard.process.clock import SystemClock
from edgeshard.proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    coordinator_pb2_grpc,
    head_pb2,
    head_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.common import spec_to_wire
from edgeshard.wire.control import (
    agent_message_to_wire,
    command_from_wire,
    heartbeat_to_wire,
    registration_to_wire,
    report_to_wire,
)
from edgeshard.wire.debug import parts_of
from edgeshard.wire.status import from_rpc_error, to_failure

GIB = 1 << 30
DEADLINE_S = 30.0
UNDISTURBED = Timings(heartbeat_timeout_s=1e9, reattach_timeout_s=60.0, probe_quiet_s=1e9)
"""The coordinator measures no links by itself, and however slow the machine is, nobody counts as gone who is not: the
agents here send no heartbeats."""


def build_manifest(layers: int = 12, name: str = "tiny", max_context: int = 128) -> ModelManifest:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": layers,
        "vocab_size": 256,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    tensors = tuple(
        TensorInfo(f"model.{t.name}".replace("model.lm_head", "lm_head"), DType.FLOAT32, t.shape, Digest("a" * 64))
        for t in expected_tensors(config).values()
    )
    return ModelManifest(ModelName(name), "llama", json.dumps(config), tensors, ())


def build_facts(budget: int = 4 * GIB) -> DeviceFacts:
    return DeviceFacts("cpu", "test box", 2, budget, budget, False, "test")


def build_registration(name: str, incarnation: str = "i1", **changes: Any) -> Registration:
    known = Registration(NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", WIRE_VERSION, build_facts(), incarnation)
    return replace(known, **changes)


class MemoryModels:
    """A model store without a disk."""

    def __init__(self, manifests: Iterable[ModelManifest]) -> None:
        self.manifests = {str(manifest.name): manifest for manifest in manifests}

    def get(self, name_or_digest: str) -> tuple[ModelManifest, Digest]:
        for name, manifest in self.manifests.items():
            if name_or_digest in (name, manifest.digest()):
                return manifest, manifest.digest()
        raise NotFoundError(f"model {name_or_digest} is unknown", field="model")

    def list(self) -> tuple[tuple[ModelManifest, Digest], ...]:
        return tuple((manifest, manifest.digest()) for manifest in self.manifests.values())

    def delete(self, name: str) -> None:
        self.get(name)
        del self.manifests[name]


Answer = Callable[[ControlMessage], EdgeShardError | None]


class FakeAgent:
    """An agent that speaks Register, Control and Attach.

    It answers every command with success unless `answer` gives a failure for it, after it has reported what `measured`
    gives; commands of a kind in `held` wait in `pending` until the test answers them.
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
        self._channel = channel
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def node_id(self) -> NodeId:
        return self.registration.node_id

    async def register(self) -> Any:
        return await self.stub.Register(registration_to_wire(self.registration), timeout=DEADLINE_S)

    async def connect(self) -> None:
        await self.register()
        self._call = self.stub.Control()
        await self._call.write(agent_message_to_wire(ControlHello(self.node_id, self.registration.incarnation)))
        self._task = asyncio.create_task(self._serve(self._call))

    async def heartbeat(self, *stages: StageStatus) -> bool:
        beat = Heartbeat(self.node_id, self.registration.incarnation, stages, GIB)
        return bool((await self.stub.Heartbeat(heartbeat_to_wire(beat), timeout=DEADLINE_S)).known)

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
            await head.attach()
        report = self.measured(command) if failure is None else None
        if report is not None:
            await self.report(report)
        await self._call.write(agent_message_to_wire(CommandResult(operation_id, failure, stage, trace)))

    async def send_dump(self, operation_id: OperationId, text: bytes) -> None:
        for part in parts_of(operation_id, text):
            await self._call.write(agent_message_to_wire(part))

    async def report(self, report: ProfileReport) -> None:
        await self.stub.ReportProfile(report_to_wire(report), timeout=DEADLINE_S)

    async def progress(self, operation_id: OperationId, done: int, total: int, what: str) -> None:
        await self._call.write(agent_message_to_wire(CommandProgress(operation_id, done, total, what)))

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


class FakeHead:
    """A head's Attach stream: records what comes down, sends what the test says."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str, deployment: str, epoch: int) -> None:
        self.epoch = epoch
        self.down: asyncio.Queue[head_pb2.AttachResponse] = asyncio.Queue()
        self._hello = head_pb2.HeadHello(node_id=node_id, deployment=deployment, epoch=epoch)
        self._stub = head_pb2_grpc.HeadServiceStub(channel)
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None
        self.error: EdgeShardError | None = None

    async def attach(self) -> None:
        self._call = self._stub.Attach()
        await self._call.write(head_pb2.AttachRequest(hello=self._hello))
        self._task = asyncio.create_task(self._read())

    def cancel(self) -> None:
        self._call.cancel()

    async def ended(self) -> EdgeShardError | None:
        """Wait for the coordinator to end the stream; its error, None for an orderly end."""
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

    async def accept(self, request_id: str, prompt_tokens: Iterable[int] = (5, 6, 7), epoch: int | None = None) -> None:
        accepted = head_pb2.HeadAccepted(
            request_id=request_id, epoch=self.epoch if epoch is None else epoch, prompt_tokens=prompt_tokens
        )
        await self._call.write(head_pb2.AttachRequest(accepted=accepted))

    async def token(
        self, request_id: str, position: int, token: int = 1, epoch: int | None = None, text: str | None = None
    ) -> None:
        message = self._token(request_id, position, token, epoch, text)
        await self._call.write(head_pb2.AttachRequest(token=message))

    async def tokens(self, *tokens: tuple[str, int, int]) -> None:
        """Several (request, position, token) in one message."""
        message = head_pb2.HeadTokens(tokens=[self._token(*token) for token in tokens])
        await self._call.write(head_pb2.AttachRequest(tokens=message))

    def _token(
        self, request_id: str, position: int, token: int, epoch: int | None = None, text: str | None = None
    ) -> head_pb2.HeadToken:
        return head_pb2.HeadToken(
            request_id=request_id,
            epoch=self.epoch if epoch is None else epoch,
            position=position,
            token=token,
            text=f"<{token}>" if text is None else text,
        )

    async def finish(self, request_id: str, reason: Any = head_pb2.FINISH_REASON_LENGTH) -> None:
        finished = head_pb2.HeadFinished(request_id=request_id, epoch=self.epoch, reason=reason)
        await self._call.write(head_pb2.AttachRequest(finished=finished))

    async def fail(self, request_id: str, error: EdgeShardError) -> None:
        failed = head_pb2.HeadFailed(request_id=request_id, epoch=self.epoch, failure=to_failure(error))
        await self._call.write(head_pb2.AttachRequest(failed=failed))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.down.put_nowait(message)
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error)
        except asyncio.CancelledError:
            pass


class Site:
    """One coordinator process's worth of real server, with its callers."""

    def __init__(self, state_dir: Path, timings: Timings, backlog_limit: int, placer: Placer) -> None:
        self.models = MemoryModels([build_manifest()])
        self.state_path = state_dir / "state.sqlite"
        self._timings = timings
        self._backlog_limit = backlog_limit
        self._placer = placer
        self._stack = AsyncExitStack()
        self.agents: list[FakeAgent] = []

    async def start(self) -> None:
        server = Server("127.0.0.1:0", None)
        store = StateStore(self.state_path)
        self.coordinator = Coordinator(
            server, store, self.models, None, self._placer, SystemClock(), self._timings, self._backlog_limit
        )
        self.address = await self.coordinator.start()
        self.channel = open_channel(self.address, None)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def stop(self) -> None:
        """Stop the coordinator as a process end would, then check what it left."""
        for agent in self.agents:
            await agent.vanish()
        await self.channel.close()
        await self.coordinator.stop()
        await self._stack.aclose()
        validate_state(self.coordinator.loop.state)

    async def restart(self) -> None:
        await self.stop()
        self.agents = []
        await self.start()

    @property
    def state(self) -> Any:
        return self.coordinator.loop.state

    async def until(self, condition: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.coordinator.loop.until(condition)

    async def until_phase(self, name: str, phase: str) -> Any:
        def reached(state: Any) -> bool:
            record = state.deployments.get(name)
            return record is not None and record.phase == phase

        await self.until(reached)
        return self.state.deployments[name]

    def agent(self, name: str, **changes: Any) -> FakeAgent:
        """An agent on a connection of its own, not yet registered."""
        channel = open_channel(self.address, None)
        self._stack.push_async_callback(channel.close)
        agent = FakeAgent(channel, build_registration(name, **changes))
        self.agents.append(agent)
        return agent

    def deploy_request(self, operation_id: str = "op-1", **changes: Any) -> admin_pb2.DeployRequest:
        layers = "a=0:4,b=4:9,c=9:12"
        values = {
            "name": "tale",
            "model": "tiny",
            "source": "a",
            "dtype": "float32",
            "concurrency": 1,
            "layers": layers,
        }
        return admin_pb2.DeployRequest(operation_id=operation_id, spec=spec_to_wire(parse_spec({**values, **changes})))

    async def deployed(self, **changes: Any) -> tuple[list[FakeAgent], FakeHead]:
        """Three agents with a ready deployment, and the head's Attach stream."""
        agents = await self.connected("a", "b", "c")
        await self.admin.Deploy(self.deploy_request(**changes), timeout=DEADLINE_S)
        await self.until_phase("tale", "ready")
        return agents, agents[0].heads[-1]

    async def read(self, call: Any) -> Any:
        """The next message of a stream that must have one."""
        message = await asyncio.wait_for(call.read(), DEADLINE_S)
        assert message is not grpc.aio.EOF
        return message

    async def connected(self, *names: str) -> list[FakeAgent]:
        agents = [self.agent(name) for name in names]
        for agent in agents:
            await agent.connect()
            await self.until(lambda state, agent=agent: state.is_connected(agent.node_id))  # type: ignore[misc]
        return agents

    def own_inference(self) -> tuple[inference_pb2_grpc.InferenceServiceStub, grpc.aio.Channel]:
        channel = open_channel(self.address, None)
        self._stack.push_async_callback(channel.close)
        return inference_pb2_grpc.InferenceServiceStub(channel), channel

    def generate(self, request_id: str = "", model: str = "tale", max_new_tokens: int = 8, **kwargs: Any) -> Any:
        request = inference_pb2.GenerateRequest(
            model=model,
            request_id=request_id,
            generation=head_pb2.Generation(prompt="once", max_new_tokens=max_new_tokens),
        )
        return self.inference.Generate(request, **{"timeout": DEADLINE_S, **kwargs})


@pytest.fixture
async def open_site(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start(
            backlog_limit: int = 4096,
            placer: Placer = PlanningPlacer(),  # noqa: B008
            **timings: Any,
        ) -> Site:
            site = Site(tmp_path, replace(UNDISTURBED, **timings), backlog_limit, placer)
            await site.start()
            stack.push_async_callback(site.stop)
            return site

        yield start


@pytest.fixture
async def site(open_site: Callable[..., Any]) -> Any:
    return await open_site()


@pytest.fixture(scope="session")
def make_manifest() -> Callable[..., ModelManifest]:
    return build_manifest


@pytest.fixture(scope="session")
def make_registration() -> Callable[..., Registration]:
    return build_registration


@pytest.fixture(scope="session")
def make_facts() -> Callable[..., DeviceFacts]:
    return build_facts


@pytest.fixture(scope="session")
def failing() -> Any:
    """`async with failing(NotFoundError) as caught:` - the block must end with that typed error over gRPC."""

    @asynccontextmanager
    async def expect(kind: type[EdgeShardError]) -> AsyncIterator[list[EdgeShardError]]:
        caught: list[EdgeShardError] = []
        with pytest.raises(grpc.aio.AioRpcError) as info:
            yield caught
        error = from_rpc_error(info.value)
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        caught.append(error)

    return expect
