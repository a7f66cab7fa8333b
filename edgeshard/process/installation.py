"""Steps of `edgectl install` and `edgectl uninstall` on a machine, as values. Pure: the command
takes them (`edgeshard.cli.commands.site.install`).

An installation keeps a record of what it made, in a file next to the daemon's configuration. A file
that differs from the record was changed by hand, and is neither written nor removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import PurePosixPath

from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.forms import OWN
from edgeshard.process.systemd_units import Daemon, unit_text

CONFIGURATION = "/etc/edgeshard"
JOINED = f"{CONFIGURATION}/agent-pki"
"""The directory in which `edgectl join` keeps a node's certificate for its service."""
_CONFIGURED = {
    Daemon.AGENT: ("name", "coordinator", "listen", "memory", "device", "advertise", "labels"),
    Daemon.COORDINATOR: ("listen", "enrol_listen", "wheels"),
}
"""Options in a daemon's configuration, in this order."""
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Directories that ProtectHome= and PrivateTmp= hide from a unit."""


@dataclass(frozen=True, slots=True)
class InstallOptions:
    """Choices of an operator; "" if one was not made.

    `programs` is the directory of the daemons, `credentials` the directory of the TLS files.
    `name`, `coordinator`, `memory`, `device`, `advertise` and `labels` are an agent's. A
    coordinator has `ca_key` and `enrol_listen`, with which a site makes certificates, and `wheels`,
    by which machines without EdgeShard join.
    """

    listen: str
    programs: str
    name: str = ""
    coordinator: str = ""
    credentials: str = ""
    memory: str = ""
    device: str = ""
    advertise: str = ""
    labels: str = ""
    ca_key: str = ""
    enrol_listen: str = ""
    wheels: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """An installation: sha256 of its files by path, its directories (outer ones first), whether it
    made the user."""

    options: InstallOptions
    files: Mapping[str, str] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    user: bool = False


@dataclass(frozen=True, slots=True)
class SystemState:
    """The state of `interesting` paths: sha256 of files and links by path, directories, and whether
    the user exists.

    `shared` are directories in the record of the other daemon. `live` is True on the running
    machine, False in an image.
    """

    files: Mapping[str, str]
    directories: frozenset[str]
    user: bool
    shared: frozenset[str] = frozenset()
    live: bool = False


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """Make a directory of mode 0755."""

    path: str


@dataclass(frozen=True, slots=True)
class Write:
    """Write a file of mode 0644, without secrets."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file or a link."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoveDirectory:
    """Remove a directory if it is empty, or with all its content if `whole`."""

    path: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Run a program with its arguments."""

    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave something unchanged, and print the reason for the operator."""

    what: str
    why: str


Step = MakeDirectory | Write | Remove | RemoveDirectory | Run | Leave


def config_path(daemon: Daemon) -> str:
    """The daemon's configuration, TOML."""
    return f"{CONFIGURATION}/{daemon}.toml"


def record_path(daemon: Daemon) -> str:
    """The `Record` of its installation, JSON."""
    return f"{CONFIGURATION}/{daemon}.installed.json"


def state_directory(daemon: Daemon) -> str:
    """The directory that StateDirectory= makes."""
    return f"/var/lib/{daemon.unit}"


def unit_path(daemon: Daemon) -> str:
    """The daemon's unit."""
    return f"/etc/systemd/system/{daemon.unit}.service"


def enabled_path(daemon: Daemon) -> str:
    """The link that `systemctl enable` makes."""
    return f"/etc/systemd/system/multi-user.target.wants/{daemon.unit}.service"


def user_path(daemon: Daemon) -> str:
    """The file by which systemd-sysusers makes its user."""
    return f"/etc/sysusers.d/{daemon.unit}.conf"


def drop_ins(daemon: Daemon) -> str:
    """The directory that `systemctl edit` makes; no installation writes to it."""
    return f"{unit_path(daemon)}.d"


def files(daemon: Daemon, options: InstallOptions) -> dict[str, str]:
    """The files of an installation, by path. Raises InvalidArgumentError for programs that no unit
    can run."""
    check_visible(options.programs)
    option_paths = {
        "credentials": options.credentials,
        "ca-key": options.ca_key,
        "wheels": options.wheels,
    }
    paths = {"bin": options.programs, **{name: path or "/" for name, path in option_paths.items()}}
    for name, text in paths.items():
        # Characters that mean something to systemd in a command or a path.
        if not text.startswith("/") or set(text) & set("\"'\\%$:; \t\n"):
            raise InvalidArgumentError(
                f"--{name} {text!r} must be an absolute path without spaces or any of \"'\\%$:;",
                field=name,
            )
    values = {key: getattr(options, key) for key in _CONFIGURED[daemon]}
    config = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value)
    return {
        user_path(daemon): f'u {daemon.unit} - "EdgeShard {daemon}" {state_directory(daemon)}\n',
        config_path(
            daemon
        ): f"# Every option of {daemon.unit} --help may stand here.\n[{daemon}]\n{config}",
        unit_path(daemon): unit_text(
            daemon,
            f"{options.programs}/{daemon.unit}",
            config_path(daemon),
            options.credentials,
            options.ca_key,
        ),
    }


