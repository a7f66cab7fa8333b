"""Files of this user's sites on this machine: the state of processes, and how edgectl finds a site.

The site of this machine's nodes is its coordinator and a certificate, as `edgectl join` left them.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError
from edgeshard.process.distribution import program_words
from edgeshard.process.installation import JOINED, config_path
from edgeshard.process.systemd_units import Daemon
from edgeshard.storage.inputs import read_toml

if TYPE_CHECKING:
    from edgeshard.rpc.tls import TlsFiles

AGENT_PORT, AGENT_PORTS = 7610, 32
"""The port at which a node listens for its neighbours, and the number of ports from there that are
tried if it is taken."""


def state_home() -> Path:
    """The directory for state of this user's sites, by the XDG rules."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "edgeshard"


def agent_line(config: Path) -> str:
    """The shell's line that starts an agent with these settings, in a terminal."""
    return f"{program_words('edgeshard-agent')} --config {shlex.quote(str(config))}"


def write_client_settings(coordinator: str, directory: Path) -> None:
    """Write the settings of this user's edgectl and SDK: the coordinator, and the PEM files of
    `directory`."""
    from edgeshard.client.site_access import configuration
    from edgeshard.rpc.tls_files import tls_files, write_private

    files = tls_files(directory)
    config = configuration()
    values = {"coordinator": coordinator} | tls_values(files, config.parent)
    config.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(config, to_toml("client", values).encode())


def tls_values(files: TlsFiles, folder: Path) -> dict[str, str]:
    """Settings that name PEM files, in a file of settings in `folder`."""
    paths = {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}
    return {key: path_from(folder, path) for key, path in paths.items()}


def path_from(folder: Path, path: Path) -> str:
    """A path as a file of settings in `folder` names it: relative if it is in there, so that both
    can move together."""
    path = path.absolute()
    folder = folder.absolute()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def to_toml(section: str, values: Mapping[str, Any]) -> str:
    """A TOML text of one section of texts, numbers, truth values and lists of them."""
    # A JSON text is also valid in TOML.
    return f"[{section}]\n" + "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in values.items()
    )


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a site: the coordinator's host:port and the files that prove who it is."""

    coordinator: str
    files: TlsFiles


def member_of_machine(root: Path = Path("/")) -> Member:
    """The service of this machine, else the newest node of this user, else this user itself.

    Raises FailedPreconditionError if none has joined a site, and InvalidArgumentError for a file
    that cannot be read.
    """
    from edgeshard.rpc.tls_files import tls_files

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
        raise InvalidArgumentError(
            f"{config} names no coordinator; give --from", field="coordinator"
        )
    return address


def _user() -> Member:
    from edgeshard.client.site_access import access

    site_access = access()
    if site_access.tls is None:
        raise FailedPreconditionError(
            "no node on this machine has joined a site to upgrade from: give --from FILE",
            field="from",
            reason="NO_SITE",
        )
    return Member(site_access.target, site_access.tls)
