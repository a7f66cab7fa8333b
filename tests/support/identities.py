"""A site's certificates, made for one test run as its operator would make them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc

from edgeshard.domain.identity import Principal, Role, coordinator_of
from edgeshard.identity.authority import Authority, now
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import issue_files


class Identities:
    """The authority of a site, and the files of each of its processes, which are made when they are
    first asked for."""

    def __init__(self, directory: Path, site: str = "site") -> None:
        self.site = site
        self._directory = directory / f"identities-{site}"
        self.authority = Authority.create(site, now())
        self._files: dict[Principal, TlsFiles] = {}

    def of(self, role: Role, id: str) -> TlsFiles:
        principal = Principal(self.site, role, id)
        if principal not in self._files:
            directory = self._directory / f"{role}-{id}"
            self._files[principal] = issue_files(self.authority, principal, directory)
        return self._files[principal]

    def coordinator(self) -> TlsFiles:
        principal = coordinator_of(self.site)
        return self.of(principal.role, principal.id)

    def host(self, name: str) -> TlsFiles:
        """The files of the process on a host of a test's network, which its name identifies."""
        if name == "coordinator":
            return self.coordinator()
        return self.of(Role.OPERATOR if name in ("operator", "stranger") else Role.AGENT, name)


def trusting_both(files: TlsFiles, other: TlsFiles) -> TlsFiles:
    """Files of a process that trusts another site's authority too, so that it sees no mistake in
    dialling it."""
    both = files.ca.with_name(f"both-{other.ca.parent.name}.pem")
    both.write_bytes(files.ca.read_bytes() + other.ca.read_bytes())
    return TlsFiles(both, files.cert, files.key)


def tls_options(files: TlsFiles) -> list[str]:
    """The options of a daemon or of edgectl."""
    return ["--tls-ca", str(files.ca), "--tls-cert", str(files.cert), "--tls-key", str(files.key)]


async def is_denied(call: Any, hello: object) -> bool:
    """Whether a stream that begins so is refused: by its first message or before it, which differs
    from run to run."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(hello)
        await call.read()
    async with asyncio.timeout(30):
        return bool(await call.code() is grpc.StatusCode.PERMISSION_DENIED)
