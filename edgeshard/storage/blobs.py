"""A directory of content-addressed files, with uploads and downloads that can be resumed.

A blob lies at `sha256/ab/<digest>`; while it arrives, at `<digest>.partial` beside that. It gets its name only after
its bytes matched the digest and were synced, so a file named by a digest was correct when it was written.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from edgeshard.domain.errors import DataLossError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from edgeshard.domain.ids import Digest, check_digest
from edgeshard.domain.model import FileInfo, ModelManifest, TensorInfo

CHUNK_BYTES = 1 << 20
_HASH_CHUNK_BYTES = 4 << 20
_PARTIAL = ".partial"
TEMPORARY = ".tmp"
"""The end of the name of a file that is being written to take another's place."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class BlobFile:
    """A file of the directory. `used_ns` is its modification time: `touch` and every write move it."""

    digest: Digest
    size: int
    complete: bool
    used_ns: int


class BlobDirectory:
    """Blocking file operations on blobs; safe to call from any thread as long as one caller writes a blob at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root / "sha256"

    def path(self, digest: Digest) -> Path:
        """Where the blob lies when it is complete. Raises InvalidArgumentError unless `digest` is a sha256."""
        return self._root / check_digest(digest)[:2] / digest

    def partial_path(self, digest: Digest) -> Path:
        path = self.path(digest)
        return path.with_name(path.name + _PARTIAL)

    def create(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def size(self, digest: Digest) -> int | None:
        """Bytes of a complete blob, None when it is not there."""
        return _size(self.path(digest))

    def received(self, digest: Digest) -> int:
        """Bytes of the partial file, 0 when there is none."""
        return _size(self.partial_path(digest)) or 0

    def truncate(self, digest: Digest, size: int) -> None:
        """Make the partial file, and cut it to `size` bytes, which must not be more than it has."""
        path = self.partial_path(digest)
        with _naming_full_disk(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)

    def write(self, digest: Digest, offset: int, data: bytes) -> None:
        """Put `data` at `offset` of the partial file. Raises ResourceExhaustedError when the disk is full."""
        path = self.partial_path(digest)
        with _naming_full_disk(path), path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def commit(self, digest: Digest, size: int) -> None:
        """Verify the partial file, sync it and give it its name.

        Raises DataLossError, and removes the partial file, when its length or its sha256 is wrong.
        """
        path, partial = self.path(digest), self.partial_path(digest)
        if _size(partial) != size or sha256_of(partial) != digest:
            partial.unlink(missing_ok=True)
            raise DataLossError(f"the bytes received for blob {digest} do not match its sha256", field="sha256")
        with _naming_full_disk(partial):
            sync(partial)
            partial.rename(path)
            sync(path.parent)

    def is_intact(self, digest: Digest, size: int) -> bool:
        """Whether the complete blob is there with `size` bytes that match its digest; reads all of it."""
        path = self.path(digest)
        try:
            return _size(path) == size and sha256_of(path) == digest
        except FileNotFoundError:
            return False

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`. Raises NotFoundError when there is no such blob."""
        try:
            with self.path(digest).open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            raise missing_blob(digest) from None

    def touch(self, digest: Digest) -> None:
        """Mark the blob as used now."""
        os.utime(self.path(digest))

    def remove(self, digest: Digest) -> None:
        """Remove the blob and what has arrived of it; nothing happens when it is not there."""
        self.path(digest).unlink(missing_ok=True)
        self.forget_received(digest)

    def forget_received(self, digest: Digest) -> None:
        """Remove what has arrived of a blob that is not complete."""
        self.partial_path(digest).unlink(missing_ok=True)

    def files(self) -> Iterator[BlobFile]:
        """Every blob, complete or partial; files of other names are passed over."""
        for path in sorted(self._root.glob("??/*")):
            name = path.name.removesuffix(_PARTIAL)
            if path.is_symlink() or not path.is_file() or not name.startswith(path.parent.name):
                continue
            try:
                digest, status = check_digest(name), path.stat()
            except (InvalidArgumentError, FileNotFoundError):
                continue
            yield BlobFile(digest, status.st_size, path.name == name, status.st_mtime_ns)


def blob_size(item: TensorInfo | FileInfo) -> int:
    return item.stored_bytes if isinstance(item, TensorInfo) else item.size


def manifest_items(manifest: ModelManifest) -> tuple[TensorInfo | FileInfo, ...]:
    """Everything of a manifest that has bytes of its own."""
    return (*manifest.tensors, *manifest.files)


def blob_sizes(items: Iterable[TensorInfo | FileInfo]) -> dict[Digest, int]:
    """Bytes of every distinct blob. Raises InvalidArgumentError when one digest stands for two sizes."""
    sizes: dict[Digest, int] = {}
    for item in items:
        size = blob_size(item)
        if sizes.setdefault(item.sha256, size) != size:
            raise InvalidArgumentError(
                f"{item.name} has {size} bytes, but another item with the same sha256 has {sizes[item.sha256]}",
                field=item.name,
                reason="INVALID_MANIFEST",
            )
    return sizes


def missing_blob(digest: Digest) -> NotFoundError:
    return NotFoundError(f"blob {digest} is not in the store: add its model again", field="sha256", reason="NO_BLOB")


def sha256_of(path: Path) -> Digest:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            sha256.update(chunk)
    return Digest(sha256.hexdigest())


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
    with _naming_full_disk(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


async def in_thread(function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Run blocking work off the loop, and wait for its end even when cancelled.

    A thread cannot be stopped: without the wait a cancelled writer would go on writing after it released its lock.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


@contextmanager
def _naming_full_disk(path: Path) -> Iterator[None]:
    """A full disk as a typed error that names the directory; other errors of the system pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise full_disk(path, path.name) from None


def free_bytes(path: Path) -> int:
    """Of the disk that a file is on or will be on: what this process may use of it."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def full_disk(path: Path, what: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"the disk of {path.parent} is full ({free_bytes(path)} bytes are free), so {what} cannot be written; free "
        "space or move --state-dir",
        field="state-dir",
        reason="DISK_FULL",
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
