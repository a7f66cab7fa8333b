"""What `edgectl install` and `edgectl uninstall` do to a machine: steps as values. Pure; the command acts
(`edgeshard.cli.commands.site.install`).

An installation keeps a record of what it made, in a file beside the daemon's configuration. A file that is not as the
record says was changed by hand, and is neither written nor removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.process.systemd_units import Daemon, unit_text

CONFIGURATION = "/etc/edgeshard"
JOINED = f"{CONFIGURATION}/agent-pki"
"""Where `edgectl join` keeps a node's certificate for its service."""
_CONFIGURED = {
    Daemon.AGENT: ("name", "coordinator", "listen", "memory", "device", "advertise"),
    Daemon.COORDINATOR: ("listen", "enrol_listen"),
}
"""Options that stand in a daemon's configuration, in this order."""
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What ProtectHome= and PrivateTmp= keep from a unit."""


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator chooses; `name` and `coordinator` are an agent's.

    `programs` is the directory of the daemons, `credentials` that of the TLS files ("" without). `memory`, `device`
    and `advertise` are an agent's, too; `ca_key` and `enrol_listen`, with which a site makes certificates, are a
    coordinator's.
    """

    listen: str
    programs: str
    name: str = ""
    coordinator: str = ""
    credentials: str = ""
    memory: str = ""
    device: str = ""
    advertise: str = ""
    ca_key: str = ""
    enrol_listen: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What was made: digests of files by path, directories (the outer ones first), and whether the user was."""

    options: Options
    files: Mapping[str, str] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    user: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What is there of `interesting` paths: digests of files and links, directories; whether the user exists.

    `shared` are directories that the record of the other daemon has; `live` says that it is the machine that runs.
    """

    files: Mapping[str, str]
    directories: frozenset[str]
    user: bool
    shared: frozenset[str] = frozenset()
    live: bool = False


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: str


@dataclass(frozen=True, slots=True)
class Write:
    """A file of mode 0644. Nothing secret is written."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class Remove:
    path: str


@dataclass(frozen=True, slots=True)
class RemoveDirectory:
    """Only where it is empty, unless `whole`."""

    path: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing is done; said to the operator."""

    what: str
    why: str


Step = MakeDirectory | Write | Remove | RemoveDirectory | Run | Leave


def config_path(daemon: Daemon) -> str:
    return f"{CONFIGURATION}/{daemon}.toml"


def record_path(daemon: Daemon) -> str:
    return f"{CONFIGURATION}/{daemon}.installed.json"


def state_directory(daemon: Daemon) -> str:
    return f"/var/lib/{daemon.unit}"


def unit_path(daemon: Daemon) -> str:
    return f"/etc/systemd/system/{daemon.unit}.service"


def enabled_path(daemon: Daemon) -> str:
    """The link that `systemctl enable` makes."""
    return f"/etc/systemd/system/multi-user.target.wants/{daemon.unit}.service"


def user_path(daemon: Daemon) -> str:
    return f"/etc/sysusers.d/{daemon.unit}.conf"


def drop_ins(daemon: Daemon) -> str:
    """What `systemctl edit` makes; never ours."""
    return f"{unit_path(daemon)}.d"


def files(daemon: Daemon, options: Options) -> dict[str, str]:
    """The files of an installation, by path. Raises InvalidArgumentError for programs that no unit can run."""
    check_visible(options.programs)
    paths = {"bin": options.programs, "credentials": options.credentials or "/", "ca-key": options.ca_key or "/"}
    for name, text in paths.items():
        # Characters that mean something to systemd in a command or a path.
        if not text.startswith("/") or set(text) & set("\"'\\%$:; \t\n"):
            raise InvalidArgumentError(
                f"--{name} {text!r} must be an absolute path without spaces or any of \"'\\%$:;", field=name
            )
    values = {key: getattr(options, key) for key in _CONFIGURED[daemon]}
    config = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value)
    return {
        user_path(daemon): f'u {daemon.unit} - "EdgeShard {daemon}" {state_directory(daemon)}\n',
        config_path(daemon): f"# Every option of {daemon.unit} --help may stand here.\n[{daemon}]\n{config}",
        unit_path(daemon): unit_text(
            daemon, f"{options.programs}/{daemon.unit}", config_path(daemon), options.credentials, options.ca_key
        ),
    }


def check_visible(path: str) -> None:
    """Raise InvalidArgumentError for a program that no unit could run."""
    for hidden in _HIDDEN:
        if PurePosixPath(path).is_relative_to(hidden):
            raise InvalidArgumentError(
                f"{path} cannot be run by the unit, which sees nothing of {hidden}: install EdgeShard elsewhere, such "
                "as in /opt/edgeshard, or give --bin DIR",
                field="bin",
            )


