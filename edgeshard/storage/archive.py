"""An archive of files: a tar without compression, and at its end a manifest with the size and
SHA-256 of each.

Only regular files are in it. Names are relative paths of plain characters, at most 100 long. Both
sides hold the same limits, so that an archive from elsewhere can be read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sqlite3
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from edgeshard.domain.errors import AlreadyExistsError, DataLossError, InvalidArgumentError
from edgeshard.storage.files import sync

MANIFEST = "manifest.json"
MAX_FILES = 10_000
MAX_BYTES = 16 << 30
"""Of all files together."""
MAX_MANIFEST_BYTES = 8 << 20
MAX_NAME = 100
"""The form of tar that every program reads has no longer name."""
_NAME = re.compile(r"[\w@+-][\w.@+-]*(/[\w@+-][\w.@+-]*)*", re.ASCII)
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """A file of an archive: its size in bytes, and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive, after its hashes were checked: a description of its content (`about`), and its
    files by name."""

    path: Path
    about: Mapping[str, Any]
    files: Mapping[str, ArchivedFile]


def write_archive(
    path: Path, about: Mapping[str, Any], files: Mapping[str, Path], *, force: bool = False
) -> dict[str, ArchivedFile]:
    """Write an archive of `files`, by their names in it, and return what is in it. `path` is for
    its owner alone, and has the whole archive or is not there.

    A `.sqlite` file is copied by SQLite, so that it is whole while others write to it. Raises
    AlreadyExistsError if `path` exists, unless with `force`; InvalidArgumentError for a file that
    cannot be archived; OSError.
    """
    if path.exists() and not force:
        raise _exists(path)
    archived: dict[str, ArchivedFile] = {}
    total_bytes = 0
    with tempfile.TemporaryDirectory(
        dir=path.absolute().parent, prefix=f".{path.name}."
    ) as scratch:
        staging_path = Path(scratch) / "archive"
        with (
            open(staging_path, "xb", opener=_private) as raw,
            tarfile.open(fileobj=raw, mode="w:", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for name, source in files.items():
                copied = Path(scratch) / "copy.sqlite"
                is_database = source.suffix == ".sqlite"
                if is_database:
                    _copy_database(source, copied)
                readable = copied if is_database else source
                with readable.open("rb") as file:
                    archived[name] = _add(tar, name, file)
                copied.unlink(missing_ok=True)
                total_bytes += archived[name].size
                _check_size(len(archived), total_bytes, path)
            _add_manifest(tar, about, archived)
        sync(staging_path)
        if force:
            staging_path.replace(path)
        else:
            try:
                os.link(staging_path, path)
            except FileExistsError:
                raise _exists(path) from None
    sync(path.absolute().parent)
    return archived


def read_archive(path: Path) -> Archive:
    """The archive, after its names, sizes and hashes were checked.

    Raises InvalidArgumentError for a file that cannot be read or is no archive, DataLossError for
    one that was changed.
    """
    files: dict[str, ArchivedFile] = {}
    document: dict[str, Any] | None = None
    with _naming(path):
        for member, file in _members(path):
            if member.name == MANIFEST:
                document = _manifest(path, file)
            else:
                files[member.name] = _hashed(file)
    if document is None:
        raise DataLossError(
            f"{path}: its end is missing: use another copy of the backup", field="file"
        )
    try:
        listed = {
            name: ArchivedFile(int(of["size"]), str(of["sha256"]))
            for name, of in document["files"].items()
        }
        about = dict(document["about"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _no_archive(path, f"{MANIFEST} has another form") from None
    for name in sorted(listed.keys() | files.keys()):
        if listed.get(name) != files.get(name):
            raise DataLossError(
                f"{path}: {name} has changed since the backup was made: use another copy of the "
                "backup",
                field="file",
                reason="BACKUP_CHANGED",
            )
    return Archive(path, about, files)


def extract(archive: Archive, place: Callable[[str], Path]) -> None:
    """Write the files of an archive, each to its place by its name, for their owner alone.

    The places must not exist. Raises DataLossError if the archive changed since it was read;
    OSError.
    """
    for member, file in _members(archive.path):
        if member.name == MANIFEST:
            continue
        target = place(member.name)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(target, "xb", opener=_private) as out:
            written = _hashed(file, out)
            out.flush()
            os.fsync(out.fileno())
        if archive.files.get(member.name) != written:
            raise DataLossError(f"{archive.path} was changed while it was read", field="file")


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database that another process may use. Raises InvalidArgumentError for a file that is
    none."""
    try:
        # Another mode would make an empty file if there is none.
        with (
            closing(
                sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True, timeout=10.0)
            ) as database,
            closing(sqlite3.connect(target)) as copy,
        ):
            database.backup(copy)
    except sqlite3.Error as error:
        raise InvalidArgumentError(
            f"{source} cannot be copied: {error}; run the command as the coordinator's user or as "
            "root, and check "
            "the disk",
            field="state-dir",
            reason="STATE_STORE",
        ) from None


