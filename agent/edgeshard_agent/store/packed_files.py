"""Packed files: a unit of a model, such as a layer, as the kernels read it, so that loading it is
reading it.

A file is a header, padded to whole blocks, and data: first the unit's small tensors, then, from a
whole block on, the large ones. The header has the entries, a CRC32C of every chunk of the data,
which each read checks, and the SHA-256 of all data, which names the content. Nothing in a file
depends on the instruction set. (ServerlessLLM, OSDI 2024, section 4: one file in loading order,
read in chunks past the page cache)
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import google_crc32c

from edgeshard.architectures.units import LAYOUT
from edgeshard.domain.errors import DataLossError
from edgeshard.domain.models.residency import in_disk_blocks
from edgeshard.storage.files import TEMPORARY, check_room, naming_full_disk, sync
from edgeshard_agent.store.direct import ALIGNMENT, CHUNK_BYTES, ChunkReader, Wanted

SUFFIX = ".packed"
PACKED_DAMAGED = "PACKED_DAMAGED"
"""Reason of the error for a file that is not as it was written; it is gone, and is made again by
the next load."""
_MAGIC = b"ESPACKED"
_HEAD = struct.Struct("<8sIII")
_HEADER_LIMIT = 64 << 20
_COPIED_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One tensor of a unit: `size` bytes at `offset` of the data, and how they are to be read.

    A matrix for the kernels has a `scheme`, and 0 or the inputs that share a scale as `group`. Its
    bias, if there is one, is an entry of its own. Others are plain tensors, row by row.
    """

    name: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str
    scheme: str = ""
    group: int = 0
    half_scales: bool = False


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """A unit as it is written: small tensors first, then large ones, each at its entry's offset."""

    entries: tuple[PackedEntry, ...]
    small: bytes
    large: Iterable[memoryview]
    large_bytes: int


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """The header of a packed file. `small_bytes` of the data are small tensors; `data_bytes` are
    all, in whole blocks."""

    key: str
    entries: tuple[PackedEntry, ...]
    small_bytes: int
    data_bytes: int
    sha256: str
    chunks: tuple[int, ...]
    """CRC32C of the small tensors, and of each CHUNK_BYTES of the large ones."""

    @property
    def large_bytes(self) -> int:
        return self.data_bytes - self.small_bytes


def checksum(data: memoryview) -> int:
    """CRC32C. Some pages at a time: the library wants a copy, which so stays in a cache."""
    value = 0
    for first in range(0, len(data), _COPIED_BYTES):
        value = google_crc32c.extend(value, bytes(data[first : first + _COPIED_BYTES]))
    return int(value)


def packed_damage(path: Path, why: str) -> DataLossError:
    return DataLossError(
        f"packed file {path.name}: {why}; load the stage again, which makes it anew",
        field="packed",
        reason=PACKED_DAMAGED,
    )


def packed_bytes(key: str, unit: UnitBytes) -> int:
    """The size of the file that `write_packed` makes of a unit."""
    header, _, room = _laid_out_header(key, unit)
    return room + header.data_bytes


