"""A wheel folder: EdgeShard and all that it needs on one kind of machine, to be installed without a
network.

    python -m tools.release.wheel_folder --target x86_64-py311-cpu
        into dist/folders/x86_64-py311-cpu

A target is a platform (x86_64, aarch64), a Python (py311, py312, py313) and an accelerator (cpu,
cuda). The folder has wheels, `requirements.txt` with the exact version and the hash of each, pip
itself (a Debian Python has none), and `SHA256SUMS` of all files. It also has `install.sh` if the
checkout has one. EdgeShard's own wheel is that of dist/wheels for the platform, or `--wheel`.

The dependencies are read from the wheels' own metadata, for the target and not for this machine.
Every version and hash comes from the lock. The wheel of torch comes from TORCH_INDEX_URL if that is
set, else from pip's configured index. The build for `cpu` must not ask for CUDA, and nothing of the
kind is fetched before that is known.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.lock import LOCK, ROOT, Locked, read_lock
from tools.release.archives import CHECKSUMS, ReleaseError, checksums, sha256_of, size_text, version

WHEELS = ROOT / "dist" / "wheels"
FOLDERS = ROOT / "dist" / "folders"
INSTALL_SCRIPT = ROOT / "deploy" / "install.sh"
REQUIREMENTS = "requirements.txt"
# The newest C library that a wheel may ask for: that of Debian 11, Ubuntu 20.04 and JetPack 5, as
# in the lock.
_GLIBC = (2, 31)
_OLD_NAMES = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
_TARGET = re.compile(r"(x86_64|aarch64)-py3(11|12|13)-(cpu|cuda)")
_CUDA = ("nvidia-c", "cuda-", "triton")


@dataclass(frozen=True)
class Target:
    """A kind of machine that a folder is for."""

    machine: str  # x86_64 or aarch64
    python: str  # 3.11
    accelerator: str  # cpu or cuda

    @property
    def name(self) -> str:
        return f"{self.machine}-py{self.python.replace('.', '')}-{self.accelerator}"

    @property
    def architecture(self) -> str:
        """The platform as Debian and containers call it."""
        return {"x86_64": "amd64", "aarch64": "arm64"}[self.machine]

    @property
    def platforms(self) -> tuple[str, ...]:
        """Names of platforms whose wheels run there, the preferred ones first."""
        versions = [(_GLIBC[0], minor) for minor in range(_GLIBC[1], 4, -1)]
        names = [
            (f"manylinux_{major}_{minor}", _OLD_NAMES.get((major, minor)))
            for major, minor in versions
        ]
        # a wheel that was built for the building machine's own C library
        names.append(("linux", None))
        return tuple(f"{name}_{self.machine}" for pair in names for name in pair if name)

    @property
    def environment(self) -> dict[str, str]:
        """The values that markers of requirements use."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


@dataclass(frozen=True)
class Chosen:
    """A file that pip would take for a package."""

    name: str
    version: str  # with the label of a build, "2.13.0+cpu"
    sha256: str
    requires: tuple[str, ...]


def parse_target(text: str) -> Target:
    """Raises ReleaseError if the text is no target."""
    match = _TARGET.fullmatch(text)
    if match is None:
        raise ReleaseError(
            f"--target {text!r} must be PLATFORM-PYTHON-ACCELERATOR, such as x86_64-py311-cpu or "
            "aarch64-py313-cuda"
        )
    return Target(match[1], f"3.{match[2]}", match[3])


def target_of_this_machine() -> str:
    return f"{platform.machine()}-py{sys.version_info.major}{sys.version_info.minor}-cpu"


def own_wheel(target: Target, given: Path | None = None) -> Path:
    """EdgeShard's wheel for the target. Raises ReleaseError if there is none, or more than one."""
    tags = {*cpython_tags((3, int(target.python[2:])), platforms=target.platforms)}
    tags |= {*compatible_tags((3, int(target.python[2:])), platforms=target.platforms)}
    candidates = [given] if given else sorted(WHEELS.glob("edgeshard-*.whl"))
    names = {path: parse_wheel_filename(path.name) for path in candidates}
    fitting = [
        path
        for path, (_, number, _, own) in names.items()
        if own & tags and str(number) == version()
    ]
    if len(fitting) != 1:
        where = str(given) if given else "dist/wheels"
        raise ReleaseError(
            f"{where} has {len(fitting)} wheels of EdgeShard {version()} for {target.machine}, not "
            "one: empty it and "
            "run `make wheels`, or name the wheel with --wheel"
        )
    return fitting[0]


