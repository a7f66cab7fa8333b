"""A real coordinator's process with mutual TLS and a listener for joiners, on loopback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeshard.client.joining import enrol
from edgeshard.domain.identity import Role
from edgeshard.identity.authority import new_key, private_pem
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import write_files, write_private
from tests.support.identities import Identities, tls_options
from tests.support.site import Site

READY_S = 60.0


class SecureSite(Site):
    """A coordinator over TLS with a listener for joiners, and `options`; `start_agent` adds
    agents."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        nodes: Sequence[str] = (),
        identities: Identities | None = None,
        ready_s: float = READY_S,
        **more: Any,
    ) -> None:
        identities = identities or Identities(directory, "mill")
        write_private(directory / "ca.key", identities.authority.key_pem)
        joining = ("--ca-key", str(directory / "ca.key"), "--enrol-listen", "127.0.0.1:0", *options)
        more |= {"coordinator_arguments": joining, "startup_timeout_s": ready_s}
        super().__init__(directory, nodes, identities=identities, **more)
        self._ready_s = ready_s

    async def start_agent(self, name: str, files: TlsFiles, *options: str) -> ChildDaemon:
        """An agent of its own process, once layers can be placed on it."""
        arguments = ["--coordinator", self.address, "--name", name, "--listen", "127.0.0.1:0"]
        arguments += [
            "--state-dir",
            str(self.directory / name),
            "--threads",
            "1",
            *tls_options(files),
            *options,
        ]
        agent = self.agents[name] = ChildDaemon(name, "edgeshard_agent", arguments, self.directory)
        await agent.start()
        await agent.wait_ready(self._ready_s)
        return agent


async def joined(mill: SecureSite, role: Role, name: str) -> TlsFiles:
    """The files of a process that joined by a token."""
    async with mill.client_of() as admin:
        token = await admin.create_token(role, name)
    key = new_key()
    certificate, authorities = await enrol(token.invitation, key)
    return write_files(
        mill.directory / f"joined-{role}-{name}", authorities, certificate, private_pem(key)
    )


async def edgectl(
    *arguments: str, environment: dict[str, str], stdin: bytes | None = None
) -> tuple[int, str, str]:
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