def write_packed(path: Path, key: str, unit: UnitBytes) -> PackedHeader:
    """Write the packed file of a unit.

    Either part is padded to whole blocks. A crash leaves all of the file or none. Raises
    ResourceExhaustedError for a full disk.
    """
    header, small, room = _laid_out_header(key, unit)
    # Two loads may write the same unit at once.
    temporary = path.with_name(f"{path.name}.{threading.get_ident()}{TEMPORARY}")
    with naming_full_disk(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(path, f"packed file {path.name}", room + header.data_bytes)
        try:
            with temporary.open("wb") as file:
                file.seek(room)
                whole, checksums = hashlib.sha256(), []
                for chunk in (small, *_chunks(unit.large, header.large_bytes)):
                    whole.update(chunk)
                    checksums.append(google_crc32c.value(chunk))
                    file.write(chunk)
                header = replace(header, sha256=whole.hexdigest(), chunks=tuple(checksums))
                text = _to_json(header)
                file.seek(0)
                file.write(_HEAD.pack(_MAGIC, len(text), google_crc32c.value(text), room) + text)
                file.flush()
                # the header's padding, if no data follows it
                file.truncate(room + header.data_bytes)
                os.fsync(file.fileno())
                # It will be read past the page cache; a node that streams has better use for its
                # memory.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
    return header


def _laid_out_header(key: str, unit: UnitBytes) -> tuple[PackedHeader, bytes, int]:
    """The header without its checksums, the padded small tensors, and the bytes that the header
    takes in the file."""
    small = unit.small + bytes(-len(unit.small) % ALIGNMENT)
    large_bytes = in_disk_blocks(unit.large_bytes)
    count = 1 + -(-large_bytes // CHUNK_BYTES)
    header = PackedHeader(
        key, unit.entries, len(small), len(small) + large_bytes, "0" * 64, (0,) * count
    )
    # checksums have ten digits each
    return (
        header,
        small,
        in_disk_blocks(_HEAD.size + len(_to_json(header))),
    )


def _chunks(pieces: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """The pieces in chunks of CHUNK_BYTES, followed by zeros: `size` bytes in all."""
    buffer = bytearray()
    for piece in chain(pieces, (memoryview(bytes(ALIGNMENT)),)):
        for first in range(0, len(piece), CHUNK_BYTES):
            buffer += piece[first : first + CHUNK_BYTES]
            while size and len(buffer) >= min(size, CHUNK_BYTES):
                chunk = bytes(buffer[: min(size, CHUNK_BYTES)])
                del buffer[: len(chunk)]
                size -= len(chunk)
                yield chunk
    assert not size


def _to_json(header: PackedHeader) -> bytes:
    fields = asdict(header) | {
        "layout": LAYOUT,
        "chunks": [f"{value:010d}" for value in header.chunks],
    }
    return json.dumps(fields, sort_keys=True).encode()


class PackedFile:
    """A packed file that is there. Raises DataLossError (PACKED_DAMAGED) for one that is not as it
    was written."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._first, self.header = _read_header(path, key)

    def read_whole(
        self, reader: ChunkReader, into: memoryview, *, cached: bool | None = None
    ) -> None:
        """Fill `into` with all data, checked: small tensors, then large ones. `cached` is as of
        `ChunkReader.read`."""
        self._read(reader, into, 0, cached)

    def read_small(self, reader: ChunkReader, into: memoryview) -> None:
        """Fill `into` with the data of the small tensors, checked."""
        self._read(reader, into[: self.header.small_bytes], 0, None)

    def read_large(
        self,
        reader: ChunkReader,
        into: memoryview,
        *,
        cached: bool | None = None,
        is_wanted: Wanted | None = None,
    ) -> None:
        """Fill `into` with the data of the large tensors, checked. ReadAbandonedError once that is
        not `is_wanted`."""
        self._read(reader, into[: self.header.large_bytes], 1, cached, is_wanted)

    def _read(
        self,
        reader: ChunkReader,
        into: memoryview,
        first: int,
        cached: bool | None,
        is_wanted: Wanted | None = None,
    ) -> None:
        """Read the chunks from number `first` on: chunk 0 has the small tensors, chunk 1 begins the
        large ones."""
        header = self.header
        offset = header.small_bytes if first else 0
        left, sizes = len(into), list[int]()
        while left:
            is_small = not sizes and first == 0
            sizes.append(min(left, header.small_bytes if is_small else CHUNK_BYTES))
            left -= sizes[-1]

        def check(index: int, chunk: memoryview) -> None:
            if reader.checksum(chunk) != header.chunks[first + index]:
                raise packed_damage(self.path, f"chunk {first + index} does not match its checksum")

        try:
            reader.read(
                self.path,
                self._first + offset,
                into,
                sizes,
                check,
                cached=cached,
                is_wanted=is_wanted,
            )
        except (OSError, EOFError, DataLossError) as error:
            self.path.unlink(missing_ok=True)  # the next load makes it again
            if isinstance(error, DataLossError):
                raise
            raise packed_damage(self.path, str(error)) from None


def _read_header(path: Path, key: str) -> tuple[int, PackedHeader]:
    try:
        with path.open("rb") as file:
            magic, length, checksum, first = _HEAD.unpack(file.read(_HEAD.size))
            if magic != _MAGIC or length > _HEADER_LIMIT:
                raise packed_damage(path, "it does not begin as one")
            text = file.read(length)
            size = os.fstat(file.fileno()).st_size
        if google_crc32c.value(text) != checksum:
            raise packed_damage(path, "its header does not match its checksum")
        fields = json.loads(text)
        if fields.pop("layout") != LAYOUT or fields["key"] != key:
            raise packed_damage(
                path, f"it is of {fields['key']}, layout {LAYOUT} of {key} is wanted"
            )
        entries = tuple(
            PackedEntry(**item | {"shape": tuple(item["shape"])}) for item in fields.pop("entries")
        )
        chunks = tuple(int(value) for value in fields.pop("chunks"))
        header = PackedHeader(entries=entries, chunks=chunks, **fields)
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise packed_damage(path, f"it cannot be read: {error}") from None
    if (
        first % ALIGNMENT
        or size != first + header.data_bytes
        or len(chunks) != 1 + -(-header.large_bytes // CHUNK_BYTES)
    ):
        raise packed_damage(
            path, f"it has {size} bytes, but its header declares {first + header.data_bytes}"
        )
    return first, header


def laid_out(sizes: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Offsets of consecutive tensors of these sizes, and the end of the last one."""
    offsets, end = [], 0
    for size in sizes:
        end = -(-end // alignment) * alignment
        offsets.append(end)
        end += size
    return offsets, end
