"""The lock of everything that `make setup` installs: constraints.lock, exact versions with the
hashes of their files.

    python -m tools.lock
        as of the date in the lock: the same lock again, with what pyproject.toml changed
    python -m tools.lock --upgrade
        the newest versions that pyproject.toml allows
    python -m tools.lock --clients
        only tests/clients/requirements.txt: what `make clients` installs
    python -m tools.lock --wheels
        only tools/wheels.txt: what `make wheels` builds with
    python -m tools.lock --docs
        only tools/docs.txt: what `make docs` builds the documents' site with
    python -m tools.lock --check
        exits 1 when lock and pyproject.toml disagree; needs no network

`make lock` runs the first and, with ARGS, the next four; `make check` runs the last.

uv resolves once for all Pythons and platforms, then looks at each of `TARGETS` whether all wheels
are there: `make setup` builds nothing that it has downloaded. The index is uv's (UV_DEFAULT_INDEX),
else the one that pip is configured for; it must list all files of a version, and when they were
uploaded. An index with other builds of torch (`TORCH_INDEX_URL`, as for `make setup`) adds the
hashes of those, which stay in the lock while torch's version does.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints.lock"
CLIENTS = ROOT / "tests" / "clients" / "requirements.in"
WHEELS = ROOT / "tools" / "wheels.in"
DOCS = ROOT / "tools" / "docs.in"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# The wheels of llguidance need this C library, the version of Ubuntu 20.04 and JetPack 5; the
# wheels of torch need 2.28.
TARGETS = tuple(
    (python, f"{machine}-manylinux_2_31") for python in PYTHONS for machine in ("x86_64", "aarch64")
)
# An entry stays when it may be installed on one of these.
MACHINES = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))

_HEADER = (
    "# What `make setup` installs: exact versions, and the hashes of all their files. Written by "
    "`make lock`; do not edit.\n"
    "# No file is newer than {newest}.\n"
)
_NEWEST = re.compile(r"^# No file is newer than (\S+)\.$", re.M)
_ENTRY = re.compile(r"([a-z0-9-]+)==([\w.+!]+)(?: ; (.+?))? \\")
_HASH = re.compile(r"    --hash=(sha256:[0-9a-f]{64})( \\)?")
_VIA = re.compile(r"    # via (.+)")


@dataclass(frozen=True)
class Locked:
    """One package of the lock."""

    name: str
    version: str
    marker: str  # The condition of its installation; "" is everywhere
    hashes: tuple[str, ...]  # of every file of this version, "sha256:..."
    via: tuple[str, ...]  # the packages that require it; "pyproject.toml" is the project itself


class LockError(Exception):
    """A lock cannot be made or read; the text gives the remedy."""


def read_lock(text: str) -> dict[str, Locked]:
    """The lock's packages by name. Raises LockError for a line that no lock has."""
    entries: dict[str, Locked] = {}
    current: Locked | None = None
    open_entry = False  # a line that continues in the next one
    for number, line in enumerate(text.splitlines(), 1):
        if open_entry and current and (match := _HASH.fullmatch(line)):
            current = replace(current, hashes=(*current.hashes, match[1]))
            open_entry = bool(match[2])
        elif not open_entry and current and not current.via and (match := _VIA.fullmatch(line)):
            via = (
                re.sub(r"edgeshard \((pyproject\.toml).*\)", r"\1", name)
                for name in match[1].split(", ")
            )
            # the project once, whatever sections ask
            current = replace(current, via=tuple(dict.fromkeys(via)))
        elif not open_entry and (match := _ENTRY.fullmatch(line)) and match[1] not in entries:
            current = Locked(match[1], match[2], match[3] or "", (), ())
            open_entry = True
        elif current or not line.startswith("#"):
            raise LockError(
                f"constraints.lock line {number}: {line!r} does not belong there; run `make lock`"
            )
        if current:
            entries[current.name] = current
    if open_entry:
        raise LockError("constraints.lock ends within an entry; run `make lock`")
    return entries