def interesting(daemon: Daemon, options: Options, record: Record | None) -> set[str]:
    """The paths whose state decides on the steps."""
    paths = {*files(daemon, options), *(record.files if record else ()), record_path(daemon), enabled_path(daemon)}
    paths |= {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    return paths | {state_directory(daemon), drop_ins(daemon), JOINED}


def install_steps(daemon: Daemon, options: Options, record: Record | None, found: Found) -> list[Step]:
    """Lay out what is missing, bring up to date what was not changed by hand. A second time there is nothing to do."""
    before = record or Record(options, user=not found.user)
    wanted = files(daemon, options)
    parents = {str(parent) for path in wanted for parent in PurePosixPath(path).parents}
    missing = sorted(parents - found.directories)
    steps: list[Step] = [MakeDirectory(path) for path in missing]
    made = {*before.directories, *missing, *(found.shared & parents)}
    digests = dict(before.files)
    for path, content in wanted.items():
        seen, new = found.files.get(path), digest(content)
        if seen not in (None, new, before.files.get(path)):
            steps.append(Leave(path, "it was changed by hand; remove it to have it laid out again"))
            continue
        digests[path] = new
        if seen != new:
            steps.append(Write(path, content))
    after = replace(before, options=options, files=digests, directories=tuple(sorted(made)))
    if found.files.get(record_path(daemon)) != digest(to_text(after)):
        steps.append(Write(record_path(daemon), to_text(after)))
    if found.live and not found.user:
        steps.append(Run(("systemd-sysusers", user_path(daemon))))
    if found.live and any(isinstance(step, Write) and step.path == unit_path(daemon) for step in steps):
        steps.append(Run(("systemctl", "daemon-reload")))
    return steps


def uninstall_steps(daemon: Daemon, record: Record, found: Found, *, purge: bool) -> list[Step]:
    """Stop it and remove what its installation made; with `purge` also its state, and files changed by hand."""
    steps: list[Step] = []
    unit = unit_path(daemon)
    if found.live and unit in found.files:
        steps.append(Run(("systemctl", "disable", "--now", f"{daemon.unit}.service")))
    elif enabled_path(daemon) in found.files:
        steps.append(Remove(enabled_path(daemon)))
    left = {}
    for path, recorded in record.files.items():
        seen = found.files.get(path)
        if seen is not None and (seen == recorded or purge):
            steps.append(Remove(path))
        elif seen is not None:
            steps.append(Leave(path, "it was changed by hand; --purge removes it"))
            left[path] = recorded
    if found.live and Remove(unit) in steps:
        steps.append(Run(("systemctl", "daemon-reload")))
    if daemon is Daemon.AGENT and JOINED in found.directories:
        steps.append(
            RemoveDirectory(JOINED, whole=True) if purge else Leave(JOINED, "its certificate; --purge removes it")
        )
    keeps_state = state_directory(daemon) in found.directories and not purge
    steps += _state_steps(daemon, record, found, keeps_state)
    if drop_ins(daemon) in found.directories:
        steps.append(Leave(drop_ins(daemon), "it is not of edgectl install"))
    if left or keeps_state:
        # What another run needs to know.
        content = to_text(replace(record, files=left))
        if found.files.get(record_path(daemon)) != digest(content):
            steps.append(Write(record_path(daemon), content))
    else:
        steps.append(Remove(record_path(daemon)))
        steps += [RemoveDirectory(path) for path in reversed(record.directories)]
    return steps


def _state_steps(daemon: Daemon, record: Record, found: Found, keeps: bool) -> list[Step]:
    """The user stays as long as there are files of its: the next user of the system might get its number."""
    state = state_directory(daemon)
    if keeps:
        return [Leave(state, "its state; --purge removes it, and the user whom it belongs to")]
    steps: list[Step] = [RemoveDirectory(state, whole=True)] if state in found.directories else []
    if record.user and found.user:
        command = ("userdel", daemon.unit)
        why = f"--root is not the machine that runs; there: {' '.join(command)}"
        steps.append(Run(command) if found.live else Leave(f"user {daemon.unit}", why))
    return steps


def digest(content: str | bytes) -> str:
    return sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def to_text(record: Record) -> str:
    return json.dumps(asdict(record), indent=2, sort_keys=True) + "\n"


def from_text(text: str, path: str) -> Record:
    """Raises DataLossError naming `path`."""
    try:
        values: dict[str, Any] = json.loads(text)
        return Record(
            Options(**values["options"]), dict(values["files"]), tuple(values["directories"]), bool(values["user"])
        )
    except (ValueError, KeyError, TypeError):
        raise DataLossError(
            f"{path} is damaged: remove it and install again, to have a new one", field="root", reason="RECORD"
        ) from None
