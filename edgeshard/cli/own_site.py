"""A site that one machine keeps for itself: its authority, its processes and its key, found again in a folder."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from edgeshard.cli.join import PORT as AGENT_PORT
from edgeshard.cli.join import state_home, write_client_settings
from edgeshard.cli.local import SITE, LocalCluster, own_address
from edgeshard.domain.errors import DeniedError, EdgeShardError, FailedPreconditionError

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.identity.authority import Authority

_KEY = "serve"
"""The name of the API key that `edgectl serve` prints."""


class OwnSite:
    """A coordinator with its HTTP endpoint, and `boxes` boxes beside it, which read its store in place.

    As an async context manager: the coordinator listens when it is entered, boxes may still be starting (`joined`).
    Where it `lasts`, this user's edgectl and SDK are told of it, and the user's own settings for daemons count.
    """

    def __init__(
        self, directory: Path, boxes: int, listen: str, port: int, *, lasts: bool = True, http: Sequence[str] = ()
    ) -> None:
        from edgeshard.process.machine import usable_cores
        from edgeshard.rpc.tls import is_loopback, join_address, split_address

        self._directory = directory
        self._lasts = lasts
        own = _box_name()
        self.nodes = (own,) if boxes == 1 else tuple(f"{own}-{number}" for number in range(1, boxes + 1))
        host, first = split_address(listen, "listen")
        self.wanted = listen
        """Where the coordinator is to listen."""
        self._cluster = LocalCluster(
            directory,
            self.nodes,
            listen=listen,
            coordinator_listen={"--enrol-listen": join_address(host, min(first + 1, 65535) if first else 0)},
            listen_by_agent={} if is_loopback(host) else _reachable(self.nodes),
            elsewhere=True,
            configured=lasts,
            threads=max(1, usable_cores() // boxes),
            authority=_authority(directory / "site"),
            share_store=True,
            agent_arguments=_memory(boxes, directory),
            coordinator_arguments=[
                *("--ca-key", str(directory / "site" / "ca.key")),
                *("--http-listen", join_address("127.0.0.1", port), *http),
            ],
        )
        self._joining: asyncio.Future[None] | None = None

    @classmethod
    def at(
        cls,
        directory: Path | None,
        boxes: int,
        listen: str,
        port: int,
        *,
        lasts: bool = True,
        http: Sequence[str] = (),
    ) -> OwnSite:
        """The site of a folder, by default of this user's state directory; `http` are options of its coordinator for
        the HTTP endpoint, which is at `port` of loopback unless they say otherwise. Raises DeniedError where it
        cannot be."""
        folder = (directory or state_home() / "serve").absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The boxes look into the store before the coordinator may have made it.
            for inner in ("pki", "coordinator", "coordinator/models", "coordinator/models/blobs"):
                (folder / inner).mkdir(exist_ok=True, mode=0o700)
            return cls(folder, boxes, listen, port, lasts=lasts, http=http)
        except OSError as error:
            why = f"--state-dir {folder}: {error.strerror}"
            raise DeniedError(why, field="state-dir", reason="STATE_DIR") from None

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def is_elsewhere(self) -> bool:
        """Whether the port that it was to have was taken: boxes that joined before look for it there."""
        from edgeshard.rpc.tls import split_address

        return split_address(self.wanted)[1] not in (0, split_address(self.address)[1])

    @property
    def authority(self) -> Path:
        """Whom clients trust that call its HTTP endpoint over TLS, in PEM."""
        return self._directory / "site" / "ca.pem"

    @property
    def url(self) -> str:
        """Of the HTTP endpoint, without a path."""
        return self._cluster.coordinator.gateway

    async def __aenter__(self) -> Self:
        from edgeshard.rpc.tls import split_address

        try:
            # Where the port is known beforehand, boxes start at the same time as the coordinator.
            if split_address(self.wanted)[1]:
                self._joining = asyncio.ensure_future(self._cluster.start_agents())
            await self._cluster.start_coordinator()
            if self._joining is None or self.is_elsewhere:
                await self._join_again()
            if self._lasts:
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

    async def _join_again(self) -> None:
        """The boxes look for the coordinator where it is."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait({self._joining})
        await self._cluster.drop_agents()
        self._joining = asyncio.ensure_future(self._cluster.start_agents())

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
        ended = done.pop()
        daemon, code = waits[ended], ended.result()
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return FailedPreconditionError(
            f"{daemon.name} ended by itself {how}; its log {daemon.log_path} ends with:\n{daemon.log_tail()}",
            reason="PROCESS_ENDED",
        )

    def client(self) -> Client:
        """As the site's operator."""
        return self._cluster.client()

    async def api_key(self, client: Client) -> str:
        """The site's own key for programs: the one in its folder while the site knows it, else a new one."""
        from edgeshard.rpc.tls_files import write_private

        path = self._directory / "api-key"
        known = next((key for key in await client.keys() if key.name == _KEY), None)
        if known is not None and path.exists():
            kept = path.read_text().strip()
            if f"-{known.key_id}-" in kept:
                return kept
        if known is not None:
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
    """What each box may use, where several share the memory that one alone would take and the operator does not say."""
    if boxes == 1 or "EDGESHARD__AGENT__MEMORY" in os.environ:
        return []
    from edgeshard.process.machine import read_condition

    available = read_condition("", directory, None).memory_available_bytes
    return ["--memory", str(available // boxes * 9 // 10)]


def _reachable(nodes: Sequence[str]) -> dict[str, str]:
    """Where boxes of other machines dial a box of this one."""
    from edgeshard.rpc.addresses import outgoing_address
    from edgeshard.rpc.tls import join_address

    host = outgoing_address()
    return {node: join_address(host, AGENT_PORT + index) for index, node in enumerate(nodes)}