def _add(tar: tarfile.TarFile, name: str, file: IO[bytes]) -> ArchivedFile:
    """Add the file with the size that it has now: what others append meanwhile is left out."""
    if not _is_name(name):
        raise InvalidArgumentError(
            f"{name[:200]!r} cannot be in a backup: rename or remove that file", field="file"
        )
    member = tarfile.TarInfo(name)
    member.size = os.fstat(file.fileno()).st_size
    member.mode = 0o600
    hashing = _HashingReader(file)
    tar.addfile(member, hashing)
    return ArchivedFile(member.size, hashing.sha256.hexdigest())


class _HashingReader(io.RawIOBase):
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data


def _add_manifest(
    tar: tarfile.TarFile, about: Mapping[str, Any], archived: Mapping[str, ArchivedFile]
) -> None:
    files = {name: {"size": of.size, "sha256": of.sha256} for name, of in archived.items()}
    text = json.dumps({"about": dict(about), "files": files}, indent=1).encode()
    member = tarfile.TarInfo(MANIFEST)
    member.size = len(text)
    member.mode = 0o600
    tar.addfile(member, io.BytesIO(text))


def _members(path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The members of an archive in order; each file may be read until the next one."""
    names: set[str] = set()
    total_bytes = 0
    if path.stat().st_size > MAX_BYTES + MAX_MANIFEST_BYTES + MAX_FILES * 2048:
        raise _no_archive(path, f"it is larger than {MAX_BYTES >> 30} GiB")
    with tarfile.open(path, mode="r:") as tar:
        for member in tar:
            # Neither links nor directories, devices, or files with holes.
            if (
                member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE)
                or member.issparse()
                or member.size < 0
            ):
                raise _no_archive(path, f"{member.name[:100]!r} is not a regular file")
            if not _is_name(member.name) or member.name in names:
                raise _no_archive(path, f"it has a file named {member.name[:100]!r}")
            names.add(member.name)
            total_bytes += member.size
            _check_size(len(names), total_bytes, path)
            file = tar.extractfile(member)
            assert file is not None
            yield member, file


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn the errors of reading an archive into those of a file that an operator named."""
    try:
        yield
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        raise _no_archive(path, str(error)[:200]) from None
    except OSError as error:
        raise InvalidArgumentError(
            f"{path} cannot be read: {error.strerror or error}", field="file"
        ) from None


def _manifest(path: Path, file: IO[bytes]) -> dict[str, Any]:
    text = file.read(MAX_MANIFEST_BYTES + 1)
    try:
        document = json.loads(text) if len(text) <= MAX_MANIFEST_BYTES else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _no_archive(path, f"{MANIFEST} has another form")
    return document


def _hashed(file: IO[bytes], out: IO[bytes] | None = None) -> ArchivedFile:
    """Read a file to its end; write it to `out`."""
    sha256 = hashlib.sha256()
    size = 0
    while data := file.read(_CHUNK_BYTES):
        sha256.update(data)
        size += len(data)
        if out is not None:
            out.write(data)
    return ArchivedFile(size, sha256.hexdigest())


def _is_name(name: str) -> bool:
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def _check_size(files: int, total_bytes: int, path: Path) -> None:
    if files > MAX_FILES or total_bytes > MAX_BYTES:
        raise InvalidArgumentError(
            f"{path}: a backup has at most {MAX_FILES} files and {MAX_BYTES >> 30} GiB",
            field="file",
        )


def _exists(path: Path) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"{path} exists: give another name, or --force to replace it", field="file"
    )


def _no_archive(path: Path, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path} is not a backup of edgectl backup: {why}", field="file", reason="NO_BACKUP"
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
