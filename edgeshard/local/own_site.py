"""A site that one machine keeps for itself: its authority, its processes and its key, found again
in a folder."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edgeshard.domain.errors import (
    AlreadyExistsError,
    DeniedError,
    EdgeShardError,
    UnavailableError,
)
from edgeshard.local.child_daemons import keep_running
from edgeshard.local.cluster import SITE, LocalCluster, own_address
from edgeshard.local.user_files import AGENT_PORT, state_home, write_client_settings

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.identity.authority import Authority

_KEY = "serve"
"""The name of the API key that `edgectl serve` prints."""
_URL_PORT, _URL_PORTS = 8000, 32
_OPERATOR = ("pki", "operator-admin")
"""The end of the path of the folder with an operator's files in a site's folder."""
_LOOK_S = 0.05
_NOTICE_S = 2.0
"""Longest time after which this process knows, too, that the coordinator of a failed call has
ended."""
_LEFTOVERS_S = 60.0
"""Processes of a site whose `serve` was killed end with it, but giving gigabytes back takes a
while."""


class OwnSite:
    """A coordinator with its HTTP endpoint, and `nodes` nodes on the same machine, which read its
    store in place.

    As an async context manager it is entered once the coordinator listens; nodes may still be
    starting (`joined`). A site that `lasts` is written into the settings of this user's edgectl and
    SDK, and takes the user's own settings for daemons.
    """

    def __init__(
        self,
        directory: Path | None,
        nodes: int,
        listen: str,
        port: int | None,
        *,
        lasts: bool = True,
        http: Sequence[str] = (),
        wheels: Path | None = None,
    ) -> None:
        """The site of a folder, by default of this user's state directory.

        `wheels` is the folder by which machines without EdgeShard join. `http` are options of its
        coordinator for the HTTP endpoint. By default it is at `port` of loopback; without a `port`,
        at the first free one of some. Raises DeniedError for a folder that cannot be written,
        AlreadyExistsError for a site that is served already.
        """
        from edgeshard.process.extras import missing
        from edgeshard.rpc.addresses import free_port
        from edgeshard.rpc.tls import is_loopback, join_address, split_address

        port = free_port("127.0.0.1", _URL_PORT, _URL_PORTS) if port is None else port
        self._directory = folder = (directory or state_home() / "serve").absolute()
        try:
            self._held = _hold(folder)
            host, first = split_address(listen, "listen")
            authority = _authority(folder / "site")
        except OSError as error:
            why = f"--state-dir {folder}: {error.strerror}"
            raise DeniedError(why, field="state-dir", reason="STATE_DIR") from None
        self._lasts = lasts
        self.proven = False
        """Whether the site has answered once; until then a process that ends has failed to
        start."""
        own = _node_name()
        self.nodes = (
            (own,) if nodes == 1 else tuple(f"{own}-{number}" for number in range(1, nodes + 1))
        )
        self.wanted = listen
        """The address at which the coordinator is to listen."""
        self._cluster = LocalCluster(
            folder,
            self.nodes,
            listen=listen,
            coordinator_listen=_listeners(host, first, with_wheels=wheels is not None),
            listen_by_agent={} if is_loopback(host) else _reachable(self.nodes),
            elsewhere=True,
            configured=lasts,
            threads=_threads(nodes),
            authority=authority,
            share_store=True,
            holding=self._held[-1:],
            agent_arguments=_memory(nodes, folder),
            coordinator_arguments=[
                *("--ca-key", str(folder / "site" / "ca.key")),
                *("--http-listen", join_address("127.0.0.1", port), *http),
                *(() if is_loopback(host) or missing("discovery") else ("--announce",)),
                *([] if wheels is None else ["--wheels", str(wheels.absolute())]),
            ],
        )
        self._joining: asyncio.Future[None] | None = None

    @property
    def address(self) -> str:
        """The coordinator's host:port, once it has started."""
        return self._cluster.address

    @property
    def is_elsewhere(self) -> bool:
        """Whether the wanted port was taken. Nodes that joined before try the coordinator there."""
        from edgeshard.rpc.tls import split_address

        return split_address(self.wanted)[1] not in (0, split_address(self.address)[1])

    @property
    def authority(self) -> Path:
        """The PEM file of the authority that clients of its HTTP endpoint over TLS trust."""
        return self._directory / "site" / "ca.pem"

    @property
    def url(self) -> str:
        """The URL of the HTTP endpoint, without a path."""
        return self._cluster.coordinator.gateway

    async def __aenter__(self) -> Self:
        from edgeshard.rpc.tls import split_address

        try:
            # If the port is known beforehand, nodes start at the same time as the coordinator.
            if split_address(self.wanted)[1]:
                self._joining = asyncio.ensure_future(self._cluster.start_agents())
            await self._cluster.start_coordinator()
            if self._joining is None or self.is_elsewhere:
                await self._join_again()
            if self._lasts:
                self._tell_edgectl()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._joining is not None:
            self._joining.cancel()
        await self._cluster.stop()
        for descriptor in self._held:
            os.close(descriptor)

    async def _join_again(self) -> None:
        """Start the nodes again, with the address that the coordinator has now."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait({self._joining})
        await self._cluster.drop_agents()
        self._joining = asyncio.ensure_future(self._cluster.start_agents())

    async def joined(self) -> None:
        """Wait until layers can be placed on every node of this machine. Raises the error of the
        first that fails."""
        assert self._joining is not None
        await asyncio.shield(self._joining)

    async def supervise(self, say: Callable[[str], None]) -> EdgeShardError:
        """Start its processes again whenever they end. Returns the error of the first that cannot
        start."""
        keepers = [asyncio.ensure_future(self._kept(name, say)) for name in ("", *self.nodes)]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)  # so that none of them starts anything any more

    async def _kept(self, node: str, say: Callable[[str], None]) -> EdgeShardError:
        """Keep a node running, or the coordinator for an empty name; returns the error of its last
        end."""
        if node:
            await self.joined()
        daemon = self._cluster.agents[node] if node else self._cluster.coordinator
        return daemon.error_of(await keep_running(daemon, say, lambda: self.proven))

    @property
    def starts(self) -> int:
        """The number of the coordinator's starts."""
        return self._cluster.coordinator.starts

    async def came_back(self, starts: int) -> bool:
        """Wait until a coordinator of more than `starts` starts listens; False if the last one has
        not ended."""
        coordinator, until_s = self._cluster.coordinator, time.monotonic() + _NOTICE_S
        while coordinator.starts == starts or not coordinator.address:
            if (
                coordinator.starts == starts
                and coordinator.pid is not None
                and time.monotonic() > until_s
            ):
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def client(self) -> Client:
        """A client with the rights of the site's operator, not yet connected."""
        return self._cluster.client()

    async def api_key(self, client: Client) -> str:
        """The site's own key for programs: the one in its folder while the site knows it, else a
        new one."""
        from edgeshard.rpc.tls_files import write_private

        path = self._directory / "api-key"
        site_key = next((key for key in await client.keys() if key.name == _KEY), None)
        if site_key is not None and path.exists():
            saved_text = path.read_text().strip()
            if f"-{site_key.key_id}-" in saved_text:
                return saved_text
        if site_key is not None:
            await client.revoke_key(_KEY)
        _, text = await client.create_key(_KEY)
        write_private(path, f"{text}\n".encode())
        return text

    def next_name(self, used_names: set[str]) -> str:
        """A name for one more node that is not in `used_names`."""
        return next(
            name
            for name in (f"node-{number}" for number in range(2, len(used_names) + 3))
            if name not in used_names
        )

    def _tell_edgectl(self) -> None:
        """Write the site into the settings of this user's edgectl and SDK, unless they belong to
        another."""
        from edgeshard.client.site_access import configuration

        files = self._cluster.operator_files().key.parent
        mine = not configuration().exists() or _is_told(files) or _is_of_moved_site(self.authority)
        if mine and configuration().parent != Path("/dev/null"):
            write_client_settings(own_address(self.address), files)


