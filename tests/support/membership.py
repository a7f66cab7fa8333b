"""A real coordinator's process with mutual TLS and a listener for joiners, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeshard.client import Client
from edgeshard.client.joining import enrol
from edgeshard.domain.identity import Role
from edgeshard.identity.authority import new_key, private_pem
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import write_files, write_private
from tests.support.identities import Identities, tls_options

READY_S = 60.0


@dataclass
class Mill:
    """The site: `identities` has its authority, `agents` those that were started, by name."""

    directory: Path
    identities: Identities
    options: tuple[str, ...] = ()
    agents: dict[str, ChildDaemon] = field(default_factory=dict)
    coordinator: ChildDaemon = field(init=False)
    ready_s: float = READY_S
    """For a process to be ready."""

    def __post_init__(self) -> None:
        write_private(self.directory / "ca.key", self.identities.authority.key_pem)
        arguments = ["--listen", "127.0.0.1:0", "--state-dir", str(self.directory / "coordinator")]
        arguments += ["--ca-key", str(self.directory / "ca.key"), "--enrol-listen", "127.0.0.1:0"]
        arguments += [*tls_options(self.identities.coordinator()), *self.options]
        self.coordinator = ChildDaemon("coordinator", "edgeshard_coordinator", arguments, self.directory)

    async def start(self) -> None:
        await self.coordinator.start()
        await self.coordinator.wait_ready(self.ready_s)

    def client(self, role: Role = Role.OPERATOR, name: str = "admin") -> Client:
        return Client(self.coordinator.address, self.identities.of(role, name))

    def client_with(self, files: TlsFiles) -> Client:
        return Client(self.coordinator.address, files)

    async def start_agent(self, name: str, files: TlsFiles, *options: str) -> ChildDaemon:
        """An agent of its own process, once layers can be placed on it."""
        arguments = ["--coordinator", self.coordinator.address, "--name", name, "--listen", "127.0.0.1:0"]
        arguments += ["--state-dir", str(self.directory / name), "--threads", "1", *tls_options(files), *options]
        agent = self.agents[name] = ChildDaemon(name, "edgeshard_agent", arguments, self.directory)
        await agent.start()
        await agent.wait_ready(self.ready_s)
        return agent

    async def stop(self) -> None:
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))
        await self.coordinator.stop()


async def joined(mill: Mill, role: Role, name: str) -> TlsFiles:
    """The files of a process that joined by a token."""
    async with mill.client() as admin:
        token = await admin.create_token(role, name)
    key = new_key()
    certificate, authorities = await enrol(token.invitation, key)
    return write_files(mill.directory / f"joined-{role}-{name}", authorities, certificate, private_pem(key))


@contextlib.asynccontextmanager
async def opened(directory: Path, *options: str, ready_s: float = READY_S) -> AsyncIterator[Mill]:
    mill = Mill(directory, Identities(directory, "mill"), options, ready_s=ready_s)
    try:
        await mill.start()
        yield mill
    finally:
        await mill.stop()


async def edgectl(*arguments: str, environment: dict[str, str], stdin: bytes | None = None) -> tuple[int, str, str]:
    """Run the command in a process of its own: its exit code, stdout and stderr."""
    process: Any = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), READY_S)
    return process.returncode, out.decode(), err.decode()
