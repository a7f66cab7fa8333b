"""Bare machines of Debian 12: each a root of its own that systemd boots, in a network namespace."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.system.netns.namespaces import Network, why_impossible

RELEASE = "bookworm"
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "libstdc++6", "iproute2", "procps")
"""Packages that Debian's installer adds to its smallest set, as far as EdgeShard may need them."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_S = 60.0
COMMAND_S = 900.0
_VOLATILE = ("dev", "proc", "run", "sys", "tmp", "mnt", "var/log/journal")
"""Folders of a running machine, and the journal's lines."""


def why_no_machines() -> str | None:
    """The reason why this machine cannot boot others, None if it can."""
    missing = [
        tool for tool in ("mmdebstrap", "systemd-nspawn", "nsenter") if shutil.which(tool) is None
    ]
    if missing:
        return (
            f"{' and '.join(missing)} not found: install mmdebstrap, systemd-container and "
            "util-linux"
        )
    return why_impossible()


def make_root(archive: Path, packages: Sequence[str] = PACKAGES) -> None:
    """Write the root of a bare Debian 12 into `archive`, by apt. Raises CalledProcessError."""
    command = (
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(packages)}",
        RELEASE,
        str(archive),
    )
    subprocess.run(command, check=True, capture_output=True, timeout=900)


@dataclass
class Machine:
    """A booted machine. `leader` is the number of its process 1 on this machine."""

    name: str
    root: Path
    address: str
    leader: int

    def enter(self, line: str) -> list[str]:
        """The command line that runs `line` by the machine's shell, as root in /root."""
        inside = (
            "env",
            "-i",
            f"PATH={PATH}",
            "HOME=/root",
            "LANG=C.UTF-8",
            "sh",
            "-ec",
            f"cd /root\n{line}",
        )
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd")
        return ["nsenter", "--target", str(self.leader), *spaces, *inside]

    def run(self, line: str, code: int = 0) -> str:
        """The output of a line, on both streams. Fails if it ends with another code."""
        done = subprocess.run(
            self.enter(line),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == code, f"{self.name}# {line}\n{done.stdout}"
        return done.stdout

    def waits_for(self, line: str, limit_s: float = 120.0) -> str:
        """The output of a line once it ends with 0."""
        deadline = time.monotonic() + limit_s
        while True:
            done = subprocess.run(
                self.enter(line), capture_output=True, text=True, timeout=COMMAND_S
            )
            if done.returncode == 0:
                return done.stdout
            assert time.monotonic() < deadline, f"{self.name}# {line}\n{done.stdout}{done.stderr}"
            time.sleep(0.5)

    def files(self) -> dict[str, str]:
        """The machine's files, by their paths; the value changes with kind, mode, owner or
        content."""
        return dict(_described(self.root))


def _described(root: Path) -> Iterator[tuple[str, str]]:
    for directory, folders, names in os.walk(root):
        inside = os.path.relpath(directory, root)
        folders[:] = [
            name for name in folders if os.path.normpath(f"{inside}/{name}") not in _VOLATILE
        ]
        for name in (*folders, *names):
            path = Path(directory, name)
            about = path.lstat()
            content = ""
            if stat.S_ISREG(about.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(about.st_mode):
                content = str(path.readlink())
            yield (
                f"/{path.relative_to(root)}",
                f"{about.st_mode:o} {about.st_uid}:{about.st_gid} {content}",
            )


@dataclass(frozen=True)
class Difference:
    """The changes between two states of a machine's files: sorted paths."""

    added: list[str]
    removed: list[str]
    changed: list[str]


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> Difference:
    added = sorted(after.keys() - before.keys())
    removed = sorted(before.keys() - after.keys())
    changed = sorted(path for path in before.keys() & after.keys() if before[path] != after[path])
    return Difference(added, removed, changed)


@contextmanager
def machines(
    archive: Path, names: Sequence[str], directory: Path, mounts: Mapping[Path, str]
) -> Iterator[dict[str, Machine]]:
    """Boot machines of these names from the root in `archive`; `mounts` are folders that they may
    read."""
    supervisors: list[subprocess.Popen[bytes]] = []
    with Network(names, None) as network:
        try:
            for name in names:
                supervisors.append(_start(archive, name, directory, mounts, network))
            booted = {}
            for name, supervisor in zip(names, supervisors, strict=True):
                leader = _leader_of(supervisor.pid)
                booted[name] = Machine(name, directory / name, network.address(name), leader)
                booted[name].waits_for("systemctl is-active multi-user.target", BOOT_S)
            yield booted
        finally:
            for supervisor in supervisors:
                _kill(supervisor)


def _kill(supervisor: subprocess.Popen[bytes]) -> None:
    """Kill a machine's process 1, and with it all that runs there, before systemd-nspawn, which
    would leave it."""
    for child in _children(supervisor.pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    supervisor.kill()
    supervisor.wait()


def _start(
    archive: Path, name: str, directory: Path, mounts: Mapping[Path, str], network: Network
) -> subprocess.Popen[bytes]:
    root = directory / name
    root.mkdir()
    subprocess.run(("tar", "-C", str(root), "-xf", str(archive)), check=True)
    (root / "etc" / "hostname").write_text(f"{name}\n")
    own = (
        "--quiet",
        "--boot",
        "--register=no",
        "--keep-unit",
        "--link-journal=no",
        f"--machine={name}",
    )
    space = f"--network-namespace-path=/run/netns/{network.namespace(name)}"
    binds = [f"--bind-ro={folder}:{at}" for folder, at in mounts.items()]
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            ("systemd-nspawn", *own, space, *binds, "--directory", str(root)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _children(process: int) -> list[int]:
    return [
        int(text) for text in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def _leader_of(supervisor: int) -> int:
    """The number of the process 1 that systemd-nspawn started."""
    deadline = time.monotonic() + BOOT_S
    while True:
        for child in _children(supervisor):
            status = Path(f"/proc/{child}/status").read_text()
            if any(
                line.startswith("NSpid:") and line.split()[-1] == "1"
                for line in status.splitlines()
            ):
                return child
        assert time.monotonic() < deadline, f"systemd-nspawn {supervisor} started no machine"
        time.sleep(0.1)