def write_lock(entries: Iterable[Locked], newest: str) -> str:
    """The text that `read_lock` reads."""
    lines = [_HEADER.format(newest=newest)]
    for entry in sorted(entries, key=lambda entry: entry.name):
        marker = f" ; {entry.marker}" if entry.marker else ""
        hashes = " \\\n".join(f"    --hash={hash_}" for hash_ in sorted(entry.hashes))
        lines.append(
            f"{entry.name}=={entry.version}{marker} \\\n{hashes}\n    # via "
            f"{', '.join(entry.via)}\n"
        )
    return "".join(lines)


def requirements(project: dict[str, Any], *sections: str) -> list[Requirement]:
    """The requirements of pyproject.toml in these sections ("build", "dependencies", an extra, a
    group), without itself.
    """
    found: list[str] = []
    for section in sections:
        if section == "build":
            found += project["build-system"]["requires"]
        elif section == "dependencies":
            found += project["project"]["dependencies"]
        elif section in project["dependency-groups"]:
            found += project["dependency-groups"][section]
        else:
            found += project["project"]["optional-dependencies"][section]
    return [
        wanted for text in found if (wanted := Requirement(text)).name != project["project"]["name"]
    ]


def all_sections(project: dict[str, Any]) -> tuple[str, ...]:
    return (
        "build",
        "dependencies",
        *project["project"]["optional-dependencies"],
        *project["dependency-groups"],
    )


def problems(project: dict[str, Any], text: str) -> list[str]:
    """The differences between the lock and pyproject.toml."""
    try:
        entries = read_lock(text)
    except LockError as error:
        return [str(error)]
    found = (
        []
        if _NEWEST.search(text)
        else ["constraints.lock does not say how new its files are; run `make lock`"]
    )
    for wanted in requirements(project, *all_sections(project)):
        entry = entries.get(canonicalize_name(wanted.name))
        if entry is None:
            found.append(
                f"constraints.lock lacks {wanted.name}, which pyproject.toml asks for; run `make "
                "lock`"
            )
        elif not wanted.specifier.contains(entry.version, prereleases=True):
            found.append(
                f"constraints.lock has {entry.name} {entry.version}, pyproject.toml {wanted}; run "
                "`make lock`"
            )
    for entry in entries.values():
        strangers = [name for name in entry.via if name != "pyproject.toml" and name not in entries]
        if not entry.via or strangers:
            found.append(f"constraints.lock: nobody in it asks for {entry.name}; run `make lock`")
    return found


def installable(marker: str) -> bool:
    """Whether the marker holds on any of the machines that the lock is for."""
    environments = (
        {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "sys_platform": system,
            "platform_system": system.capitalize(),
            "platform_machine": machine,
            "os_name": "posix",
        }
        for python in PYTHONS
        for system, machine in MACHINES
    )
    return not marker or any(Marker(marker).evaluate(environment) for environment in environments)


def resolve(newest: str) -> dict[str, Locked]:
    """The packages that pyproject.toml resolves to, by files that were uploaded before `newest`."""
    options = ("--all-extras", "--group", "checkout", "--group", "dev", "--exclude-newer", newest)
    text = _compile(
        "pyproject.toml",
        "--universal",
        "--python-version",
        PYTHONS[0],
        "--fork-strategy",
        "fewest",
        *options,
    )
    entries = read_lock(text)
    return {name: entry for name, entry in entries.items() if installable(entry.marker)}


