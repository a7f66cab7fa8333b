"""Writes that leave the old file or the new one after a crash, and a typed error for a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeshard.domain.errors import ResourceExhaustedError

TEMPORARY = ".tmp"
"""The end of the name of a file that is being written to take another's place."""


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's text so that after a crash or an error it has either the old or the new one."""
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
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turn the error of a full disk into a ResourceExhaustedError that names the directory; let other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise full_disk(path, path.name) from None


def free_bytes(path: Path) -> int:
    """The bytes that this process may still use of the disk that a file is on or will be on."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def full_disk(path: Path, what: str) -> ResourceExhaustedError:
    """The error of a disk that has no room for `what`, to be written at `path`."""
    return ResourceExhaustedError(
        f"the disk of {path.parent} is full ({free_bytes(path)} bytes are free), so {what} cannot be written; free "
        "space or move --state-dir",
        field="state-dir",
        reason="DISK_FULL",
    )