def _is_told(operator: Path) -> bool:
    """Whether this user's edgectl uses the files of this folder."""
    from edgeshard.client.site_access import configuration

    return configuration().exists() and str(operator) in configuration().read_text()


def _is_of_moved_site(authority: Path) -> bool:
    """Whether this user's edgectl uses the files of this site in another folder, or of a site whose
    folder is gone."""
    from edgeshard.client.site_access import configuration
    from edgeshard.storage.inputs import read_toml

    try:
        section = read_toml(configuration(), "settings", "config").get("client", {})
        configured = configuration().parent / str(section["tls_ca"])
    except (EdgeShardError, KeyError, TypeError):
        return False
    if configured.exists():
        return configured.read_bytes() == authority.read_bytes()
    return configured.parent.parts[-2:] == _OPERATOR


def _hold(folder: Path) -> list[int]:
    """The folder's descriptors of two locked files, after it was made.

    One is locked by only this process, the other by it and its children, until all of them have
    ended. Raises AlreadyExistsError if another process serves the site, UnavailableError if such
    children do not end.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The nodes read the store before the coordinator may have made it.
    for inner in ("pki", "coordinator", "coordinator/models", "coordinator/models/blobs"):
        (folder / inner).mkdir(exist_ok=True, mode=0o700)
    own = _locked(folder / "serve.lock")
    if own is None:
        raise AlreadyExistsError(_served(folder), field="state-dir", reason="SITE_SERVED")
    until_s = time.monotonic() + _LEFTOVERS_S
    while (shared := _locked(folder / "site.lock")) is None:
        if time.monotonic() > until_s:
            raise UnavailableError(
                f"--state-dir {folder}: processes of an earlier edgectl serve still end; fuser "
                f"{folder}/site.lock "
                "shows them",
                field="state-dir",
                reason="STATE_DIR_IN_USE",
            )
        time.sleep(_LOOK_S)
    return [own, shared]


def _locked(path: Path) -> int | None:
    """Lock a file; returns its descriptor, None if another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _served(folder: Path) -> str:
    """The message for a site that is served already."""
    from edgeshard.rpc.tls_files import tls_files

    try:
        ready = json.loads((folder / "coordinator.ready").read_text())
    except (OSError, ValueError):
        return f"the site in {folder} is being started by another edgectl serve"
    edgectl, operator = "edgectl", folder / "pki" / "operator-admin"
    if not _is_told(operator):
        files = tls_files(operator)
        edgectl += f" --coordinator {own_address(ready['address'])}"
        edgectl += f" --tls-ca {files.ca} --tls-cert {files.cert} --tls-key {files.key}"
    return (
        f"the site in {folder} is served already: URL {ready['gateway']}/v1, API key in "
        f"{folder / 'api-key'}\n"
        f"       one more model for it: {edgectl} deploy NAME --model MODEL\n"
        "       a site beside it: give another --state-dir"
    )


