"""A directory of content-addressed files, with uploads and downloads that can be resumed.

A blob lies at `sha256/ab/<digest>`; while it arrives, at `<digest>.partial` beside that. It gets
its name only after its bytes matched the digest and were synced, so a file named by a digest was
correct when it was written. Blobs of a model that was on the same disk lie in its own files
(`edgeshard/storage/linked.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from edgeshard.domain.errors import (
    DataLossError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
)
from edgeshard.domain.ids import Digest, check_digest
from edgeshard.domain.models.model import FileInfo, ModelManifest, TensorInfo
from edgeshard.storage.files import naming_full_disk, sync
from edgeshard.storage.linked import LinkedFiles
from edgeshard.storage.locations import BlobLocation, open_location, read_at, read_chunks

CHUNK_BYTES = 1 << 20
_HASH_CHUNK_BYTES = 4 << 20
_PARTIAL = ".partial"
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class BlobFile:
    """A file of the directory. `used_ns` is its modification time: `touch` and every write move
    it."""

    digest: Digest
    size: int
    complete: bool
    used_ns: int


class BlobDirectory:
    """Blocking file operations on blobs. Any thread may call them, as long as one caller writes a
    blob at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root / "sha256"
        self.linked = LinkedFiles(root / "linked")
        # The sha256 of what has arrived of a blob and how much that is, so that it need not be read
        # again for it.
        self._hashed: dict[Digest, tuple[int, Any]] = {}

    def locate(self, digest: Digest) -> BlobLocation | None:
        """The place of a complete blob, None when it is not there."""
        path = self.path(digest)
        size = _size(path)
        return self.linked.find(digest) if size is None else BlobLocation(path, 0, size)

    def missing(self, digest: Digest) -> EdgeShardError:
        """The error of a blob that `locate` does not find; it names the file that had it, if there
        is one."""
        return self.linked.lost(digest) or missing_blob(digest)

    def path(self, digest: Digest) -> Path:
        """The path of a complete blob's own file. Raises InvalidArgumentError unless `digest` is a
        sha256."""
        return self._root / check_digest(digest)[:2] / digest

    def partial_path(self, digest: Digest) -> Path:
        """The path of a blob's file while it arrives."""
        path = self.path(digest)
        return path.with_name(path.name + _PARTIAL)

    def create(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def size(self, digest: Digest) -> int | None:
        """The bytes of a complete blob, None when it is not there."""
        location = self.locate(digest)
        return None if location is None else location.size

    def received(self, digest: Digest) -> int:
        """The bytes of the partial file, 0 when there is none."""
        return _size(self.partial_path(digest)) or 0

    def truncate(self, digest: Digest, size: int) -> None:
        """Make the partial file, and cut it to `size` bytes, no more than it has.

        Raises ResourceExhaustedError when the disk is full.
        """
        path = self.partial_path(digest)
        self._hashed[digest] = (0, hashlib.sha256())
        with naming_full_disk(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            with os.fdopen(descriptor, "wb") as file:
                file.truncate(size)

    def write(self, digest: Digest, offset: int, data: bytes) -> None:
        """Put `data` at `offset` of the partial file. Raises ResourceExhaustedError when the disk
        is full."""
        path = self.partial_path(digest)
        with naming_full_disk(path), path.open("r+b") as file:
            file.seek(offset)
            file.write(data)
        hashed, sha256 = self._hashed.get(digest, (-1, None))
        if hashed == offset:
            sha256.update(data)
            self._hashed[digest] = (offset + len(data), sha256)

    def commit(self, digest: Digest, size: int) -> None:
        """Verify the partial file, sync it and give it its name.

        Raises DataLossError, and removes the partial file, when its length or its sha256 is wrong.
        """
        path, partial = self.path(digest), self.partial_path(digest)
        hashed, sha256 = self._hashed.pop(digest, (-1, None))
        partial_size = _size(partial)
        if (
            partial_size != size
            or (sha256.hexdigest() if hashed == size else sha256_of(partial)) != digest
        ):
            partial.unlink(missing_ok=True)
            raise DataLossError(
                f"the bytes received for blob {digest} do not match its sha256", field="sha256"
            )
        with naming_full_disk(partial):
            sync(partial)
            partial.rename(path)
            sync(path.parent)

    def adopt(self, digest: Digest, path: Path) -> None:
        """Give a file of this file system its name as a blob; its sha256 is known, and it has no
        other owner."""
        target = self.path(digest)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.rename(target)
        sync(target.parent)

    def own(self, digest: Digest) -> None:
        """Copy a blob that lies in a linked file. Raises DataLossError where that has changed since
        it was linked, and ResourceExhaustedError when the disk is full."""
        location = self.linked.find(digest)
        if location is None or _size(self.path(digest)) is not None:
            return
        self.truncate(digest, 0)
        for offset in range(0, location.size, CHUNK_BYTES):
            self.write(digest, offset, self.read(digest, offset, CHUNK_BYTES))
        self.commit(digest, location.size)
        self.linked.remove([digest])

    def is_intact(self, digest: Digest, size: int) -> bool:
        """Whether the complete blob is there with `size` bytes that match its digest; reads all of
        it."""
        location = self.locate(digest)
        try:
            return location is not None and location.size == size and sha256_at(location) == digest
        except (OSError, EdgeShardError):
            return False

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`. Raises NotFoundError when there is no such blob."""
        location = self.locate(digest)
        if location is None:
            raise self.missing(digest)
        try:
            with open_location(location) as file:
                return read_at(file, location, offset, length)
        except NotFoundError:
            raise self.missing(digest) from None

    def touch(self, digest: Digest) -> None:
        """Mark the blob as used now."""
        os.utime(self.path(digest))

    def remove(self, *digests: Digest) -> None:
        """Remove blobs, complete or partial; a blob that is not there is passed over."""
        for digest in digests:
            self.path(digest).unlink(missing_ok=True)
            self.forget_received(digest)
        self.linked.remove(digests)

    def forget_received(self, digest: Digest) -> None:
        """Remove the partial file of a blob."""
        self._hashed.pop(digest, None)
        self.partial_path(digest).unlink(missing_ok=True)

    def files(self) -> Iterator[BlobFile]:
        """The blobs with a file of their own, complete or partial; files of other names are passed
        over."""
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
    """The bytes of an item as they are stored."""
    return item.stored_bytes if isinstance(item, TensorInfo) else item.size


def manifest_items(manifest: ModelManifest) -> tuple[TensorInfo | FileInfo, ...]:
    """The items of a manifest that have bytes of their own: its tensors, then its files."""
    return (*manifest.tensors, *manifest.files)


def blob_sizes(items: Iterable[TensorInfo | FileInfo]) -> dict[Digest, int]:
    """The bytes of every distinct blob. Raises InvalidArgumentError when one digest stands for two
    sizes."""
    sizes: dict[Digest, int] = {}
    for item in items:
        size = blob_size(item)
        if sizes.setdefault(item.sha256, size) != size:
            raise InvalidArgumentError(
                f"{item.name} has {size} bytes, but another item with the same sha256 has "
                f"{sizes[item.sha256]}",
                field=item.name,
                reason="INVALID_MANIFEST",
            )
    return sizes


def missing_blob(digest: Digest) -> NotFoundError:
    """The error of a blob that is not there."""
    return NotFoundError(
        f"blob {digest} is not in the store: add its model again", field="sha256", reason="NO_BLOB"
    )


def sha256_of(path: Path) -> Digest:
    """The sha256 of a whole file, to which a link may lead."""
    path = path.resolve()
    return sha256_at(BlobLocation(path, 0, path.stat().st_size))


def sha256_at(location: BlobLocation) -> Digest:
    """The sha256 of the bytes at `location`. Raises as `read_chunks` does."""
    sha256 = hashlib.sha256()
    for chunk in read_chunks(location, "a blob", _HASH_CHUNK_BYTES):
        sha256.update(chunk)
    return Digest(sha256.hexdigest())


async def in_thread(function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Run blocking work off the loop, and wait for its end even when cancelled.

    A thread cannot be stopped: without the wait a cancelled writer would go on writing after it
    released its lock.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # once more is not more
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
