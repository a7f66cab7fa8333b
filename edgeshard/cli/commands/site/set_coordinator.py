"""edgectl set-coordinator: the coordinator's address in the settings of this machine's node and of
this user."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.commands.site import install
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import DeniedError, InvalidArgumentError, NotFoundError
from edgeshard.local.user_files import agent_line, state_home
from edgeshard.process import installation
from edgeshard.process.systemd_units import Daemon
from edgeshard.storage.inputs import read_toml

_LINE = re.compile(r"^coordinator[ \t]*=.*$", re.MULTILINE)


def set_coordinator(
    address: Annotated[str, argument("HOST:PORT", "Use this address of the coordinator.")],
    config: Annotated[
        Path | None, option("FILE", "Change only this settings file, such as agent.toml.")
    ] = None,
) -> None:
    """Change the coordinator's address on this machine. Certificates stay valid. As root, this
    changes the agent's service and restarts it. As another user, it changes the nodes that
    `edgectl join` runs for this user, and this user's edgectl.
    """
    from edgeshard.client.site_access import configuration
    from edgeshard.rpc.tls import split_address

    split_address(address, "coordinator")
    installed = Path(installation.config_path(Daemon.AGENT))
    if config is not None:
        if _change(config, address) == "agent":
            _show_restarts([config])
        return
    nodes = sorted(state_home().glob("*/agent.toml"))
    client = [configuration()] if configuration().is_file() else []
    service = [installed] if os.geteuid() == 0 and installed.is_file() else []
    if not nodes + client + service:
        raise NotFoundError(
            f"none of {installed}, {state_home()}/*/agent.toml and {configuration()} exists: give "
            "--config FILE, or run the command as root for an installed agent",
            field="config",
        )
    for path in nodes + client:
        _change(path, address)
    if service:
        _change_service(installed, address)
    if nodes:
        _show_restarts(nodes)


def _change_service(config: Path, address: str) -> None:
    if Path(installation.record_path(Daemon.AGENT)).is_file():
        install.install_daemon(Daemon.AGENT, install.MACHINE, False, {"coordinator": address})
    else:  # of the Debian package
        _change(config, address)
    if install.runs_systemd():
        install.systemctl("restart", Daemon.AGENT.unit)


def _show_restarts(configs: Sequence[Path]) -> None:
    """Print the lines by which agents of a terminal take up their settings."""
    show_text(
        "A running agent still uses the old address. Stop it (Ctrl-C in its terminal) and start it "
        "again:"
    )
    for config in configs:
        show_text(f"  {agent_line(config.absolute())}")


def _change(path: Path, address: str) -> str:
    """Change the address in a file of settings; all other lines stay. Returns the changed
    section."""
    from edgeshard.rpc.tls_files import write_private

    what = f"--config {path}"
    before = read_toml(path, what, "config", "CONFIG_FILE")
    text = path.read_text(encoding="utf-8")
    changed = _LINE.sub(lambda _: f"coordinator = {json.dumps(address)}", text)
    section = next((name for name in ("agent", "client") if name in before), "")
    expected = {**before, section: {**before.get(section, {}), "coordinator": address}}
    if not section or tomllib.loads(changed) != expected:
        raise InvalidArgumentError(
            f"{what} has no line `coordinator = ...` that can be changed: write coordinator = "
            f"{json.dumps(address)} "
            "into its section [agent] or [client]",
            field="config",
        )
    mode = path.stat().st_mode
    try:
        write_private(path, changed.encode())
        path.chmod(mode)
    except OSError as error:
        raise DeniedError(f"{what}: {error.strerror}", field="config") from None
    show_text(f"{path}: the coordinator is at {address}")
    return section