def _authority(directory: Path) -> Authority:
    """The site's authority, made at the first call."""
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


def _node_name() -> str:
    """This machine's name in the characters a name may have."""
    return (
        re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower())[:48].strip("-")
        or "node-1"
    )


def _threads(nodes: int) -> int:
    """The threads of each of several nodes that share this machine's cores."""
    from edgeshard.process.control_groups import cpu_quota
    from edgeshard.process.machine_facts import compute_threads, usable_cores

    return max(1, compute_threads(usable_cores(), cpu_quota()) // nodes)


def _memory(nodes: int, directory: Path) -> list[str]:
    """The options that divide the free memory among several nodes, unless the operator sets their
    memory."""
    if nodes == 1 or "EDGESHARD__AGENT__MEMORY" in os.environ:
        return []
    from edgeshard.process.machine_facts import AGENT_BYTES, read_condition

    available = read_condition("", directory, None).memory_available_bytes
    left = max(0, available - nodes * AGENT_BYTES)
    return ["--memory", str(max(1, left // nodes * 9 // 10))]  # 0 means that it is unknown


def _listeners(host: str, first: int, *, with_wheels: bool) -> dict[str, str]:
    """The coordinator's further listeners by their options: the ports after its `first`, any free
    ones after 0."""
    from edgeshard.rpc.tls import join_address

    options = ("--enrol-listen", "--wheels-listen") if with_wheels else ("--enrol-listen",)
    return {
        option: join_address(host, min(first + offset, 65535) if first else 0)
        for offset, option in enumerate(options, 1)
    }


def _reachable(nodes: Sequence[str]) -> dict[str, str]:
    """The address of each node by which nodes of other machines dial it."""
    from edgeshard.rpc.addresses import outgoing_address
    from edgeshard.rpc.tls import join_address

    host = outgoing_address()
    return {node: join_address(host, AGENT_PORT + index) for index, node in enumerate(nodes)}
