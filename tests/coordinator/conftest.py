"""A real coordinator on loopback, and scripted agents and clients that speak the wire protocol to
it."""

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
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.services.auditing import CallAudit
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import Placer
from edgeshard_coordinator.core.values.quotas import Quotas
from edgeshard_coordinator.core.values.state import Timings, validate_state

from edgeshard import WIRE_VERSION
from edgeshard.architectures import expected_tensors
from edgeshard.domain.control.commands import Registration
from edgeshard.domain.control.site import WeightsFile
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import EdgeShardError, NotFoundError
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import Digest, ModelName, NodeId, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import ModelManifest, TensorInfo
from edgeshard.domain.nodes.device import DeviceFacts, StageStatus
from edgeshard.process.clock import SystemClock
from edgeshard.proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    head_pb2,
    inference_pb2,
    inference_pb2_grpc,
)
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.site import spec_to_wire
from edgeshard.wire.status import from_rpc_error
from tests.support.identities import Identities
from tests.support.scripted_agent import DEADLINE_S, FakeAgent, FakeHead

GIB = 1 << 30
UNDISTURBED = Timings(
    heartbeat_timeout_s=1e9, lease_s=0.0, reattach_timeout_s=60.0, probe_quiet_s=1e9
)
"""The coordinator measures no links by itself. However slow the machine is, no present node counts
as gone: the agents here send heartbeats only if a test orders them. Nor is anybody waited for who
is gone."""


def build_manifest(
    layers: int = 12,
    name: str = "tiny",
    max_context: int = 128,
    tied: bool = False,
    **changes: object,
) -> ModelManifest:
    """The manifest of a llama, unless `changes` to its config.json make it another."""
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
        "tie_word_embeddings": tied,
        **changes,
    }
    tensors = tuple(
        TensorInfo(
            f"model.{t.name}".replace("model.lm_head", "lm_head"),
            DType.FLOAT32,
            t.shape,
            Digest("a" * 64),
        )
        for t in expected_tensors(config).values()
    )
    return ModelManifest(
        ModelName(name), str(config["model_type"]), json.dumps(config), tensors, ()
    )


def build_facts(budget: int = 4 * GIB) -> DeviceFacts:
    return DeviceFacts("cpu", "test node", 2, budget, budget, False, "test")


def build_registration(name: str, incarnation: str = "i1", **changes: Any) -> Registration:
    known = Registration(
        NodeId(f"id-{name}"),
        NodeName(name),
        f"{name}:7000",
        WIRE_VERSION,
        build_facts(),
        incarnation,
    )
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

    def weights_files(self, manifest: ModelManifest) -> tuple[WeightsFile, ...]:
        return ()

    def added_at(self, digest: Digest) -> float:
        return 0.0

    def file_path(self, digest: Digest) -> Path:
        raise NotFoundError(f"there is no disk, and no file {digest} on it", field="sha256")

    def delete(self, name: str) -> None:
        self.get(name)
        del self.manifests[name]


class Site:
    """One coordinator process's worth of real server, with its callers."""

    def __init__(
        self,
        state_dir: Path,
        timings: Timings,
        backlog_limit: int,
        placer: Placer,
        identities: Identities | None = None,
        quotas: Quotas = Quotas(),  # noqa: B008 - frozen
    ) -> None:
        self._identities = identities
        self._quotas = quotas
        self.models = MemoryModels([build_manifest()])
        self.state_path = state_dir / "state.sqlite"
        self._timings = timings
        self._backlog_limit = backlog_limit
        self._placer = placer
        self._stack = AsyncExitStack()
        self.agents: list[FakeAgent] = []

    async def start(self) -> None:
        tls = None if self._identities is None else self._identities.coordinator()
        audit = AuditLog(self.state_path.parent / "audit", SystemClock())
        server = Server("127.0.0.1:0", tls, watch=CallAudit(audit))
        store = StateStore(self.state_path)
        self.coordinator = Coordinator(
            server,
            store,
            self.models,
            None,
            self._placer,
            SystemClock(),
            self._timings,
            self._backlog_limit,
            self._quotas,
            audit,
        )
        self.address = await self.coordinator.start()
        self.channel = self._dial(Role.OPERATOR, "admin")
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def stop(self) -> None:
        """Stop the coordinator as the end of a process would, then check its remains."""
        await self.coordinator.stop()
        for agent in self.agents:
            await agent.vanish()
        await self.channel.close()
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

    async def until_phase(self, name: str, phase: str, epoch: int = 0) -> Any:
        def reached(state: Any) -> bool:
            record = state.deployments.get(name)
            return record is not None and record.phase == phase and record.epoch >= epoch

        await self.until(reached)
        return self.state.deployments[name]

    def _dial(self, role: Role, id: str) -> grpc.aio.Channel:
        return open_channel(
            self.address, None if self._identities is None else self._identities.of(role, id)
        )

    def channel_of(self, role: Role, id: str) -> grpc.aio.Channel:
        """A connection of its own with that certificate, if the site has certificates."""
        channel = self._dial(role, id)
        self._stack.push_async_callback(channel.close)
        return channel

    def agent(self, name: str, holder: tuple[Role, str] | None = None, **changes: Any) -> FakeAgent:
        """An agent on a connection of its own, not yet registered; with the certificate of
        `holder`, or its own."""
        channel = self.channel_of(*(holder or (Role.AGENT, name)))
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
        return admin_pb2.DeployRequest(
            operation_id=operation_id, spec=spec_to_wire(parse_spec({**values, **changes}))
        )

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

    async def heard(self, agent: FakeAgent, *stages: StageStatus) -> None:
        """The agent reports the stages it holds, and the report is in the state."""
        await agent.heartbeat(*stages)
        await self.until(lambda state: state.nodes[agent.node_id].huge_pages == agent.pages)

    def own_inference(
        self, client: str = "app"
    ) -> tuple[inference_pb2_grpc.InferenceServiceStub, grpc.aio.Channel]:
        channel = self.channel_of(Role.CLIENT, client)
        return inference_pb2_grpc.InferenceServiceStub(channel), channel

    def generate(
        self, request_id: str = "", model: str = "tale", max_new_tokens: int = 8, **kwargs: Any
    ) -> Any:
        """`resume` are the tokens of a client that reconnects."""
        resume = kwargs.pop("resume", None)
        request = inference_pb2.GenerateRequest(
            model=model,
            request_id=request_id,
            generation=head_pb2.Generation(prompt="once", max_new_tokens=max_new_tokens),
            resume=None if resume is None else inference_pb2.Resumption(tokens=resume),
        )
        return self.inference.Generate(request, **{"timeout": DEADLINE_S, **kwargs})


@pytest.fixture
async def open_site(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start(
            backlog_limit: int = 4096,
            placer: Placer = PlanningPlacer(),  # noqa: B008
            identities: Identities | None = None,
            quotas: Quotas = Quotas(),  # noqa: B008 - frozen
            **timings: Any,
        ) -> Site:
            site = Site(
                tmp_path, replace(UNDISTURBED, **timings), backlog_limit, placer, identities, quotas
            )
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
    """`async with failing(NotFoundError) as caught:` - the block must end with that typed error
    over gRPC."""

    @asynccontextmanager
    async def expect(kind: type[EdgeShardError]) -> AsyncIterator[list[EdgeShardError]]:
        caught: list[EdgeShardError] = []
        with pytest.raises(grpc.aio.AioRpcError) as info:
            yield caught
        error = from_rpc_error(info.value)
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        caught.append(error)

    return expect
