"""edgectl uninstall without a role, and edgectl upgrade: the programs of this machine as a
whole."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from edgeshard.cli.commands.command_options import option, switch
from edgeshard.cli.connect import Connect, connect_of, run
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.process.distribution import Managed, Scripted, this_distribution

if TYPE_CHECKING:
    from edgeshard.local.user_files import Member


def uninstall_programs(purge: bool, yes: bool, dry_run: bool) -> None:
    """Remove services and programs, and state too if `purge`, by the script that installed them.

    Raises FailedPreconditionError naming the right command for another installation.
    """
    distribution = this_distribution()
    if isinstance(distribution, Managed):
        raise distribution.error(distribution.purge if purge else distribution.remove)
    command = _script_command(distribution, "purge" if purge else "remove")
    if yes and purge:
        command.append("--yes")
    if dry_run:
        show_text(f"run     {shlex.join(command)}")
        return
    _check_owner(distribution)
    sys.stdout.flush()
    os.execvp(command[0], command)  # this program is removed, too


def upgrade(
    context: typer.Context,
    source: Annotated[
        str | None,
        option(
            "URL|FILE", "Take a bundle, a folder of wheels or another port of the site.", "--from"
        ),
    ] = None,
    back: Annotated[bool, switch("--back", "Return to the previous version.")] = False,
) -> None:
    """Replace EdgeShard on this machine with another version, and restart its services. Without
    --from, fetch the wheels of the node's own site with its certificate. --from takes another
    address of wheels (https://HOST:PORT) or a bundle (https://HOST/PATH). Every file is compared
    with its SHA-256 before anything changes. The previous version is kept for --back.
    """
    if back and source is not None:
        raise InvalidArgumentError(
            "--back takes the version that is kept here: leave out --from", field="from"
        )
    distribution = this_distribution()
    if isinstance(distribution, Managed):
        raise distribution.error(distribution.back if back else distribution.upgrade)
    distribution.check()
    _check_owner(distribution)
    if back:
        _run(_script_command(distribution, "back"))
        return
    url = urlsplit(source or "")
    if source is None or (url.scheme == "https" and url.path in ("", "/")):
        _upgrade_from_site(distribution, connect_of(context), url.netloc)
    elif url.scheme and "://" in source:
        _upgrade_from_web(distribution, source)
    else:
        _upgrade_from_file(distribution, Path(source))


def _upgrade_from_site(distribution: Scripted, connect: Connect, address: str) -> None:
    """Install the programs that the site of this machine's node offers, from host:port `address`
    ("": the coordinator's).
    """
    from edgeshard.client.upgrades import SiteWheels, find_wheels
    from edgeshard.process.wheel_folders import REQUIREMENTS

    member = _member(connect)
    address = address or run(find_wheels(member.coordinator, member.files))
    site = SiteWheels(address, member.files)
    folder = site.folder()
    if any(file.name == REQUIREMENTS and distribution.is_of(file.sha256) for file in folder.files):
        show_text(f"nothing to do: this node already has the version of {address}", err=True)
        return
    size = sum(file.size for file in folder.files)
    show_text(
        f"fetching {folder.name} from {address}: {len(folder.files)} files, {size / 1e6:.0f} MB",
        err=True,
    )
    with _directory("wheels") as directory:
        site.fetch(folder, directory)
        _install(distribution, directory)
        shutil.rmtree(directory)


def _member(connect: Connect) -> Member:
    from edgeshard.client.site_access import access
    from edgeshard.local.user_files import Member, member_of_machine
    from edgeshard.rpc.tls import tls_from_options

    files = tls_from_options(connect.tls_ca, connect.tls_cert, connect.tls_key)
    if files is not None:
        return Member(access(connect.coordinator, files).target, files)
    member = member_of_machine()
    return Member(connect.coordinator or member.coordinator, member.files)


def _upgrade_from_web(distribution: Scripted, url: str) -> None:
    from edgeshard.client.upgrades import download
    from edgeshard.process.wheel_folders import unpack

    with _directory("upgrade", fresh=True) as directory:
        show_text(f"fetching {url}", err=True)
        archive = download(url, directory)
        folder = unpack(archive, directory)
        _install(distribution, folder)


def _upgrade_from_file(distribution: Scripted, source: Path) -> None:
    from edgeshard.process.wheel_folders import check_folder, unpack

    show_text(f"comparing the files of {source} with their SHA-256", err=True)
    if source.is_dir():
        check_folder(source)
        _install(distribution, source)
        return
    with _directory("upgrade", fresh=True) as directory:
        _install(distribution, unpack(source, directory))


def _install(distribution: Scripted, wheels: Path) -> None:
    """Install from a folder whose files were checked."""
    _run(
        [
            "sh",
            str(wheels / "install.sh"),
            "--wheels",
            str(wheels),
            "--prefix",
            str(distribution.prefix),
        ]
    )


def _script_command(distribution: Scripted, *arguments: str) -> list[str]:
    """The command line of an installation's script. Raises FailedPreconditionError if the script is
    missing."""
    distribution.check()
    return ["sh", str(distribution.script), *arguments, "--prefix", str(distribution.prefix)]


def _run(command: list[str]) -> None:
    """Run install.sh, which prints each step. Ends this command with the exit code of a script that
    fails."""
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise typer.Exit(code if code > 0 else 128 - code)


def _check_owner(distribution: Scripted) -> None:
    if not os.access(distribution.prefix, os.W_OK):
        raise DeniedError(
            f"{distribution.prefix} belongs to another user: run this as its owner, such as by "
            "sudo",
            field="prefix",
            reason="NOT_OWNER",
        )


def cache_directory() -> Path:
    """The directory for this user's downloads; a machine that joins by one line uses it, too."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path("/var/cache") if os.geteuid() == 0 else home) / "edgeshard"


@contextmanager
def _directory(name: str, *, fresh: bool = False) -> Iterator[Path]:
    """A directory of this user for downloads. One that is `fresh` is empty at first and removed at
    the end; another one is kept, so that a later run continues."""
    directory = cache_directory() / name
    try:
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise DeniedError(f"{directory} belongs to another user: remove it", field="from")
    except OSError as error:
        raise DeniedError(
            f"{directory}: {error.strerror}; set XDG_CACHE_HOME to a directory of yours",
            field="from",
        ) from None
    try:
        yield directory
    finally:
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # others have files there
            directory.parent.rmdir()
            directory.parent.parent.rmdir()
