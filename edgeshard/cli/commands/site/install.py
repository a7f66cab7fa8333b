"""edgectl install and uninstall: a daemon as a service of systemd, with its unit, configuration and
user."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeshard.cli.commands.command_options import option, switch
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import (
    DataLossError,
    DeniedError,
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    extra_line,
)
from edgeshard.domain.ids import check_name
from edgeshard.process import installation
from edgeshard.process.installation import InstallOptions, Record, Step, SystemState
from edgeshard.process.systemd_units import CREDENTIALS, Daemon

app = typer.Typer(help="Install a daemon as a systemd service.", no_args_is_help=True)
uninstall_app = typer.Typer(invoke_without_command=True)

_LOOPBACK = {"agent": "127.0.0.1:0", "coordinator": "127.0.0.1:7600"}

Listen = Annotated[str | None, option("HOST:PORT", "Listen on this address.", "--listen")]
Credentials = Annotated[
    Path | None,
    option(
        "DIR",
        "Copy ca.pem, cert.pem and key.pem for TLS from this directory; only root can read the "
        "copies.",
        "--credentials",
    ),
]
Programs = Annotated[
    Path | None,
    option(
        "DIR", "Find the daemon's program in this directory; by default next to edgectl.", "--bin"
    ),
]
Root = Annotated[
    Path,
    option("DIR", "Work on files below DIR, such as a mounted image, and run nothing.", "--root"),
]
DryRun = Annotated[bool, switch("--dry-run", "Print each step, and change nothing.")]
Purge = Annotated[
    bool, switch("--purge", "Remove its state and files that were changed by hand, too.")
]
MACHINE = Path("/")
_RUNS_SYSTEMD = Path("/run/systemd/system")
"""Exists if systemd runs the machine, see sd_booted(3)."""


@app.command("agent")
def install_agent(
    context: typer.Context,
    name: Annotated[str | None, option("NAME", "Name the node.", "--name")] = None,
    listen: Listen = None,
    credentials: Credentials = None,
    programs: Programs = None,
    root: Root = MACHINE,
    dry_run: DryRun = False,
) -> None:
    """Install this node's agent for the site of --coordinator as a systemd service. Options that
    you leave out keep their earlier values.
    """
    settings = {"name": name, "coordinator": _said_here(context, "coordinator"), "listen": listen}
    settings |= _directories(credentials, programs)
    install_daemon(
        Daemon.AGENT, root, dry_run, settings, plaintext=bool(_said_here(context, "plaintext"))
    )


@app.command("coordinator")
def install_coordinator(
    context: typer.Context,
    listen: Listen = None,
    credentials: Credentials = None,
    site: Annotated[
        Path | None,
        option(
            "DIR",
            "Use this directory of `edgectl init`: serve other machines on port 7600, and let them "
            "join on port 7601.",
            "--site",
        ),
    ] = None,
    wheels: Annotated[
        Path | None,
        option(
            "DIR",
            "Offer this folder of wheels on port 7602 to machines without EdgeShard.",
            "--wheels",
        ),
    ] = None,
    programs: Programs = None,
    root: Root = MACHINE,
    dry_run: DryRun = False,
) -> None:
    """Install the site's coordinator as a systemd service. Options that you leave out keep their
    earlier values."""
    settings: dict[str, str | None] = {"listen": listen} | _directories(credentials, programs)
    settings["wheels"] = None if wheels is None else str(wheels.absolute())
    if site is not None:
        settings |= {
            "listen": listen or "0.0.0.0:7600",
            "enrol_listen": "0.0.0.0:7601",
            "credentials": settings["credentials"] or str((site / "coordinator").absolute()),
            "ca_key": str((site / "ca.key").absolute()),
        }
    install_daemon(
        Daemon.COORDINATOR,
        root,
        dry_run,
        settings,
        plaintext=bool(_said_here(context, "plaintext")),
    )


@uninstall_app.callback()
def uninstall(
    context: typer.Context,
    purge: Annotated[
        bool,
        switch("--purge", "Remove identities, models and settings, too, after a confirmation."),
    ] = False,
    yes: Annotated[bool, switch("--yes", "Skip the confirmation.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Remove EdgeShard from this machine, or one service. Without a role, stop and remove the
    services, then the programs. Identities, models and settings stay unless --purge is given.
    """
    if context.invoked_subcommand is None:
        from edgeshard.cli.commands.site.programs import uninstall_programs

        uninstall_programs(purge, yes, dry_run)
    elif purge or yes or dry_run:
        role = context.invoked_subcommand
        raise InvalidArgumentError(
            f"write options after the role: edgectl uninstall {role} --purge", field="purge"
        )


@uninstall_app.command("agent")
def uninstall_agent(root: Root = MACHINE, purge: Purge = False, dry_run: DryRun = False) -> None:
    """Stop the agent and remove its service. Its identity and its cache of weights stay unless
    --purge is given."""
    _uninstall(Daemon.AGENT, root, purge, dry_run)


