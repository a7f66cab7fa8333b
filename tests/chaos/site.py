"""A whole site whose processes may be killed and come back: a coordinator and agents of one thread each, on loopback.

It is used for many kills. A node that was killed is started again at the address it had, with its state directory, and
is then the spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from edgeshard import Client
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase, DeploymentSpec, parse_spec
from edgeshard.domain.errors import EdgeShardError, NotFoundError
from tests.chaos import failpoints
from tests.chaos.census import census_file
from tests.chaos.failpoints import Action, Failpoint, Mark
from tests.chaos.processes import Daemon
from tests.chaos.proxy import Proxy
from tests.support.nursery import ROOT, Nursery, shared

DEMO_MODEL = ROOT / "edgeshard" / "demo_model"
MODEL = "fairy-tales"
COORDINATOR = "coordinator"
NODES = ("a", "b", "c", "d")
LAYERS = "a=0:4,b=4:9,c=9:12"
DEPLOYMENT = "tales"
STEP_TOKENS = 32
"""So that a prompt of a hundred tokens has several chunks."""
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
    return parse_spec({key: value for key, value in {**values, **changes}.items() if value is not None})


class ChaosSite:
    """As an async context manager it starts everything, and ends everything.

    With `proxied`, a proxy stands before every agent, at the address that its neighbours dial:
    `proxies` by the agent's name. Agents get further `options`.
    """

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[str] = NODES,
        *,
        proxied: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.nodes = tuple(nodes)
        self.daemons: dict[str, Daemon] = {}
        self.proxies: dict[str, Proxy] = {}
        self._proxied = proxied
        self._options = tuple(options)
        self._nursery: Nursery | None = None
        self._client: Client | None = None
        self._free = _free_ports(1 + len(nodes))
        self.address = f"127.0.0.1:{self._free[0]}"

    @property
    def native(self) -> bool:
        """Whether its agents run in the native kernels: without them an answer has other bits in other batches."""
        assert self._nursery is not None
        return self._nursery.native

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Every node is placeable at the end, and the model in the store."""
        self._nursery = nursery = await asyncio.to_thread(shared)
        arguments = ["--failpoints", str(self.directory), "--listen", self.address]
        arguments += ["--state-dir", str(self.directory / COORDINATOR), "--plaintext"]
        self.daemons[COORDINATOR] = Daemon(COORDINATOR, "tests.chaos.coordinator", arguments, self.directory, nursery)
        await self.start_daemon(COORDINATOR)
        for name, port in zip(self.nodes, self._free[1:], strict=True):
            arguments = await self._agent(name, port)
            self.daemons[name] = Daemon(name, "tests.chaos.agent", arguments, self.directory, nursery)
        await asyncio.gather(*(self.start_daemon(name) for name in self.nodes))
        self._client = Client(self.address, plaintext=True)
        await self._client.add_model(DEMO_MODEL, MODEL)

    async def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.signal(signal.SIGCONT)
        if self._client is not None:
            await self._client.close()
        await asyncio.gather(*(self.daemons[name].stop() for name in self.daemons if name != COORDINATOR))
        if COORDINATOR in self.daemons:
            await self.daemons[COORDINATOR].stop()
        for proxy in self.proxies.values():
            await proxy.stop()

    async def start_daemon(self, name: str) -> None:
        """Start it, also again; returns when it is ready."""
        await self.daemons[name].start()
        await self.daemons[name].wait_ready()

    async def renew_client(self) -> None:
        """With a client of new connections."""
        if self._client is not None:
            await self._client.close()
        self._client = Client(self.address, plaintext=True)

    def dead(self) -> list[str]:
        """Names of processes that have ended."""
        return [name for name, daemon in self.daemons.items() if not daemon.alive]

    async def restore(self) -> None:
        """No failpoint, no fault of a proxy, every process up and every deployment ready. Raises TimeoutError."""
        for name in self.daemons:
            failpoints.disarm(self.directory, name)
            self.daemons[name].signal(signal.SIGCONT)
        for proxy in self.proxies.values():
            proxy.heal()
        await self.start_dead([COORDINATOR])
        await self.daemons[COORDINATOR].wait_ready()
        await self.start_dead(self.nodes)
        await asyncio.gather(*(self.daemons[name].wait_ready() for name in self.nodes))
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

    async def until(self, condition: Callable[[], object], timeout_s: float = BACK_S) -> None:
        """Wait until an async or plain condition holds; an error of the coordinator is a no. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(EdgeShardError):
                    value = condition()
                    if asyncio.iscoroutine(value):
                        value = await value
                    if value:
                        return
                await asyncio.sleep(0.01)

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
                assert self._nursery is not None
                await self._nursery.ended(mark.pid)

    def marks(self) -> dict[str, Mark]:
        return failpoints.marks(self.directory)

    async def census(self, name: str) -> dict[str, int]:
        """The objects a process holds (tests/chaos/census.py)."""
        path = census_file(self.directory, name)
        path.unlink(missing_ok=True)
        self.daemons[name].signal(signal.SIGUSR1)
        await self.until(path.exists)
        counts: dict[str, int] = json.loads(path.read_text())
        return counts

    async def _dialler(self, port: int) -> str:
        """The name of the agent with this local port, '' if it has closed it."""

        def find() -> str:
            for name in self.nodes:
                with contextlib.suppress(psutil.Error):
                    connections = psutil.Process(self.daemons[name].pid).net_connections("tcp")
                    if any(connection.laddr.port == port for connection in connections):
                        return name
            return ""

        return await asyncio.to_thread(find)

    async def _agent(self, name: str, port: int) -> list[str]:
        """Its command line; starts its proxy."""
        listen = f"127.0.0.1:{port}"
        arguments = ["--failpoints", str(self.directory), "--step-tokens", str(STEP_TOKENS)]
        # Cases say which node takes over; one that keeps layers packed from an earlier case would be preferred.
        arguments += ["--pack", "never"]
        arguments += ["--coordinator", self.address, "--name", name, "--listen", listen, "--idle-spin-s", "0"]
        arguments += ["--state-dir", str(self.directory / name), "--threads", "1", "--memory", "1GiB", "--plaintext"]
        arguments += self._options
        if self._proxied:
            proxy = self.proxies[name] = Proxy(listen, self._dialler)
            arguments += ["--advertise", await proxy.start()]
        return arguments


def _free_ports(count: int) -> list[int]:
    """Ports that stay free while a process is away: the system gives them to no process that requests any port."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = max(range(10_000, first), range(last + 1, 65_536), key=len)
    found: list[int] = []
    for port in random.sample(ports, len(ports)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} ports of {ports} are free")
