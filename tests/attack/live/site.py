"""A whole site over mutual TLS on loopback, of real processes, with what honest people and an
attacker have of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from edgeshard import Client
from edgeshard.cli.commands.site.demo import even_layers
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.identity import JoinToken, Role
from tests.attack.live.target import Target
from tests.support.chat_models import DEMO_MODEL
from tests.support.membership import SecureSite

NODES = ("a", "b", "c")
MODEL = "fairy-tales"
DEPLOYMENT, OTHER = HONEST = ("tales", "poems")
SPEC = {"model": MODEL, "source": "a", "dtype": "float32", "concurrency": 8, "max_context": 512}
LAYERS = 12
READY_S = DEPLOYED_S = 180.0
"""Also on a machine whose cores others use."""


class LiveSite(SecureSite):
    """A site with an HTTP gateway, three agents, and two deployments of the demo model.

    `honest` and `mallory` are the texts of API keys; certificates of these names are clients'.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        memory = ("--memory", "1GiB")
        super().__init__(
            directory,
            "--http-listen",
            "127.0.0.1:0",
            nodes=NODES,
            ready_s=READY_S,
            agent_arguments=memory,
        )
        self.honest = self.mallory = ""
        self.rounds = 0

    async def start(self) -> None:
        await super().start()
        await _deployed(self.client)
        self.honest, self.mallory = [
            (await self.client.create_key(name))[1] for name in ("honest", "mallory")
        ]

    async def next_round(self, directory: Path) -> tuple[Target, JoinToken]:
        """The attacker's data, with `directory`; and the honest joiner's token, of which it knows
        the id."""
        self.rounds += 1
        identities = self.identities
        token = await self.client.create_token(Role.AGENT, f"joiner-{self.rounds}")
        target = Target(
            address=self.address,
            enrolment=token.enrolment,
            gateway=self.gateway,
            node="a",
            node_address=self.agents["a"].address,
            model=DEPLOYMENT,
            site=identities.site,
            authority=identities.authority.certificate_pem.decode(),
            key=self.mallory,
            client=identities.of(Role.CLIENT, "mallory"),
            agent=identities.of(Role.AGENT, "mallory"),
            operator=identities.of(Role.OPERATOR, "admin"),
            leaver=f"leaver-{self.rounds}",
            leaving_client=identities.of(Role.CLIENT, f"leaver-{self.rounds}"),
            leaving_operator=identities.of(Role.OPERATOR, f"leaver-{self.rounds}"),
            leaving_node=identities.of(Role.AGENT, f"leaver-{self.rounds}"),
            token_id=token.token_id,
            state=self.directory / "coordinator",
            scratch=directory,
        )
        return target, token

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory of each process with its children, by name; 0 when it has ended."""
        return {daemon.name: _resident_bytes(daemon.pid) for daemon in self.daemons.values()}

    def log_bytes(self) -> int:
        return self.coordinator.log_path.stat().st_size


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