@uninstall_app.command("coordinator")
def uninstall_coordinator(
    root: Root = MACHINE, purge: Purge = False, dry_run: DryRun = False
) -> None:
    """Stop the coordinator and remove its service. Nodes, deployments and models stay unless
    --purge is given."""
    _uninstall(Daemon.COORDINATOR, root, purge, dry_run)


def _directories(credentials: Path | None, programs: Path | None) -> dict[str, str | None]:
    directories = {"credentials": credentials, "programs": programs}
    return {
        name: None if path is None else str(path.absolute()) for name, path in directories.items()
    }


def _said_here(context: typer.Context, option: str) -> Any:
    """A global option of this command line, else None: a setting for this user's own calls is not
    for a daemon."""
    root = context.find_root()
    source = root.get_parameter_source(option)
    return root.params.get(option) if source is not None and source.name == "COMMANDLINE" else None


def runs_systemd() -> bool:
    return _RUNS_SYSTEMD.is_dir()


def systemctl(*arguments: str) -> None:
    """Run systemctl. Raises FailedPreconditionError (COMMAND_FAILED) with its output."""
    result = subprocess.run(("systemctl", *arguments), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise FailedPreconditionError(
            f"systemctl {' '.join(arguments)}: {result.stderr.strip()}", reason="COMMAND_FAILED"
        )


def install_daemon(
    daemon: Daemon,
    root: Path,
    dry_run: bool,
    settings: Mapping[str, str | None],
    *,
    plaintext: bool = False,
) -> None:
    """Lay a daemon out. A setting that is not `settings` stays as at the last time. A daemon
    without credentials uses plaintext, which must be set explicitly the first time."""
    _check_may(root, dry_run)
    record = _record(daemon, root)
    options = _options(daemon, record, settings)
    if record is None and not options.credentials and not plaintext:
        raise InvalidArgumentError(
            "--credentials DIR is required, with ca.pem, cert.pem and key.pem of edgectl "
            "certificate (as "
            "root, edgectl join TOKEN installs an agent by itself); for a site on this machine "
            "only, "
            "without TLS, give --plaintext",
            field="credentials",
            reason="NO_CREDENTIALS",
        )
    _check(daemon, options, root)
    steps = installation.install_steps(
        daemon, options, record, _found(daemon, options, record, root)
    )
    _take(steps, root, dry_run)
    if not steps:
        show_text("nothing to do: all files are installed", err=True)
    elif not dry_run:
        where = "" if root == MACHINE else "On the machine that boots from it: "
        show_text(
            f"{where}systemctl enable --now {daemon.unit} starts it; systemctl restart "
            f"{daemon.unit} "
            "applies changes to a running one",
            err=True,
        )


def _uninstall(daemon: Daemon, root: Path, purge: bool, dry_run: bool) -> None:
    _check_may(root, dry_run)
    record = _record(daemon, root)
    if record is None:
        show_text(f"nothing to do: edgectl install has installed no {daemon} here", err=True)
        return
    _take(
        installation.uninstall_steps(
            daemon, record, _found(daemon, record.options, record, root), purge=purge
        ),
        root,
        dry_run,
    )


def _options(
    daemon: Daemon, record: Record | None, settings: Mapping[str, str | None]
) -> InstallOptions:
    """The given options, else the last ones, else the defaults for a site on one machine."""
    # Without following links: the interpreter of a virtual environment is one.
    beside = _lasting(Path(sys.executable).absolute().parent)
    coordinator = "" if daemon == "coordinator" else _LOOPBACK["coordinator"]
    before = (
        record.options
        if record is not None
        else InstallOptions(_LOOPBACK[daemon], str(beside), "", coordinator)
    )
    return replace(before, **{name: value for name, value in settings.items() if value is not None})


def _lasting(programs: Path) -> Path:
    """The directory of programs by the name that stays when deploy/install.sh puts another version
    in their place."""
    environment = programs.parent
    current = environment.parent.parent / "current"
    named_so = (
        environment.parent.name == "versions"
        and current.is_symlink()
        and current.resolve() == environment
    )
    return current / programs.name if named_so else programs


def _check(daemon: Daemon, options: InstallOptions, root: Path) -> None:
    """Raise the error that the daemon would end with when it is started."""
    from edgeshard.rpc.tls import TlsFiles, check_private, check_secure

    if daemon == "agent" and not options.name:
        raise InvalidArgumentError("--name is required: the node's name in the site", field="name")
    files = [Path(options.credentials, name) for name in CREDENTIALS]
    tls = TlsFiles(*files) if options.credentials else None
    try:
        check_secure(options.listen, tls, "listen")
        if options.ca_key and root == MACHINE:
            check_private(Path(options.ca_key), "ca-key")
        if daemon == "agent":
            check_secure(options.coordinator, tls, "coordinator")
            check_name(options.name, "name")
    except DeniedError as error:
        # Those options are the daemon's.
        message = error.message.replace("--tls-ca, --tls-cert and --tls-key", "--credentials DIR")
        raise DeniedError(message, field=error.field, reason=error.reason) from None
    if root != MACHINE:
        return  # the files they name are not here
    if tls is not None:
        tls.check()
    programs = Path(options.programs)
    if not (programs / daemon.unit).is_file():
        raise InvalidArgumentError(
            f"there is no {daemon.unit} in {programs}: {extra_line(daemon)}, or give --bin DIR",
            field="bin",
        )
    installation.check_visible(str((programs / "python").resolve()))


def _check_may(root: Path, dry_run: bool) -> None:
    if root != MACHINE:
        if not root.is_dir():
            raise InvalidArgumentError(f"--root {root} is not a directory", field="root")
        return
    if shutil.which("systemctl") is None or not _RUNS_SYSTEMD.is_dir():
        raise FailedPreconditionError(
            "this machine does not run systemd; --root DIR writes the files for one that does",
            reason="NO_SYSTEMD",
        )
    if os.geteuid() != 0 and not dry_run:
        raise DeniedError(
            "only root may do this: use sudo, or --dry-run to see the steps", reason="NOT_ROOT"
        )


def _record(daemon: Daemon, root: Path) -> Record | None:
    path = below(root, installation.record_path(daemon))
    try:
        return installation.from_text(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _translated(error, str(path)) from None


def _found(
    daemon: Daemon, options: InstallOptions, record: Record | None, root: Path
) -> SystemState:
    digests, directories = {}, set()
    for name in installation.interesting(daemon, options, record):
        path = below(root, name)
        if path.is_dir():
            directories.add(name)
        elif path.is_symlink():
            digests[name] = installation.digest(str(path.readlink()))
        elif path.is_file():
            digests[name] = installation.digest(path.read_bytes())
    shared = frozenset[str]()
    # a damaged record is mended when it matters to the other daemon
    with contextlib.suppress(DataLossError):
        beside = _record(Daemon.COORDINATOR if daemon is Daemon.AGENT else Daemon.AGENT, root)
        shared = frozenset(beside.directories if beside is not None else ())
    return SystemState(
        digests, frozenset(directories), _user_exists(daemon.unit, root), shared, root == MACHINE
    )


def _user_exists(name: str, root: Path) -> bool:
    if root == MACHINE:
        import pwd  # a system without this module has no systemd

        with contextlib.suppress(KeyError):
            return bool(pwd.getpwnam(name))
        return False
    passwd = below(root, "/etc/passwd")
    return passwd.is_file() and any(
        line.startswith(f"{name}:") for line in passwd.read_text().splitlines()
    )


def _take(steps: Sequence[Step], root: Path, dry_run: bool) -> None:
    for step in steps:
        show_text(_said(step))
        if dry_run:
            continue
        try:
            _do(step, root)
        except OSError as error:
            raise _translated(error, str(error.filename)) from None


def _said(step: Step) -> str:
    """A line of one word and its object, for people and for awk."""
    match step:
        case installation.MakeDirectory():
            return f"make    {step.path}/"
        case installation.Write():
            return f"write   {step.path}"
        case installation.Remove():
            return f"remove  {step.path}"
        case installation.RemoveDirectory():
            return f"remove  {step.path}/" + ("" if step.whole else " if it is empty")
        case installation.Run():
            return f"run     {' '.join(step.command)}"
        case _:
            return f"leave   {step.what}: {step.why}"


def _do(step: Step, root: Path) -> None:
    match step:
        case installation.MakeDirectory():
            below(root, step.path).mkdir(mode=0o755, exist_ok=True)
        case installation.Write():
            _write(below(root, step.path), step.content)
        case installation.Remove():
            below(root, step.path).unlink(missing_ok=True)
        case installation.RemoveDirectory(whole=True):
            shutil.rmtree(below(root, step.path))
        case installation.RemoveDirectory():
            with contextlib.suppress(OSError):  # others have files there
                below(root, step.path).rmdir()
        case installation.Run():
            _run(step.command)
        case _:
            pass


def _write(path: Path, content: str) -> None:
    """All of it or nothing, whatever the umask."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        file.write(content)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _run(command: tuple[str, ...]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        why = result.stderr.strip() or f"exit code {result.returncode}"
    except FileNotFoundError:
        result, why = None, "there is no such program"
    if result is None or result.returncode != 0:
        raise FailedPreconditionError(f"{' '.join(command)}: {why}", reason="COMMAND_FAILED")


def _translated(error: OSError, path: str) -> EdgeShardError:
    kind = DeniedError if isinstance(error, PermissionError) else FailedPreconditionError
    return kind(f"{path}: {error.strerror or error}", field="root")


def below(root: Path, path: str) -> Path:
    """The place under `root` of an absolute path of the machine."""
    return root / path.lstrip("/")
