"""A whole site on this machine: a coordinator and several agents as processes on loopback, for
demo, tests and lab."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edgeshard.domain.identity import Principal, Role, coordinator_of
from edgeshard.local.child_daemons import STOP_GRACE_S, ChildDaemon

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.identity.authority import Authority
    from edgeshard.rpc.tls import TlsFiles

SITE = "here"
"""The name of a site that this machine made for itself."""


def own_address(address: str) -> str:
    """The address by which this machine dials a listener at `address`, host:port."""
    from edgeshard.rpc.tls import join_address, split_address

    host, port = split_address(address)
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


class LocalCluster:
    """A coordinator and one agent for each name, on free loopback ports, with all their files under
    `directory`.

    As an async context manager it starts everything and stops everything, also on an error or an
    interrupt.

    The coordinator listens at `listen` and at the addresses of `coordinator_listen`, by option; an
    agent at its address of `listen_by_agent`. With `elsewhere` a process takes other ports if these
    are taken. A `configured` cluster takes the operator's own settings for daemons.
    `agent_arguments` go to every agent's command line, `arguments_by_agent` to one agent's,
    `coordinator_arguments` to the coordinator's. An agent computes with `threads` threads.
    `startup_timeout_s` bounds each wait for a ready file. It is long because imports take a minute
    on a small busy machine, and a process that cannot start ends by itself.

    A `secure` cluster has an authority of its own, in memory unless it is given; others speak in
    plaintext. With `share_store` the agents read the coordinator's models in place. The processes
    end with this one, however that ends, unless the cluster `stays`; they keep the file descriptors
    of `holding` open.
    """

    def __init__(  # noqa: PLR0913 - what a site may be made of
        self,
        directory: Path,
        nodes: Sequence[str] = ("a", "b", "c"),
        *,
        agent_arguments: Sequence[str] = (),
        arguments_by_agent: Mapping[str, Sequence[str]] | None = None,
        coordinator_arguments: Sequence[str] = (),
        listen: str = "127.0.0.1:0",
        coordinator_listen: Mapping[str, str] | None = None,
        listen_by_agent: Mapping[str, str] | None = None,
        elsewhere: bool = False,
        configured: bool = False,
        threads: int = 1,
        startup_timeout_s: float = 180.0,
        secure: bool = False,
        authority: Authority | None = None,
        share_store: bool = False,
        stays: bool = False,
        holding: Sequence[int] = (),
    ) -> None:
        self.directory = directory
        self.nodes = tuple(nodes)
        self.agents: dict[str, ChildDaemon] = {}
        self._authority = authority or (_authority() if secure else None)
        self._daemon = partial(
            ChildDaemon, directory=directory, configured=configured, stays=stays, holding=holding
        )
        state = directory / "coordinator"
        self.coordinator = self._daemon(
            "coordinator",
            "edgeshard_coordinator",
            [
                "--state-dir",
                str(state),
                *self._identity(coordinator_of(SITE)),
                *coordinator_arguments,
            ],
            listen={"--listen": listen, **(coordinator_listen or {})},
        )
        self._listen = listen
        self._listen_by_agent = dict(listen_by_agent or {})
        self._elsewhere = elsewhere
        shared = ("--shared-store", str(state / "models")) if share_store else ()
        self._agent_arguments = ("--threads", str(threads), *shared, *agent_arguments)
        self._arguments_by_agent = dict(arguments_by_agent or {})
        self._startup_timeout_s = startup_timeout_s

    @property
    def address(self) -> str:
        """The coordinator's host:port, once it has started."""
        return self.coordinator.address

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
        """Start the coordinator, then all agents at once. Raises the typed error of the first that
        fails."""
        await self.start_coordinator()
        await self.start_agents()

    async def start_coordinator(self) -> str:
        """Start only the coordinator and return its address."""
        return await self._started(self.coordinator)

    async def start_agents(self) -> None:
        """Start every agent and wait until layers can be placed on all."""
        waits = [asyncio.ensure_future(self.start_agent(name)) for name in self.nodes]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def start_agent(self, name: str) -> str:
        """Start one agent, also one that was stopped or killed. Returns its address once layers can
        be placed on it."""
        return await self._started(self._agent(name))

    async def _started(self, daemon: ChildDaemon) -> str:
        if self._elsewhere:
            return await daemon.start_anywhere(self._startup_timeout_s)
        await daemon.start()
        return await daemon.wait_ready(self._startup_timeout_s)

    async def drop_agents(self) -> None:
        """Kill the agents. Their next start dials the coordinator's address at that time."""
        await asyncio.gather(*(agent.kill() for agent in self.agents.values()))
        self.agents.clear()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the agents, then the coordinator, each killed after `grace_s`; an interrupt
        meanwhile kills the rest."""
        try:
            await asyncio.gather(*(agent.stop(grace_s) for agent in self.agents.values()))
            await self.coordinator.stop(grace_s)
        finally:
            for daemon in (*self.agents.values(), self.coordinator):
                daemon.send_signal(signal.SIGKILL)

    def _agent(self, name: str) -> ChildDaemon:
        if name not in self.agents:
            arguments = ["--coordinator", own_address(self.address or self._listen), "--name", name]
            arguments += [
                "--state-dir",
                str(self.directory / name),
                *self._identity(Principal(SITE, Role.AGENT, name)),
            ]
            arguments += [*self._agent_arguments, *self._arguments_by_agent.get(name, ())]
            listen = {"--listen": self._listen_by_agent.get(name, "127.0.0.1:0")}
            self.agents[name] = self._daemon(name, "edgeshard_agent", arguments, listen=listen)
        return self.agents[name]

    def client(self) -> Client:
        """A client of the site, not yet connected, with all rights."""
        from edgeshard.client import Client

        if self._authority is None:
            return Client(self.address, plaintext=True)
        return Client(self.address, self.operator_files())

    def operator_files(self) -> TlsFiles:
        """The files of the operator of a secure site."""
        return self._files(Principal(SITE, Role.OPERATOR, "admin"))

    def _identity(self, principal: Principal) -> list[str]:
        """The options of a daemon that name its principal."""
        if self._authority is None:
            return ["--plaintext"]
        files = self._files(principal)
        return [
            "--tls-ca",
            str(files.ca),
            "--tls-cert",
            str(files.cert),
            "--tls-key",
            str(files.key),
        ]

    def _files(self, principal: Principal) -> TlsFiles:
        from edgeshard.rpc.tls_files import issue_files

        assert self._authority is not None
        return issue_files(
            self._authority, principal, self.directory / "pki" / f"{principal.role}-{principal.id}"
        )


def _authority() -> Authority:
    from edgeshard.identity.authority import Authority, now

    return Authority.create(SITE, now())
