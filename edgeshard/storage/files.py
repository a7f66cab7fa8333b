"""Writes that leave the old file or the new one after a crash, and a typed error for a full
disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeshard.domain.errors import ResourceExhaustedError

TEMPORARY = ".tmp"
"""The end of the name of a file that is being written to take another's place."""
MOVE_STATE = "free space or move --state-dir"
MOVE_SCRATCH = "free space, or set TMPDIR to a folder on another disk"


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's text so that after a crash or an error it has either the old or the new
    one."""
    temporary = path.with_name(path.name + TEMPORARY)
    with naming_full_disk(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


@contextmanager
def naming_full_disk(
    path: Path, what: str = "", needed_bytes: int | None = None, remedy: str = MOVE_STATE
) -> Iterator[None]:
    """Turn the error of a full disk into that of `full_disk`; let other errors pass. `what` is the
    file by default."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise full_disk(path, what or path.name, needed_bytes, remedy=remedy) from None


def free_bytes(path: Path) -> int:
    """The bytes that this process may still use of the disk that a file is on or will be on."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def check_room(
    path: Path,
    what: str,
    needed_bytes: int,
    usable_bytes: int | None = None,
    remedy: str = MOVE_STATE,
) -> None:
    """Raise the error of `full_disk` unless `what` fits, before its first byte is written at
    `path`.

    `usable_bytes` are those of the disk that it may have, by default all that are free.
    """
    usable = free_bytes(path) if usable_bytes is None else usable_bytes
    if needed_bytes > usable:
        raise full_disk(path, what, needed_bytes, usable, remedy)


def full_disk(
    path: Path,
    what: str,
    needed_bytes: int | None = None,
    usable_bytes: int | None = None,
    remedy: str = MOVE_STATE,
) -> ResourceExhaustedError:
    """The error of a disk that has no room for `what`, to be written at `path`; it has the needed
    bytes if they are known, and the free ones."""
    free = free_bytes(path)
    usable = free if usable_bytes is None else usable_bytes
    reserved = f", {free - max(0, usable)} of them reserved" if usable < free else ""
    needs = "has no room" if needed_bytes is None else f"needs {needed_bytes} bytes"
    return ResourceExhaustedError(
        f"{what} {needs} on the disk of {path.parent}, where {max(free, usable)} bytes are "
        f"free{reserved}; {remedy}",
        field="state-dir",
        reason="DISK_FULL",
    )
