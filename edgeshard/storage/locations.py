"""Places of bytes in files of this machine, and their reading.

A file may belong to another owner, who can change it at any time. A location therefore may have the
file's `Stamp`, and every read compares it first. Sizes, offsets and lengths are in bytes.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgeshard.domain.errors import DataLossError, EdgeShardError
from edgeshard.domain.models.model import RowOrder
from edgeshard.storage.forms import truncated
from edgeshard.storage.model_directory import open_regular

CHANGED_SINCE_ADDED = "CHANGED_SINCE_ADDED"
"""Reason of the error for a file that is not as it was when a model was added from it."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The size and the time of the last change, in ns since 1970, of a file as it was hashed."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp of a file with this status."""
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class BlobLocation:
    """A place of bytes: `size` of them at `offset` of a local file."""

    path: Path
    offset: int
    size: int
    is_linked: bool = False
    """Whether another owner may write to the file: its bytes are known only once their sha256 was
    compared."""
    source: Path | None = None
    """The path from which a linked file was added, for messages."""
    stamp: Stamp | None = None
    """The state that a file must have which is read in place."""
    order: RowOrder | None = None
    """The order in which the file has the rows; None if it has them as the blob does."""

    @property
    def is_readable(self) -> bool:
        """Whether this process can read the bytes now, by the file's status."""
        try:
            status = self.path.stat(follow_symlinks=False)
        except OSError:
            return False
        if self.stamp is None:
            return status.st_size >= self.offset + self.size
        return self.stamp == Stamp.of(status) and os.access(self.path, os.R_OK)


def changed_file(location: BlobLocation) -> DataLossError:
    """The error of a file that changed or disappeared after a model was added from it."""
    return DataLossError(
        f"{location.source or location.path} has changed or disappeared since a model was added "
        "from it; put the file "
        "back as it was and add the model again, or delete the model",
        field="file",
        reason=CHANGED_SINCE_ADDED,
    )


def open_location(location: BlobLocation) -> BinaryIO:
    """The open file. Raises DataLossError (CHANGED_SINCE_ADDED) if it is not in the state of the
    stamp, and as `open_regular` does."""
    if location.stamp is None:
        return open_regular(location.path)
    try:
        file = open_regular(location.path)
    except EdgeShardError:
        raise changed_file(location) from None
    if Stamp.of(os.fstat(file.fileno())) != location.stamp:
        file.close()
        raise changed_file(location)
    return file


def read_into(file: BinaryIO, location: BlobLocation, start: int, into: memoryview) -> int:
    """Fill `into` with the bytes from `start` on. The number of bytes read, fewer than its length
    at the file's end."""
    done = 0
    for offset, length in _pieces(location, start, min(len(into), location.size - start)):
        count = os.preadv(file.fileno(), [into[done : done + length]], offset)
        done += count
        if count < length:
            break
    return done


def read_at(file: BinaryIO, location: BlobLocation, start: int, length: int) -> bytes:
    """Up to `length` bytes from `start` on, fewer at the end of the blob or of the file."""
    length = max(0, min(length, location.size - start))
    if location.order is None:
        return os.pread(file.fileno(), length, location.offset + start)
    data = bytearray(length)
    count = read_into(file, location, start, memoryview(data))
    return bytes(data[:count])


def _pieces(location: BlobLocation, start: int, length: int) -> Iterator[tuple[int, int]]:
    """The (offset in the file, length) of the pieces whose bytes are `length` ones of the blob from
    `start` on."""
    if location.order is None:
        yield location.offset + start, length
        return
    row_bytes, end = location.order.row_bytes, start + length
    while start < end:
        row, skipped = divmod(start, row_bytes)
        size = min(row_bytes - skipped, end - start)
        yield location.offset + location.order.row_of_file(row) * row_bytes + skipped, size
        start += size


def read_chunks(
    location: BlobLocation, what: str, chunk_bytes: int, start: int = 0
) -> Generator[bytes, None, None]:
    """The bytes of `location` from `start` on, at most `chunk_bytes` at a time.

    Raises as `open_location` does, and DataLossError, which calls them `what`, for a file that ends
    too early.
    """
    with open_location(location) as file:
        while start < location.size:
            chunk = read_at(file, location, start, chunk_bytes)
            if not chunk:
                raise truncated(location.path.name, what)
            start += len(chunk)
            yield chunk
