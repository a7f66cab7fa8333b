"""edgectl logs: the log of a daemon of this machine."""

from __future__ import annotations

import asyncio
import codecs
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.commands.site.lab import DEFAULT_DIRECTORY
from edgeshard.cli.connect import run
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError, NotFoundError
from edgeshard.domain.ids import check_name
from edgeshard.process.installation import CONFIGURATION
from edgeshard.process.systemd_units import Daemon
from edgeshard.storage.inputs import read_toml

COORDINATOR = "coordinator"
_PIECE_BYTES = 1 << 16


def logs(
    name: Annotated[
        str,
        argument(
            "NODE|coordinator",
            "Print the log of this node or of the coordinator.",
            autocompletion=completion.nodes,
        ),
    ],
    lines: Annotated[int, option("N", "Show the N newest lines.", "--lines", "-n", min=0)] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")
    ] = False,
    directory: Annotated[
        Path,
        option(
            "DIR",
            "Read the log file NODE.log or coordinator.log in this directory, for example the "
            "directory of a lab.",
            "--directory",
        ),
    ] = DEFAULT_DIRECTORY,
) -> None:
    """Print the newest log lines of a daemon on this machine: from DIR/NAME.log if it exists,
    otherwise from the systemd journal. Logs stay on their machines. To see events of all nodes, use
    `edgectl get events`. To see the recent internal events of each process, use
    `edgectl debug dump`.
    """
    check_name(name, "name")
    raise typer.Exit(run(_passed_on(command_of(name, lines, follow, directory)), endless=follow))


def command_of(
    name: str, lines: int, follow: bool, directory: Path, etc: Path = Path(CONFIGURATION)
) -> list[str]:
    """The command that prints the log. Raises NotFoundError if this machine has none of that
    name."""
    file = directory / f"{name}.log"
    if file.exists():
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(file)]
    unit = _unit_of(name, etc)
    if unit is None:
        daemon = COORDINATOR if name == COORDINATOR else "agent"
        raise NotFoundError(
            f"there is no log of {name} on this machine: run `journalctl -u edgeshard-{daemon}` on "
            "its "
            "own machine if it is a service; a daemon started by hand logs to its standard error; "
            f"--directory DIR names a folder with {name}.log",
            field="name",
            reason="NO_LOG",
        )
    if shutil.which("journalctl") is None:
        raise FailedPreconditionError(
            "this machine has no journalctl: read the log of the service manager, or give "
            "--directory DIR",
            reason="NO_JOURNAL",
        )
    return ["journalctl", "-u", unit, "-n", str(lines), "--no-pager", *(["-f"] if follow else [])]


def _unit_of(name: str, etc: Path) -> str | None:
    """The unit on this machine that is this daemon, by its configuration."""
    daemon = Daemon.COORDINATOR if name == COORDINATOR else Daemon.AGENT
    configuration = etc / f"{daemon}.toml"
    if not os.access(configuration, os.R_OK):
        return None
    try:
        section = read_toml(configuration, str(configuration), "config").get(daemon.value, {})
    except EdgeShardError:
        return None
    return daemon.unit if daemon is Daemon.COORDINATOR or section.get("name") == name else None


async def _passed_on(command: list[str]) -> int:
    """Print a command's output. Returns its exit code; it ends with this one, whatever ends this
    one."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    text = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while piece := await process.stdout.read(_PIECE_BYTES):
            show_text(text.decode(piece), nl=False)
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
    return code if code >= 0 else 128 - code
