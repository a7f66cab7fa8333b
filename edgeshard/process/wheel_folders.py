"""Folders of wheels and bundles, the archives of one such folder each: checked, file by file,
before any is used."""

from __future__ import annotations

import hashlib
import re
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from edgeshard.domain.errors import DataLossError, FailedPreconditionError, InvalidArgumentError

CHECKSUMS = "SHA256SUMS"
"""The file that names every other file of a folder with its SHA-256, as sha256sum writes it."""
INSTALLER, REQUIREMENTS = "install.sh", "requirements.txt"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,254}")
_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
_BLOCK_BYTES = 512
"""Block of a tar archive: each file ends at a multiple of it, filled up with zeros."""
_CHUNK_BYTES = 1 << 20


def check_folder(folder: Path) -> None:
    """Compare every file of a folder with its SHA256SUMS.

    Raises InvalidArgumentError if it is no folder of wheels, DataLossError naming a file that is
    missing, changed or not listed; both have the field `from`.
    """
    listed = _checksums(folder)
    names = {path.name for path in folder.iterdir()} - {CHECKSUMS}
    for needed in (INSTALLER, REQUIREMENTS):
        if needed not in listed:
            raise _no_folder(folder, f"its {CHECKSUMS} does not list {needed}")
    for name in sorted(names | listed.keys()):
        path = folder / name
        if name not in listed:
            raise _damage(name, f"is not listed in {CHECKSUMS}")
        if name not in names or not path.is_file():
            raise _damage(name, "is missing")
        try:
            file_digest = digest_of(path)
        except OSError as error:
            raise _damage(name, f"cannot be read ({error.strerror})") from None
        if file_digest != listed[name]:
            raise _damage(name, f"has another SHA-256 than in {CHECKSUMS}")


def unpack(archive: Path, into: Path) -> Path:
    """Write the files of a bundle below the directory `into`, and return their checked folder.

    Raises InvalidArgumentError if it is no bundle, FailedPreconditionError if the disk is too
    small, and DataLossError as `check_folder`.
    """
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as bundle:
            members = [member for member in bundle.getmembers() if not member.isdir()]
            folder = into / _folder_name(archive, members)
            _check_room(into, sum(member.size for member in members))
            _check_zeros(file, members)
            folder.mkdir()
            for member in members:
                _write(bundle, member, folder / PurePosixPath(member.name).name)
    except tarfile.TarError as error:
        raise _no_folder(archive, f"it is not a tar archive ({error})") from None
    except OSError as error:
        raise InvalidArgumentError(f"--from {archive}: {error.strerror}", field="from") from None
    check_folder(folder)
    return folder


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each listed file, by name."""
    try:
        text = (folder / CHECKSUMS).read_text(encoding="ascii")
    except FileNotFoundError:
        raise _no_folder(folder, f"it has no {CHECKSUMS}") from None
    except (OSError, UnicodeDecodeError):
        raise _damage(CHECKSUMS, "cannot be read") from None
    listed: dict[str, str] = {}
    if not text.endswith("\n"):
        raise _damage(CHECKSUMS, "ends within a line")
    for line in text[:-1].split("\n"):
        match = _LINE.fullmatch(line)
        if match is None or not _FILE.fullmatch(match[2]):
            raise _damage(CHECKSUMS, "has a line that is not SHA-256 and name")
        listed[match[2]] = match[1]
    return listed


def _folder_name(archive: Path, members: list[tarfile.TarInfo]) -> str:
    """The only directory that contains all members."""
    parts = [PurePosixPath(member.name).parts for member in members]
    well_named = all(len(each) == 2 and all(map(_FILE.fullmatch, each)) for each in parts)
    directories = {each[0] for each in parts}
    if len(directories) != 1 or not well_named or not all(member.isreg() for member in members):
        raise _no_folder(archive, "its members are not the files of one folder")
    return directories.pop()


def _check_room(into: Path, needed: int) -> None:
    free = shutil.disk_usage(into).free
    if needed > free:
        raise FailedPreconditionError(
            f"{into}: {needed} bytes are needed and {free} are free; make room, or set "
            "XDG_CACHE_HOME to another disk",
            field="from",
            reason="DISK_FULL",
        )


def _check_zeros(file: IO[bytes], members: list[tarfile.TarInfo]) -> None:
    """Raise DataLossError if bytes after a member's data are not zeros: no digest covers them."""
    end = 0
    for member in members:
        end = member.offset_data + member.size
        file.seek(end)
        if any(file.read(-member.size % _BLOCK_BYTES)):
            raise _damage(
                PurePosixPath(member.name).name, "has unexpected bytes after the tar archive"
            )
    file.seek(end + -end % _BLOCK_BYTES)
    while chunk := file.read(_CHUNK_BYTES):
        if any(chunk):
            raise _damage("the archive", "has other bytes at its end than zeros")


def _write(bundle: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = bundle.extractfile(member)
    assert source is not None  # it is a regular file
    with source, path.open("xb") as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _no_folder(path: Path, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"--from {path} is not a bundle or folder of wheels: {why}; make one with make bundle or "
        "make folders",
        field="from",
        reason="NO_BUNDLE",
    )


def _damage(name: str, why: str) -> DataLossError:
    return DataLossError(
        f"{name} {why}; nothing was changed. Copy the bundle again", field="from", reason="DAMAGED"
    )
