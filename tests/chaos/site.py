"""The site of `tests/support/site.py` with failpoints, whose processes may be killed and return.

It is used for many kills. A node that was killed is started again at the address it had, with its
state directory, and is then the spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from edgeshard import Client
from edgeshard.domain.deployments.deployment import (
    Deployment,
    DeploymentPhase,
    DeploymentSpec,
    parse_spec,
)
from edgeshard.domain.errors import EdgeShardError, NotFoundError
from tests.chaos import failpoints
from tests.chaos.census import census_file
from tests.chaos.failpoints import Action, Failpoint, Mark
from tests.chaos.proxy import Proxy
from tests.support.nursery import ROOT, forking_daemons, shared
from tests.support.site import COORDINATOR, Site

DEMO_MODEL = ROOT / "edgeshard" / "demo_model"
MODEL = "fairy-tales"
NODES = ("a", "b", "c", "d")
MODULES = {
    "edgeshard_coordinator": "tests.chaos.coordinator",
    "edgeshard_agent": "tests.chaos.agent",
}
LAYERS = "a=0:4,b=4:9,c=9:12"
DEPLOYMENT = "tales"
STEP_TOKENS = 32
"""So that a prompt of a hundred tokens has several chunks."""
READY_S = 30.0
BACK_S = 60.0
"""To have every node back and the deployment ready. A quiet machine needs less than a second."""


def spec(**changes: object) -> DeploymentSpec:
    """The demo model over three nodes, in a KV pool of 32 blocks; None takes a field out."""
    values: dict[str, object] = {
        "name": DEPLOYMENT,
        "model": MODEL,
        "source": "a",
        "dtype": "float32",
        "concurrency": 4,
        "max_context": 128,
        "layers": LAYERS,
    }
    return parse_spec(
        {key: value for key, value in {**values, **changes}.items() if value is not None}
    )


class ChaosSite(Site):
    """Its daemons have failpoints, and keep their ports while they are away.

    With `proxied`, a proxy stands before every agent, at the address that its neighbours dial:
    `proxies` by the agent's name. Agents get further `options`.
    """

    transient_errors = (EdgeShardError,)

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[str] = NODES,
        *,
        proxied: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        self._listen, *ports = (f"127.0.0.1:{port}" for port in _free_ports(1 + len(nodes)))
        self._listen_by_agent = dict(zip(nodes, ports, strict=True))
        self._advertise: dict[str, list[str]] = {name: [] for name in nodes}
        self.proxies: dict[str, Proxy] = {}
        self._proxied = proxied
        self._forking = contextlib.ExitStack()
        points = ("--failpoints", str(directory))
        # Cases say which node takes over; one that keeps layers packed from an earlier case would
        # be preferred.
        arguments = (
            *points,
            "--step-tokens",
            str(STEP_TOKENS),
            "--pack",
            "never",
            "--idle-spin-s",
            "0",
        )
        super().__init__(
            directory,
            nodes,
            models={MODEL: DEMO_MODEL},
            listen=self._listen,
            listen_by_agent=self._listen_by_agent,
            coordinator_arguments=points,
            agent_arguments=(*arguments, "--memory", "1GiB", *options),
            arguments_by_agent=self._advertise,
            startup_timeout_s=READY_S,
        )

    @property
    def address(self) -> str:
        """Also while the coordinator is away."""
        return self._listen

    @property
    def native(self) -> bool:
        """Whether its agents run in the native kernels: without them an answer has other bits in
        other batches."""
        return shared().native

    async def start(self) -> None:
        self._forking.enter_context(forking_daemons(MODULES))
        if self._proxied:
            for name, listen in self._listen_by_agent.items():
                proxy = self.proxies[name] = Proxy(listen, self._dialler)
                self._advertise[name] += ["--advertise", await proxy.start()]
        await super().start()

    async def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.send_signal(signal.SIGCONT)
        await super().stop()
        for proxy in self.proxies.values():
            await proxy.stop()
        self._forking.close()

    def _new_client(self) -> Client:
        return Client(self.address, plaintext=True)

    async def start_daemon(self, name: str) -> None:
        """Start it, also again; returns when it is ready."""
        await self.daemons[name].start()
        await self.daemons[name].wait_ready(READY_S)

    async def restore(self) -> None:
        """No failpoint, no fault of a proxy, every process up and every deployment ready. Raises
        TimeoutError."""
        for name in self.daemons:
            failpoints.disarm(self.directory, name)
            self.daemons[name].send_signal(signal.SIGCONT)
        for proxy in self.proxies.values():
            proxy.heal()
        await self.start_dead([COORDINATOR])
        await self.daemons[COORDINATOR].wait_ready(READY_S)
        await self.start_dead(self.nodes)
        await asyncio.gather(*(self.daemons[name].wait_ready(READY_S) for name in self.nodes))
        await self.until(self._whole, BACK_S)

    async def start_dead(self, names: Sequence[str]) -> None:
        """Start the dead ones of these processes; they are ready later."""
        for name in self.dead():
            if name in names:
                await self.daemons[name].start()

    async def _whole(self) -> bool:
        nodes = await self.client.nodes()
        deployments = await self.client.deployments()
        return all(node.connected and not node.starting for node in nodes) and all(
            deployment.phase is DeploymentPhase.READY for deployment in deployments
        )

    async def deploy(self, **changes: object) -> Deployment:
        """In place of the deployment there is."""
        with contextlib.suppress(NotFoundError):
            await self.client.delete_deployment(DEPLOYMENT)

        async def gone() -> bool:
            return not await self.client.deployments()

        await self.until(gone)
        return await self.client.deploy(spec(**changes), timeout_s=BACK_S)

    async def stages(self) -> list[str]:
        """The nodes of the stages, in order."""
        deployment = await self.client.deployment(DEPLOYMENT)
        return [str(stage.node_name) for stage in deployment.placement.stages]

    async def placed(self) -> list[str]:
        """The nodes of the stages, in order, followed by the spares."""
        stages = await self.stages()
        return [*stages, *(name for name in self.nodes if name not in stages)]

    def arm(self, name: str, points: Sequence[Failpoint]) -> None:
        failpoints.arm(self.directory, name, points)

    async def killed(self, points: Mapping[str, Action]) -> None:
        """Wait for the end of each process that one of these failpoints has killed."""
        for point, mark in self.marks().items():
            if points.get(point) is Action.KILL:
                await shared().ended(mark.pid)

    def marks(self) -> dict[str, Mark]:
        return failpoints.marks(self.directory)

    async def census(self, name: str) -> dict[str, int]:
        """The objects a process holds (tests/chaos/census.py)."""
        path = census_file(self.directory, name)
        path.unlink(missing_ok=True)
        self.daemons[name].send_signal(signal.SIGUSR1)
        await self.until(path.exists)
        counts: dict[str, int] = json.loads(path.read_text())
        return counts

    async def _dialler(self, port: int) -> str:
        """The name of the agent with this local port, '' if it has closed it."""

        def find() -> str:
            for name in self.nodes:
                with contextlib.suppress(psutil.Error):
                    connections = psutil.Process(self.daemons[name].pid or 0).net_connections("tcp")
                    if any(connection.laddr.port == port for connection in connections):
                        return name
            return ""

        return await asyncio.to_thread(find)


def _free_ports(count: int) -> list[int]:
    """Ports that stay free while a process is away: the system gives them to no process that
    requests any port."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = max(range(10_000, first), range(last + 1, 65_536), key=len)
    found: list[int] = []
    for port in random.sample(ports, len(ports)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} ports of {ports} are free")
