"""A whole site over mutual TLS on loopback, of real processes, with what honest people and an attacker have of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgeshard import Client
from edgeshard.cli.commands.site.demo import even_layers
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.identity import JoinToken, Role
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.rpc.tls import TlsFiles
from tests.attack.live.target import Target
from tests.support.chat_models import DEMO_MODEL
from tests.support.membership import Mill, opened

NODES = ("a", "b", "c")
MODEL = "fairy-tales"
DEPLOYMENT, OTHER = HONEST = ("tales", "poems")
SPEC = {"model": MODEL, "source": "a", "dtype": "float32", "concurrency": 8, "max_context": 512}
LAYERS = 12
READY_S = DEPLOYED_S = 180.0
"""Also on a machine whose cores others use."""


@dataclass
class LiveSite:
    """`honest` and `mallory` are the texts of API keys; certificates of these names are clients'."""

    mill: Mill
    honest: str
    mallory: str
    rounds: int = 0

    @property
    def address(self) -> str:
        return self.mill.coordinator.address

    @property
    def gateway(self) -> str:
        return self.mill.coordinator.gateway

    @property
    def operator(self) -> TlsFiles:
        return self.mill.identities.of(Role.OPERATOR, "admin")

    @property
    def client(self) -> TlsFiles:
        return self.mill.identities.of(Role.CLIENT, "honest")

    async def next_round(self, directory: Path) -> tuple[Target, JoinToken]:
        """The attacker's data, with `directory`; and the honest joiner's token, of which it knows the id."""
        self.rounds += 1
        identities = self.mill.identities
        async with self.mill.client() as admin:
            token = await admin.create_token(Role.AGENT, f"joiner-{self.rounds}")
        target = Target(
            address=self.address,
            enrolment=token.enrolment,
            gateway=self.gateway,
            node="a",
            node_address=self.mill.agents["a"].address,
            model=DEPLOYMENT,
            site=identities.site,
            authority=identities.authority.certificate_pem.decode(),
            key=self.mallory,
            client=identities.of(Role.CLIENT, "mallory"),
            agent=identities.of(Role.AGENT, "mallory"),
            operator=self.operator,
            leaver=f"leaver-{self.rounds}",
            leaving_client=identities.of(Role.CLIENT, f"leaver-{self.rounds}"),
            leaving_operator=identities.of(Role.OPERATOR, f"leaver-{self.rounds}"),
            leaving_node=identities.of(Role.AGENT, f"leaver-{self.rounds}"),
            token_id=token.token_id,
            state=self.mill.directory / "coordinator",
            scratch=directory,
        )
        return target, token

    @property
    def daemons(self) -> tuple[ChildDaemon, ...]:
        return (self.mill.coordinator, *self.mill.agents.values())

    def dead(self) -> list[str]:
        """Names of processes that have ended."""
        return [daemon.name for daemon in self.daemons if daemon.pid is None]

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory of each process with its children, by name; 0 when it has ended."""
        return {daemon.name: _resident_bytes(daemon.pid) for daemon in self.daemons}

    def log_bytes(self) -> int:
        return self.mill.coordinator.log_path.stat().st_size


@contextlib.asynccontextmanager
async def live_site(directory: Path) -> AsyncIterator[LiveSite]:
    """A coordinator with a listener for joiners and an HTTP gateway, three agents, and two deployments of the demo
    model."""
    directory.mkdir(parents=True, exist_ok=True)
    async with opened(directory, "--http-listen", "127.0.0.1:0", ready_s=READY_S) as mill:
        identities = mill.identities
        starts = (mill.start_agent(name, identities.of(Role.AGENT, name), "--memory", "1GiB") for name in NODES)
        await asyncio.gather(*starts)
        async with mill.client() as admin:
            await _deployed(admin)
            honest, mallory = [(await admin.create_key(name))[1] for name in ("honest", "mallory")]
        yield LiveSite(mill, honest, mallory)


async def _deployed(admin: Client) -> None:
    await admin.add_model(DEMO_MODEL, MODEL)
    for name, nodes in ((DEPLOYMENT, NODES), (OTHER, NODES[:2])):
        spec = parse_spec({**SPEC, "name": name, "layers": even_layers(LAYERS, nodes)})
        await admin.deploy(spec, timeout_s=DEPLOYED_S)


def _resident_bytes(pid: int | None) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid or 0)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss
    return total
