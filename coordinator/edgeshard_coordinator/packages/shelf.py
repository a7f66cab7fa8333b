"""Folders of wheels: their names, machines and content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

INSTALLER, REQUIREMENTS = "install.sh", "requirements.txt"
PROCESSOR = "cpu"
"""The accelerator of a folder that uses none."""
_FOLDER = re.compile(r"(x86_64|aarch64)-py3(\d{1,2})-([a-z0-9]{1,32})")
_OF_PYTHON = re.compile(r"-cp3(\d+)-cp3\1-")
_OF_PLATFORM = re.compile(r"_(x86_64|aarch64)\.whl$")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,254}")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelTarget:
    """A machine that wants wheels: its architecture, its Pythons as `3.11`, the best first, and its
    accelerator."""

    platform: str
    pythons: Sequence[str]
    accelerator: str = PROCESSOR


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of wheels for one platform, one Python (`3.11`) and one accelerator."""

    path: Path
    platform: str
    python: str
    accelerator: str

    @property
    def name(self) -> str:
        return f"{self.platform}-py{self.python.replace('.', '')}-{self.accelerator}"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a folder, its size in bytes, and its sha256 in hexadecimal."""

    name: str
    size: int
    sha256: str


class Shelf:
    """The folders that `--wheels` names. Methods read the disk, and are for a thread."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidArgumentError naming `wheels` for a directory that is none of wheels."""
        self.folders = _folders(directory)
        self._digests: dict[tuple[str, int, int, int], str] = {}

    def folder_for(self, machine: WheelTarget) -> Folder:
        """The folder for machines with an accelerator, or for those without one, whichever the
        machine is; else the other, which works as well. Raises FailedPreconditionError naming what
        there is, and what the machine is."""
        has_accelerator = machine.accelerator != PROCESSOR
        for accelerated in (has_accelerator, not has_accelerator):
            for python in machine.pythons:
                for folder in self.folders:
                    fits = (folder.platform, folder.python) == (machine.platform, python)
                    if fits and (folder.accelerator != PROCESSOR) == accelerated:
                        return folder
        raise FailedPreconditionError(
            f"this site has wheels for {_said(self.folders)}, but this machine is "
            f"{machine.platform[:40]} "
            f"with {_pythons(machine.pythons)}: install a matching Python, or ask the site's "
            "operator for "
            "a matching folder",
            field="platform",
            reason="NO_WHEELS",
        )

    def named(self, name: str) -> Folder:
        """Raises NotFoundError for a name of none."""
        for folder in self.folders:
            if folder.name == name:
                return folder
        raise NotFoundError("the site has no such folder of wheels", field="folder")

    def files(self, folder: Folder) -> tuple[File, ...]:
        """The wheels, the requirements and the script that installs them. A file is hashed again
        once it is another.

        Raises FailedPreconditionError for a folder whose wheels do not match its requirements.
        """
        try:
            requirements = (folder.path / REQUIREMENTS).read_text(
                encoding="utf-8", errors="replace"
            )
            files = [self._file(path) for path in sorted(folder.path.iterdir()) if _is_handed(path)]
        except OSError as error:
            raise FailedPreconditionError(
                f"the site's wheels for {folder.name} cannot be read: {error.strerror}",
                field="wheels",
            ) from None
        for file in files:
            if file.name.endswith(".whl") and f"sha256:{file.sha256}" not in requirements:
                raise FailedPreconditionError(
                    f"{file.name} is not the file that {REQUIREMENTS} of {folder.name} names: the "
                    "site's operator "
                    "makes the folder again, with make wheels",
                    field="wheels",
                    reason="OTHER_WHEEL",
                )
        return tuple(files)

    def _file(self, path: Path) -> File:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        digest = self._digests.get(key)
        if digest is None:
            digest = self._digests[key] = _digest(path)
        return File(path.name, stat.st_size, digest)


def _is_handed(path: Path) -> bool:
    is_package_file = path.suffix == ".whl" or path.name in (INSTALLER, REQUIREMENTS)
    return is_package_file and bool(_FILE.fullmatch(path.name)) and path.is_file()


def _digest(path: Path) -> str:
    hasher = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def _folders(directory: Path) -> tuple[Folder, ...]:
    try:
        within = [
            path
            for path in sorted(directory.iterdir())
            if path.is_dir() and _FOLDER.fullmatch(path.name)
        ]
        folders = [_folder(path) for path in within or [directory]]
    except OSError as error:
        raise InvalidArgumentError(
            f"--wheels {directory}: {error.strerror}", field="wheels"
        ) from None
    return tuple(folders)


def _folder(path: Path) -> Folder:
    """The folder by its name, else by its wheels."""
    names = [item.name for item in path.iterdir()]
    for needed in (INSTALLER, REQUIREMENTS):
        if needed not in names:
            raise InvalidArgumentError(
                f"--wheels {path} has no {needed}: give a folder of wheels, or one that holds such "
                "folders",
                field="wheels",
            )
    named = _FOLDER.fullmatch(path.name)
    if named is not None:
        return Folder(path, named[1], f"3.{named[2]}", named[3])
    wheels = [name for name in names if name.endswith(".whl")]
    platforms = {item[1] for name in wheels if (item := _OF_PLATFORM.search(name))}
    pythons = {f"3.{item[1]}" for name in wheels if (item := _OF_PYTHON.search(name))}
    if len(platforms) != 1 or len(pythons) != 1:
        raise InvalidArgumentError(
            f"--wheels {path}: the names of its wheels give no platform and Python version: name "
            "the "
            "folder like x86_64-py311-cpu",
            field="wheels",
        )
    torch = [name for name in wheels if name.startswith("torch-")]
    accelerated = any(name.startswith("nvidia_cu") for name in wheels) and not any(
        "+cpu" in name for name in torch
    )
    return Folder(path, platforms.pop(), pythons.pop(), "cuda" if accelerated else PROCESSOR)


def _said(folders: Sequence[Folder]) -> str:
    """`x86_64 with Python 3.11 and 3.12, aarch64 with Python 3.13`."""
    platforms = dict.fromkeys(folder.platform for folder in folders)
    return ", ".join(
        f"{platform} with "
        f"{_pythons(dict.fromkeys(one.python for one in folders if one.platform == platform))}"
        for platform in platforms
    )


def _pythons(versions: Iterable[str]) -> str:
    releases = sorted(version[:10] for version in versions)
    return f"Python {' and '.join(releases)}" if releases else "no Python of 3.11 to 3.13"