def torch_builds(version: str, index: str) -> set[str]:
    """The hashes of torch's files in an index of its own, whatever build they are."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "torch.in"
        wanted.write_text(f"torch=={version}\n")
        text = _compile(
            str(wanted),
            "--universal",
            "--python-version",
            PYTHONS[0],
            "--no-deps",
            "--default-index",
            index,
        )
    return set(re.findall(r"--hash=(sha256:[0-9a-f]{64})", text))


def check_wheels(path: Path) -> None:
    """Raises LockError if a target has no wheel of a locked version."""
    for python, platform in TARGETS:
        _compile(str(path), "--no-deps", "--python-version", python, "--python-platform", platform)


def _compile(*arguments: str, wheels: Sequence[str] = ("--only-binary", ":all:")) -> str:
    uv, environment = find_uv()
    options = ("--generate-hashes", *wheels, "--no-header", "--annotation-style", "line")
    command = (str(uv), "pip", "compile", "--quiet", "--no-progress", *options, *arguments)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise LockError(
            f"`uv {' '.join(command[1:])}` failed; what it says is above. --upgrade allows newer "
            "files"
        )
    return done.stdout


def find_uv() -> tuple[Path, dict[str, str]]:
    """uv, and the environment in which it uses pip's index. Raises LockError if it is not
    installed."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        raise LockError(
            "uv is not installed: run `make setup`; EDGESHARD_UNLOCKED=1 if the lock does not let "
            "it"
        )
    environment = dict(os.environ)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    configured = subprocess.run(
        (*pip, "config", "get", "global.index-url"), capture_output=True, text=True
    )
    if configured.returncode == 0:
        environment.setdefault("UV_DEFAULT_INDEX", configured.stdout.strip())
    return uv, environment


def lock_others(wanted: Path) -> str:
    """The packages of another environment than .venv; some are only available as source. As new as
    the lock of EdgeShard itself.
    """
    newest = _NEWEST.search(LOCK.read_text())
    limits = ("--exclude-newer", newest[1]) if newest else ()
    path = str(wanted.relative_to(ROOT))
    return _compile(path, "--universal", "--python-version", PYTHONS[0], *limits, wheels=())


def make_lock(*, upgrade: bool) -> str:
    before = LOCK.read_text() if LOCK.exists() else ""
    known = _NEWEST.search(before)
    newest = (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT00:00:00Z}"
        if upgrade or not known
        else known[1]
    )
    entries = resolve(newest)
    torch = entries["torch"]
    builds: set[str] = set()
    old = read_lock(before).get("torch") if known else None
    if old and old.version == torch.version:
        builds |= set(old.hashes)
    if index := os.environ.get("TORCH_INDEX_URL"):
        builds |= torch_builds(torch.version, index)
    if builds <= set(torch.hashes):
        print(
            "lock: no hashes of torch's CPU builds; set TORCH_INDEX_URL to their index to add them",
            file=sys.stderr,
        )
    entries["torch"] = replace(torch, hashes=tuple(builds | set(torch.hashes)))
    return write_lock(entries.values(), newest)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lock", description="Write constraints.lock.")
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows"
    )
    parser.add_argument(
        "--clients", action="store_true", help="only lock the clients that tests use"
    )
    parser.add_argument(
        "--wheels", action="store_true", help="only lock what wheels are built with"
    )
    parser.add_argument(
        "--docs", action="store_true", help="lock only the builder of the documents' site"
    )
    parser.add_argument(
        "--check", action="store_true", help="only say whether the lock fits pyproject.toml"
    )
    options = parser.parse_args(arguments)
    try:
        for asked, wanted in (
            (options.clients, CLIENTS),
            (options.wheels, WHEELS),
            (options.docs, DOCS),
        ):
            if asked:
                wanted.with_suffix(".txt").write_text(lock_others(wanted))
                return 0
        if not options.check:
            text = make_lock(upgrade=options.upgrade)
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder) / "made.in"
                made.write_text(text)
                check_wheels(made)
            LOCK.write_text(text)
        found = problems(tomllib.loads((ROOT / "pyproject.toml").read_text()), LOCK.read_text())
    except LockError as error:
        found = [str(error)]
    for problem in found:
        print(f"lock: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