def requirements_of(
    metadata: Sequence[str], extras: Iterable[str], target: Target
) -> list[Requirement]:
    """Which of a package's requirements hold on the target, with these of its extras."""
    environments = [target.environment | {"extra": extra} for extra in ("", *extras)]
    found = [Requirement(text) for text in metadata]
    return [
        wanted
        for wanted in found
        if wanted.marker is None
        or any(wanted.marker.evaluate(environment) for environment in environments)
    ]


def choose(own: Sequence[str], entries: dict[str, Locked], target: Target) -> dict[str, Chosen]:
    """The files that EdgeShard with the extra `all`, and pip, come to. `own` are the requirements
    of its wheel.

    Raises ReleaseError if the lock lacks a package, or if the build of torch is not the target's.
    """
    chosen: dict[str, Chosen] = {}
    asked: set[tuple[str, str]] = set()
    following = [Requirement("edgeshard[all]"), Requirement("pip")]
    while following:
        pairs = {pair for wanted in following for pair in _pairs(wanted)}
        asked |= pairs
        names = {name for name, _ in pairs} - chosen.keys() - {"edgeshard"}
        chosen |= {found.name: found for found in _look(sorted(names), entries, target)}
        following = []
        for name, extra in sorted(pairs):
            metadata = own if name == "edgeshard" else chosen[name].requires
            following += requirements_of(metadata, (extra,), target)
        following = [wanted for wanted in following if not _pairs(wanted) <= asked]
    return chosen


def _pairs(wanted: Requirement) -> set[tuple[str, str]]:
    """The required package with no extra, and with each of the requirement's extras."""
    name = str(canonicalize_name(wanted.name))
    return {(name, extra) for extra in ("", *wanted.extras)}


def _look(names: Sequence[str], entries: dict[str, Locked], target: Target) -> list[Chosen]:
    absent = [name for name in names if name not in entries]
    if absent:
        raise ReleaseError(f"constraints.lock lacks {', '.join(absent)}; run `make lock`")
    found = _report(
        [f"{name}=={entries[name].version}" for name in names if name != "torch"], target
    )
    if "torch" in names:
        # A `cpu` target takes the build that pip leads to, whatever its label; a `cuda` target
        # takes the one without a label.
        version = ("===" if target.accelerator == "cuda" else "==") + entries["torch"].version
        index = os.environ.get("TORCH_INDEX_URL", "")
        (torch,) = _report([f"torch{version}"], target, *(("--index-url", index) if index else ()))
        has_cuda = any(text.startswith(_CUDA) for text in torch.requires)
        if has_cuda != (target.accelerator == "cuda"):
            raise ReleaseError(
                f"pip leads to torch {torch.version} {'with' if has_cuda else 'without'} CUDA for "
                f"{target.name}: set "
                f"TORCH_INDEX_URL to an index of torch's {target.accelerator} builds, or choose "
                "another target"
            )
        found.append(torch)
    for file in found:
        if f"sha256:{file.sha256}" not in entries[file.name].hashes:
            raise ReleaseError(
                f"the file of {file.name} {file.version} that pip leads to is none of the lock's: "
                "find out why before "
                "you trust it; another build of torch is locked by TORCH_INDEX_URL=... make lock"
            )
    return found


