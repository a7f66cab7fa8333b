"""The site of this machine's nodes: its coordinator and a certificate, as `edgectl join` left them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError
from edgeshard.local.user_files import state_home
from edgeshard.process.installation import JOINED, config_path
from edgeshard.process.systemd_units import Daemon
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import tls_files
from edgeshard.storage.inputs import read_toml


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a site: the coordinator's host:port and the files that prove who it is."""

    coordinator: str
    files: TlsFiles


def member_of_machine(root: Path = Path("/")) -> Member:
    """The service of this machine, else the newest node of this user, else this user itself.

    Raises FailedPreconditionError if none has joined a site, and InvalidArgumentError for a file that cannot be read.
    """
    service = root / config_path(Daemon.AGENT).lstrip("/")
    if os.access(service, os.R_OK):
        return Member(_coordinator(service), tls_files(root / JOINED.lstrip("/")))
    nodes = sorted(state_home().glob("*/agent.toml"), key=lambda path: path.stat().st_mtime)
    if nodes:
        return Member(_coordinator(nodes[-1]), tls_files(nodes[-1].parent / "pki"))
    return _user()


def _coordinator(config: Path) -> str:
    section = read_toml(config, str(config), "config", "CONFIG_FILE").get("agent", {})
    address = section.get("coordinator") if isinstance(section, dict) else None
    if not isinstance(address, str):
        raise InvalidArgumentError(f"{config} names no coordinator; give --from", field="coordinator")
    return address


def _user() -> Member:
    from edgeshard.client.settings import access

    site_access = access()
    if site_access.tls is None:
        raise FailedPreconditionError(
            "no node on this machine has joined a site to upgrade from: give --from FILE",
            field="from",
            reason="NO_SITE",
        )
    return Member(site_access.target, site_access.tls)
