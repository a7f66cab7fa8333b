"""A site that one machine keeps for itself: its authority, its processes and its key, found again in a folder."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from edgeshard.cli.join import PORT as AGENT_PORT
from edgeshard.cli.join import state_home, write_client_settings
from edgeshard.cli.local import SITE, LocalCluster, own_address
from edgeshard.domain.errors import DeniedError, EdgeShardError, FailedPreconditionError, UnavailableError

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.identity.authority import Authority

_KEY = "serve"
"""The name of the API key that `edgectl serve` prints."""


class OwnSite:
    """A coordinator with its HTTP endpoint, and `boxes` boxes beside it, which read its store in place.

    As an async context manager: the coordinator listens when it is entered, boxes may still be starting (`joined`).
    """

    def __init__(self, directory: Path, boxes: int, listen: str, port: int) -> None:
        from edgeshard.process.machine import usable_cores
        from edgeshard.rpc.tls import is_loopback, join_address, split_address

        self._directory = directory
        own = _box_name()
        self.nodes = (own,) if boxes == 1 else tuple(f"{own}-{number}" for number in range(1, boxes + 1))
        host, wanted = split_address(listen, "listen")
        # Known beforehand, so that boxes start at the same time as the coordinator.
        first = _free_port(host, wanted) or _any_port(host)
        self._authority = _authority(directory / "site")
        alone = is_loopback(host)
        self._cluster = LocalCluster(
            directory,
            self.nodes,
            listen=join_address(host, first),
            threads=max(1, usable_cores() // boxes),
            authority=self._authority,
            share_store=True,
            agent_arguments=_memory(boxes, directory),
            arguments_by_agent={} if alone else {name: _reachable(index) for index, name in enumerate(self.nodes)},
            coordinator_arguments=[
                *("--ca-key", str(directory / "site" / "ca.key")),
                *("--enrol-listen", join_address(host, first + 1)),
                *("--http-listen", join_address("127.0.0.1", port)),
            ],
        )
        self._joining: asyncio.Future[None] | None = None

    @classmethod
    def at(cls, directory: Path | None, boxes: int, listen: str, port: int) -> OwnSite:
        """The site of a folder, by default of this user's state directory. Raises DeniedError where it cannot be."""
        folder = (directory or state_home() / "serve").absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The boxes look into the store before the coordinator may have made it.
            for inner in ("pki", "coordinator", "coordinator/models", "coordinator/models/blobs"):
                (folder / inner).mkdir(exist_ok=True, mode=0o700)
            return cls(folder, boxes, listen, port)
        except OSError as error:
            why = f"--state-dir {folder}: {error.strerror}"
            raise DeniedError(why, field="state-dir", reason="STATE_DIR") from None

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def url(self) -> str:
        """Of the HTTP endpoint, without a path."""
        return self._cluster.coordinator.gateway

    async def __aenter__(self) -> Self:
        try:
            self._joining = asyncio.ensure_future(self._cluster.start_agents())
            await self._cluster.start_coordinator()
            self._tell_edgectl()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._joining is not None:
            self._joining.cancel()
        await self._cluster.stop()

    async def joined(self) -> None:
        """Wait until layers can be placed on every box of this machine. Raises the error of the first that fails."""
        assert self._joining is not None
        await self._joining

    async def first_end(self) -> EdgeShardError:
        """Waits until one of its processes ends by itself, and says which."""
        daemons = (self._cluster.coordinator, *self._cluster.agents.values())
        waits = {asyncio.ensure_future(daemon.exited()): daemon for daemon in daemons}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        daemon = waits[done.pop()]
        return FailedPreconditionError(
            f"{daemon.name} ended by itself; its log {daemon.log_path} ends with:\n{daemon.log_tail()}",
            reason="PROCESS_ENDED",
        )

    def client(self) -> Client:
        """As the site's operator."""
        return self._cluster.client()

    async def api_key(self, client: Client) -> str:
        """The site's own key for programs: the one in its folder while the site knows it, else a new one."""
        from edgeshard.rpc.tls_files import write_private

        path = self._directory / "api-key"
        known = _KEY in {key.name for key in await client.keys()}
        if known and path.exists():
            return path.read_text().strip()
        if known:
            await client.revoke_key(_KEY)
        _, text = await client.create_key(_KEY)
        write_private(path, f"{text}\n".encode())
        return text

    def next_name(self, taken: set[str]) -> str:
        """A name for one more box."""
        return next(name for name in (f"box-{number}" for number in range(2, len(taken) + 3)) if name not in taken)

    def _tell_edgectl(self) -> None:
        """This user's edgectl and SDK find the site, unless they belong to another."""
        from edgeshard.client.settings import configuration

        files = self._cluster.operator_files().key.parent
        mine = not configuration().exists() or str(files) in configuration().read_text()
        if mine and configuration().parent != Path("/dev/null"):
            write_client_settings(own_address(self.address), files)


def _authority(directory: Path) -> Authority:
    """Made once."""
    from edgeshard.identity.authority import Authority, now
    from edgeshard.rpc.tls_files import write_private

    key, bundle = directory / "ca.key", directory / "ca.pem"
    if key.exists():
        authority = Authority.load(bundle.read_bytes(), key.read_bytes())
    else:
        authority = Authority.create(SITE, now())
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(bundle, authority.certificate_pem)
        write_private(key, authority.key_pem)
    return authority


def _box_name() -> str:
    """This machine's name in the characters a name may have."""
    return re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower())[:48].strip("-") or "box-1"


def _memory(boxes: int, directory: Path) -> list[str]:
    """What each box may use, where several share the memory that one alone would take."""
    if boxes == 1:
        return []
    from edgeshard.process.machine import read_condition

    available = read_condition("", directory, None).memory_available_bytes
    return ["--memory", str(available // boxes * 9 // 10)]


def _reachable(index: int) -> list[str]:
    """Where boxes of other machines dial a box of this one."""
    from edgeshard.rpc.addresses import outgoing_address
    from edgeshard.rpc.tls import join_address

    host = outgoing_address()
    return ["--listen", join_address(host, _free_port(host, AGENT_PORT + index))]


def _free_port(host: str, wanted: int) -> int:
    """The port when it and the next one are free, else 0."""
    for port in (wanted, wanted + 1) if wanted else ():
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return 0
    return wanted


def _any_port(host: str) -> int:
    """A port that is free now, like the next one."""
    for _ in range(100):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port < 65535 and _free_port(host, port):
            return port
    raise UnavailableError(f"no two ports in a row are free on {host}", field="listen")
