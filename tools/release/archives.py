"""Archives that are the same bytes in each run: sorted by name, with one time and one owner. And
checksums."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from tools.lock import ROOT

CHECKSUMS = "SHA256SUMS"


class ReleaseError(Exception):
    """A release file cannot be made; the text gives the remedy."""


@dataclass(frozen=True)
class Entry:
    """A file with its content (or the path of it), a link, or a directory if it has neither."""

    path: str  # relative to the archive's root
    content: bytes | Path | None = None
    mode: int = 0o644
    link: str = ""
    owner: int = 0  # number of the user and of the group


def source_epoch() -> int:
    """The time that everything delivered carries, in s: SOURCE_DATE_EPOCH, else the time of the
    last commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is not None:
        return int(given)
    command = ("git", "log", "-1", "--format=%ct")
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def version() -> str:
    """EdgeShard's version, which only pyproject.toml states."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def write_tar(
    file: IO[bytes] | gzip.GzipFile, entries: Iterable[Entry], epoch: int, prefix: str = ""
) -> None:
    """Write the entries with the directories they lie in, which are root's. `prefix` stands before
    every path."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry in _with_directories(entries):
            info = tarfile.TarInfo(prefix + entry.path)
            info.mtime, info.mode = epoch, entry.mode
            info.uid = info.gid = entry.owner
            if entry.link:
                info.type = tarfile.SYMTYPE
                info.linkname = entry.link
                info.mode = 0o777
                archive.addfile(info)
            elif entry.content is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                _add_file(archive, info, entry.content)


def _with_directories(entries: Iterable[Entry]) -> Iterator[Entry]:
    """By name, so that a directory comes before its content. An entry without content is a
    directory of its own."""
    by_path: dict[str, Entry] = {}
    for entry in entries:
        if entry.path in by_path:
            raise ReleaseError(f"{entry.path} comes twice into one archive")
        by_path[entry.path] = entry
    for path in list(by_path):
        for parent in PurePosixPath(path).parents:
            if str(parent) != ".":
                by_path.setdefault(str(parent), Entry(str(parent), mode=0o755))
    return iter(sorted(by_path.values(), key=lambda entry: PurePosixPath(entry.path).parts))


def _add_file(archive: tarfile.TarFile, info: tarfile.TarInfo, content: bytes | Path) -> None:
    if isinstance(content, bytes):
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
        return
    info.size = content.stat().st_size
    with content.open("rb") as source:
        archive.addfile(info, source)


def write_tar_gz(path: Path, entries: Iterable[Entry], epoch: int, prefix: str = "") -> None:
    """The same, compressed, without the name and the time that gzip writes by itself.

    At level 3: the content is shared libraries of gigabytes, and level 6 takes twice the time for a
    twentieth.
    """
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 3, raw, mtime=0) as file:
        write_tar(file, entries, epoch, prefix)


def write_ar(path: Path, members: Iterable[tuple[str, bytes | Path]], epoch: int) -> None:
    """An ar archive, the outer form of a Debian package."""
    with path.open("wb") as out:
        out.write(b"!<arch>\n")
        for name, content in members:
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            out.write(f"{name:<16}{epoch:<12}{0:<6}{0:<6}{0o100644:<8o}{size:<10}`\n".encode())
            if isinstance(content, bytes):
                out.write(content)
            else:
                with content.open("rb") as source:
                    while block := source.read(1 << 20):
                        out.write(block)
            if size % 2:
                out.write(b"\n")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(folder: Path) -> str:
    """The text that `sha256sum --check` reads, of every file in the folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    return "".join(f"{sha256_of(path)}  {path.name}\n" for path in files)


def size_text(path: Path) -> str:
    """The size of a file, or of all files of a folder, for people."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return f"{sum(file.stat().st_size for file in files if file.is_file()) / 1e6:.0f} MB"