def check_visible(path: str) -> None:
    """Raise InvalidArgumentError for a program that no unit could run."""
    for hidden in _HIDDEN:
        if PurePosixPath(path).is_relative_to(hidden):
            raise InvalidArgumentError(
                f"{path} cannot be run by the unit, which sees nothing of {hidden}: install "
                "EdgeShard elsewhere, such "
                "as in /opt/edgeshard, or give --bin DIR",
                field="bin",
            )


def interesting(daemon: Daemon, options: InstallOptions, record: Record | None) -> set[str]:
    """The paths whose state decides on the steps of an installation or of its removal."""
    paths = {
        *files(daemon, options),
        *(record.files if record else ()),
        record_path(daemon),
        enabled_path(daemon),
    }
    paths |= {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    return paths | {state_directory(daemon), drop_ins(daemon), JOINED}


def install_steps(
    daemon: Daemon, options: InstallOptions, record: Record | None, system: SystemState
) -> list[Step]:
    """Steps that install missing files and renew those that were not changed by hand; empty if
    nothing is missing."""
    before = record or Record(options, user=not system.user)
    contents = files(daemon, options)
    parents = {str(parent) for path in contents for parent in PurePosixPath(path).parents}
    missing = sorted(parents - system.directories)
    steps: list[Step] = [MakeDirectory(path) for path in missing]
    directories = {*before.directories, *missing, *(system.shared & parents)}
    digests = dict(before.files)
    for path, content in contents.items():
        present_digest, new = system.files.get(path), digest(content)
        if present_digest not in (None, new, before.files.get(path)):
            steps.append(Leave(path, "it was changed by hand; remove it to have it written again"))
            continue
        digests[path] = new
        if present_digest != new:
            steps.append(Write(path, content))
    after = replace(before, options=options, files=digests, directories=tuple(sorted(directories)))
    if system.files.get(record_path(daemon)) != digest(to_text(after)):
        steps.append(Write(record_path(daemon), to_text(after)))
    if system.live and not system.user:
        steps.append(Run(("systemd-sysusers", user_path(daemon))))
    if system.live and any(
        isinstance(step, Write) and step.path == unit_path(daemon) for step in steps
    ):
        steps.append(Run(("systemctl", "daemon-reload")))
    return steps


def uninstall_steps(
    daemon: Daemon, record: Record, system: SystemState, *, purge: bool
) -> list[Step]:
    """Steps that stop the daemon and remove its installation; with `purge` also its state and files
    changed by hand."""
    steps: list[Step] = []
    unit = unit_path(daemon)
    if system.live and unit in system.files:
        steps.append(Run(("systemctl", "disable", "--now", f"{daemon.unit}.service")))
    elif enabled_path(daemon) in system.files:
        steps.append(Remove(enabled_path(daemon)))
    left = {}
    for path, recorded in record.files.items():
        present_digest = system.files.get(path)
        if present_digest is not None and (present_digest == recorded or purge):
            steps.append(Remove(path))
        elif present_digest is not None:
            steps.append(Leave(path, "it was changed by hand; --purge removes it"))
            left[path] = recorded
    if system.live and Remove(unit) in steps:
        steps.append(Run(("systemctl", "daemon-reload")))
    if daemon is Daemon.AGENT and JOINED in system.directories:
        steps.append(
            RemoveDirectory(JOINED, whole=True)
            if purge
            else Leave(JOINED, "its certificate; --purge removes it")
        )
    keeps_state = state_directory(daemon) in system.directories and not purge
    steps += _state_steps(daemon, record, system, keeps_state)
    if drop_ins(daemon) in system.directories:
        steps.append(Leave(drop_ins(daemon), "it is not of edgectl install"))
    remaining = [*left, record_path(daemon)] if left or keeps_state else []
    in_use = tuple(
        path
        for path in record.directories
        if any(file.startswith(f"{path}/") for file in remaining)
    )
    if remaining:
        # State for the next run.
        content = to_text(replace(record, files=left, directories=in_use))
        if system.files.get(record_path(daemon)) != digest(content):
            steps.append(Write(record_path(daemon), content))
    else:
        steps.append(Remove(record_path(daemon)))
    return steps + [
        RemoveDirectory(path) for path in reversed(record.directories) if path not in in_use
    ]


def _state_steps(daemon: Daemon, record: Record, system: SystemState, keeps: bool) -> list[Step]:
    """Keep the user while it has files: the system might assign its number to the next user."""
    state = state_directory(daemon)
    if keeps:
        return [Leave(state, "its state; --purge removes it, and the user whom it belongs to")]
    steps: list[Step] = [RemoveDirectory(state, whole=True)] if state in system.directories else []
    if record.user and system.user:
        command = ("userdel", daemon.unit)
        why = f"--root is not the machine that runs; there: {' '.join(command)}"
        steps.append(Run(command) if system.live else Leave(f"user {daemon.unit}", why))
    return steps


def digest(content: str | bytes) -> str:
    """The sha256 in hexadecimal."""
    return sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def to_text(record: Record) -> str:
    """A record as JSON, the same text for equal records."""
    return json.dumps(OWN.write(Record, record), indent=2, sort_keys=True) + "\n"


def from_text(text: str, path: str) -> Record:
    """The record of a JSON text. Raises DataLossError naming `path` for a text that `to_text` did
    not make."""
    try:
        return OWN.from_text(Record, text)
    except InvalidArgumentError:
        raise DataLossError(
            f"{path} is damaged: remove it and install again, to have a new one",
            field="root",
            reason="RECORD",
        ) from None
