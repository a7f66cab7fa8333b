"""Files of this user's sites on this machine: the state of processes, and how edgectl finds a site."""

from __future__ import annotations

import json
import os
from pathlib import Path

AGENT_PORT = 7610
"""Where a node listens for its neighbours."""


def state_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "edgeshard"


def write_client_settings(coordinator: str, directory: Path) -> None:
    """What edgectl and the SDK of this user find: the coordinator, and the files of `directory`."""
    from edgeshard.client.settings import configuration
    from edgeshard.rpc.tls_files import tls_files, write_private

    files = tls_files(directory)
    values = {"coordinator": coordinator, "tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}
    configuration().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(configuration(), to_toml("client", {key: str(value) for key, value in values.items()}).encode())


def to_toml(section: str, values: dict[str, str]) -> str:
    # A JSON text is one of TOML, too.
    return f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