def _report(wanted: Sequence[str], target: Target, *options: str) -> list[Chosen]:
    if not wanted:
        return []
    with tempfile.TemporaryDirectory() as nowhere:
        look = (
            "install",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--target",
            nowhere,
            "--report",
            "-",
        )
        text = run_pip(*look, *files_for(target), *options, *wanted)
    found = []
    for item in json.loads(text)["install"]:
        data = item["metadata"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        name = str(canonicalize_name(data["name"]))
        found.append(Chosen(name, data["version"], digest, tuple(data.get("requires_dist", ()))))
    return found


def files_for(target: Target) -> list[str]:
    """The options with which pip takes files of the target and not of this machine."""
    platforms = [word for name in target.platforms for word in ("--platform", name)]
    return [
        "--implementation",
        "cp",
        "--python-version",
        target.python,
        "--only-binary",
        ":all:",
        *platforms,
    ]


def run_pip(*arguments: str) -> str:
    """The output of pip on stdout. Raises ReleaseError if it fails."""
    command = (sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments)
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise ReleaseError(
            f"pip found no wheels of `{arguments[-1]}` or what goes with it; its words are above"
        )
    return done.stdout


def headers_of(wheel: Path) -> Message:
    """A wheel's own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (
            name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
        )
        return HeaderParser().parsestr(archive.read(name).decode())


def requirements_text(wheel: Path, chosen: Iterable[Chosen]) -> str:
    """requirements.txt: exact versions and the hash of the one file of each, by name."""
    rows = [("edgeshard[all]", version(), sha256_of(wheel))]
    rows += [(file.name, file.version, file.sha256) for file in chosen]
    return "".join(
        f"{name}=={version} \\\n    --hash=sha256:{digest}\n"
        for name, version, digest in sorted(rows)
    )


def make_folder(target: Target, wheel: Path, into: Path) -> None:
    """Fill `into` with the target's folder, replacing its content. Raises ReleaseError."""
    chosen = choose(
        headers_of(wheel).get_all("Requires-Dist", []), read_lock(LOCK.read_text()), target
    )
    staged = into.with_name(f".{into.name}.new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    shutil.copyfile(wheel, staged / wheel.name)
    (staged / REQUIREMENTS).write_text(requirements_text(wheel, chosen.values()))
    index = os.environ.get("TORCH_INDEX_URL", "")
    sources = ["--find-links", str(staged), *(("--extra-index-url", index) if index else ())]
    held = ("download", "--no-deps", "--require-hashes", "--dest", str(staged))
    run_pip(*held, *sources, *files_for(target), "--requirement", str(staged / REQUIREMENTS))
    if INSTALL_SCRIPT.exists():
        shutil.copy(INSTALL_SCRIPT, staged / INSTALL_SCRIPT.name)
    (staged / CHECKSUMS).write_text(checksums(staged))
    shutil.rmtree(into, ignore_errors=True)
    staged.rename(into)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        action="append",
        help="PLATFORM-PYTHON-ACCELERATOR, several times; otherwise this machine's for cpu",
    )
    parser.add_argument(
        "--wheel", type=Path, help="EdgeShard's own wheel, in place of the one in dist/wheels"
    )


def make_folders(options: argparse.Namespace) -> list[tuple[Target, Path]]:
    """Make the folders that the options select, and print each with its size."""
    made = []
    for text in options.target or [target_of_this_machine()]:
        target = parse_target(text)
        folder = FOLDERS / target.name
        make_folder(target, own_wheel(target, options.wheel), folder)
        print(
            f"{folder.relative_to(ROOT)}: {len(list(folder.glob('*.whl')))} wheels, "
            f"{size_text(folder)}",
            flush=True,
        )
        made.append((target, folder))
    return made


def make_of_folders(
    program: str, options: argparse.Namespace, make: Callable[[Path, Target, Path], Path]
) -> int:
    """Make one file in dist from each folder that the options select, and print it with its size.
    Returns the exit code: 1 after an error, which is printed."""
    try:
        for target, folder in make_folders(options):
            made = make(folder, target, ROOT / "dist")
            print(f"{made.relative_to(ROOT)}: {size_text(made)}", flush=True)
    except ReleaseError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="wheel_folder", description="Gather the wheels of one kind of machine."
    )
    add_options(parser)
    try:
        make_folders(parser.parse_args(arguments))
    except ReleaseError as error:
        print(f"wheel_folder: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
