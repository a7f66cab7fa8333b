"""edgectl uninstall without a role, and edgectl upgrade: the programs of this machine as a whole."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from edgeshard.cli.commands.options import option, switch
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.process.distribution import Managed, Scripted, this_distribution


def uninstall_programs(purge: bool, yes: bool, dry_run: bool) -> None:
    """Remove services and programs, and state too if `purge`, by the script that installed them.

    Raises FailedPreconditionError naming the right command for another installation.
    """
    found = this_distribution()
    if isinstance(found, Managed):
        raise found.error(found.purge if purge else found.remove)
    command = _script_command(found, "purge" if purge else "remove")
    if yes and purge:
        command.append("--yes")
    if dry_run:
        show_text(f"run     {shlex.join(command)}")
        return
    _check_owner(found)
    sys.stdout.flush()
    os.execvp(command[0], command)  # this program is removed, too


def upgrade(
    source: Annotated[
        str | None,
        option("FILE", "A bundle or a folder of wheels.", "--from"),
    ] = None,
    back: Annotated[bool, switch("--back", "Return to the version before.")] = False,
) -> None:
    """Replace EdgeShard on this machine by another version, and restart its services.

    Every file is compared with its SHA-256 before anything changes. The version before is kept for --back.
    """
    if back and source is not None:
        raise InvalidArgumentError("--back takes the version that is kept here: leave out --from", field="from")
    found = this_distribution()
    if isinstance(found, Managed):
        raise found.error(found.back if back else found.upgrade)
    found.check()
    _check_owner(found)
    if back:
        _run(_script_command(found, "back"))
        return
    if source is None:
        raise InvalidArgumentError("--from FILE is required", field="from")
    _upgrade_from(found, Path(source))


def _upgrade_from(found: Scripted, source: Path) -> None:
    from edgeshard.process.wheel_folders import check_folder, unpack

    show_text(f"comparing the files of {source} with their SHA-256", err=True)
    if source.is_dir():
        check_folder(source)
        _install(found, source)
        return
    with _scratch() as directory:
        _install(found, unpack(source, directory))


def _install(found: Scripted, wheels: Path) -> None:
    """Install from a folder whose files were checked."""
    _run(["sh", str(wheels / "install.sh"), "--wheels", str(wheels), "--prefix", str(found.prefix)])


def _script_command(found: Scripted, *arguments: str) -> list[str]:
    """The command line of an installation's script. Raises FailedPreconditionError if the script is missing."""
    found.check()
    return ["sh", str(found.script), *arguments, "--prefix", str(found.prefix)]


def _run(command: list[str]) -> None:
    """Run install.sh, whose lines tell each step. Ends this command with the exit code of a script that fails."""
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise typer.Exit(code if code > 0 else 128 - code)


def _check_owner(found: Scripted) -> None:
    if not os.access(found.prefix, os.W_OK):
        raise DeniedError(
            f"{found.prefix} belongs to another user: run this as its owner, such as by sudo",
            field="prefix",
            reason="NOT_OWNER",
        )


def cache_directory() -> Path:
    """Where this user's downloads are, the same as those of a machine that joins by one line."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path("/var/cache") if os.geteuid() == 0 else home) / "edgeshard"


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory of this user for an unpacked bundle. One that an earlier run left is removed first."""
    directory = cache_directory() / "upgrade"
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise DeniedError(
            f"{directory}: {error.strerror}; set XDG_CACHE_HOME to a directory of yours", field="from"
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # others have files there
            directory.parent.rmdir()
            directory.parent.parent.rmdir()
