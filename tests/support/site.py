"""The site of real processes for tests, chaos, attacks and benchmarks; it needs no pytest."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from edgeshard import Client
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.identity import Role
from edgeshard.domain.nodes.device import Node
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.local.cluster import LocalCluster
from edgeshard.rpc.tls import TlsFiles
from tests.support.identities import Identities, tls_options

MakeSpec = Callable[..., DeploymentSpec]
"""The demo deployment with some fields changed; None takes a field out."""
COORDINATOR = "coordinator"
SOON_S = 30.0
"""A quiet machine needs a second; the rest is for one whose cores others use as well. A leak would
never end."""


class Site:
    """A coordinator and agents of `LocalCluster`, with `models` in the store, and a client of them.

    As an async context manager it starts everything and ends everything. `options` go to
    `LocalCluster`. With `first_core`, each agent gets a core of its own before it starts: this one,
    then the following ones. With `identities`, all processes use TLS, and `client` is the operator
    `admin`.
    """

    transient_errors: tuple[type[Exception], ...] = ()
    """A condition that raises one of these does not hold yet."""

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[str] = ("a", "b", "c"),
        *,
        models: Mapping[str, Path] | None = None,
        first_core: int | None = None,
        identities: Identities | None = None,
        **options: Any,
    ) -> None:
        self.directory = directory
        self.nodes = tuple(nodes)
        self._identities = identities
        if identities is not None:
            # These files go before the --plaintext of a cluster without an authority.
            own = options.get("coordinator_arguments", ())
            by_agent = options.get("arguments_by_agent", {})
            options["coordinator_arguments"] = [*tls_options(identities.coordinator()), *own]
            options["arguments_by_agent"] = {
                name: [*tls_options(identities.of(Role.AGENT, name)), *by_agent.get(name, ())]
                for name in nodes
            }
        self.cluster = LocalCluster(directory, nodes, **options)
        self._models = dict(models or {})
        self._first_core = first_core
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    @property
    def address(self) -> str:
        return self.cluster.address

    @property
    def gateway(self) -> str:
        return self.coordinator.gateway

    @property
    def coordinator(self) -> ChildDaemon:
        return self.cluster.coordinator

    @property
    def agents(self) -> dict[str, ChildDaemon]:
        return self.cluster.agents

    @property
    def daemons(self) -> dict[str, ChildDaemon]:
        """All processes by name, the coordinator first."""
        return {COORDINATOR: self.coordinator, **self.agents}

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Every node is placeable at the end, and the models are in the store."""
        await self.cluster.start_coordinator()
        await (
            self.cluster.start_agents()
            if self._first_core is None
            else self._start_pinned(self._first_core)
        )
        await self.renew_client()
        for name, path in self._models.items():
            await self.client.add_model(path, name)

    async def _start_pinned(self, first_core: int) -> None:
        everywhere = os.sched_getaffinity(0)
        try:
            for core, name in enumerate(self.nodes, first_core):
                os.sched_setaffinity(0, {core})
                await self.cluster.start_agent(name)
        finally:
            os.sched_setaffinity(0, everywhere)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
        await self.cluster.stop()

    async def renew_client(self) -> None:
        """With a client of new connections."""
        if self._client is not None:
            await self._client.close()
        self._client = self._new_client()

    def _new_client(self) -> Client:
        return self.cluster.client() if self._identities is None else self.client_of()

    @property
    def identities(self) -> Identities:
        assert self._identities is not None
        return self._identities

    def client_of(self, role: Role = Role.OPERATOR, name: str = "admin") -> Client:
        """A client with the certificate of this principal, not yet connected."""
        return self.client_with(self.identities.of(role, name))

    def client_with(self, files: TlsFiles) -> Client:
        return Client(self.address, files)

    async def until(
        self, condition: Callable[[], object], timeout_s: float = 60.0, poll_s: float = 0.01
    ) -> None:
        """Wait until an async or plain condition holds."""
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(*self.transient_errors):
                    value = condition()
                    if asyncio.iscoroutine(value):
                        value = await value
                    if value:
                        return
                await asyncio.sleep(poll_s)

    async def kv_bytes(self) -> dict[str, int]:
        """KV bytes in use by node, as the nodes themselves say."""
        return {
            node.name: sum(stage.kv_bytes_in_use for stage in node.stages)
            for node in await self.client.nodes()
        }

    async def reported(
        self,
        condition: Callable[[Sequence[Node]], object] = bool,
        timeout_s: float = 60.0,
        poll_s: float = 0.01,
    ) -> None:
        """Wait until every node has reported from now on, and a condition of their reports
        holds."""
        clock = asyncio.get_running_loop().time
        began = clock()

        async def holds() -> bool:
            waited_s, nodes = clock() - began, await self.client.nodes()
            return all(node.heartbeat_age_s < waited_s for node in nodes) and bool(condition(nodes))

        await self.until(holds, timeout_s, poll_s)

    async def kv_gone(self, timeout_s: float = SOON_S, poll_s: float = 0.01) -> None:
        """Wait until every node has reported, from now on, that it holds no KV: a leak stays."""
        await self.reported(
            lambda nodes: not any(stage.kv_bytes_in_use for node in nodes for stage in node.stages),
            timeout_s,
            poll_s,
        )

    async def state(self) -> tuple[object, object, object]:
        """Everything an operator sees, less what moves by itself."""
        nodes = [(n.name, n.node_id, n.connected, n.free_bytes) for n in await self.client.nodes()]
        deployments = [(d.spec, d.phase, d.epoch) for d in await self.client.deployments()]
        return nodes, deployments, [m.name for m in await self.client.stored_models()]

    def dead(self) -> list[str]:
        """Names of processes that have ended."""
        return [name for name, daemon in self.daemons.items() if daemon.pid is None]

    def pids(self) -> dict[str, int]:
        """The processes that run, by name."""
        return {name: daemon.pid for name, daemon in self.daemons.items() if daemon.pid is not None}


def processor_s(sites: Sequence[Site]) -> float:
    """Processor time so far of all daemons and of this process, the client."""
    pids = [os.getpid(), *(pid for site in sites for pid in site.pids().values())]
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)
