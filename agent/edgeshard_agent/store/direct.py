"""Reading large pieces of a file at the rate of its disk: past the page cache, in chunks, by
several threads.

Reads that pass the page cache (O_DIRECT) cost no copy and push nothing out of memory, but want
addresses, offsets and sizes in whole blocks. A file system that refuses them is read through the
cache, and its pages are given back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from threading import Lock

import numpy as np

from edgeshard.domain.models.residency import DISK_BLOCK_BYTES

ALIGNMENT = DISK_BLOCK_BYTES
"""Alignment of addresses, offsets and sizes, in bytes; no disk needs more."""
CHUNK_BYTES = 2 << 20
THREADS = 8
"""More than a disk needs: while some clear memory and take checksums, the chunks of others are on
their way."""
_PIECE_BYTES = 512 << 10
"""Piece of a read that may be abandoned: a running piece is not stopped, and the next read waits
for it."""
_CACHED_SHARE = 0.9
"""A file of whose pages this share is in memory is copied from there, which is faster than any
disk."""


def cached_share(path: Path) -> float:
    """The fraction of a file's pages that is in the page cache; 0 for an empty file, and if the
    system does not report it.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return 0.0
        # A private, writable mapping, because ctypes takes the address of no other; nothing is
        # written.
        with mmap.mmap(
            file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        ) as pages:
            count = -(-size // mmap.PAGESIZE)
            page_flags = (ctypes.c_ubyte * count)()
            anchor = ctypes.c_char.from_buffer(pages)
            mincore = ctypes.CDLL(None, use_errno=True).mincore
            try:
                refused = mincore(
                    ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), page_flags
                )
            finally:
                del anchor
            return (
                0.0
                if refused
                else int((np.frombuffer(bytes(page_flags), np.uint8) & 1).sum()) / count
            )


Wanted = Callable[[], bool]
"""Whether a read is still wanted."""


class ReadAbandonedError(Exception):
    """A read was abandoned before its end, because its data is no longer needed. The data it had
    filled is undefined.
    """


class ChunkReader:
    """Reads pieces of files into memory, `threads` chunks at a time.

    Reads of two threads follow each other without a pause: the second one's begin while the first
    one's last chunks are on their way.

    `pace` is called with the bytes of each chunk before it is read: measurements stand in for
    slower disks with it.
    """

    def __init__(
        self,
        checksum: Callable[[memoryview], int],
        threads: int = THREADS,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        """`checksum` is the CRC32C of the data read, for the caller's check."""
        self.checksum = checksum
        self._threads = threads
        self._pace = pace
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def read(
        self,
        path: Path,
        offset: int,
        into: memoryview,
        chunks: Sequence[int],
        arrived: Callable[[int, memoryview], None],
        *,
        cached: bool | None = None,
        is_wanted: Wanted | None = None,
    ) -> None:
        """Fill `into` with the file's bytes from `offset` on, in chunks of these sizes.

        Offset, address and sizes are in whole blocks. `arrived` is called by the reading thread
        with each chunk and its index; an exception from it ends the read. `cached`: read through
        the page cache or past it; by default, whichever is faster. `is_wanted` is called before
        each piece of 512 KiB. Raises OSError, EOFError if the file ends before, and
        ReadAbandonedError once it is not wanted.
        """
        through_cache = cached_share(path) >= _CACHED_SHARE if cached is None else cached
        with _opened(path, direct=not through_cache) as (file, is_direct):
            lock = Lock()
            places = enumerate(zip(accumulate(chunks, initial=0), chunks, strict=False))
            stopped = False

            def work() -> None:
                nonlocal stopped
                try:
                    while not stopped:
                        with lock:
                            item = next(places, None)
                        if item is None:
                            return
                        index, (place, size) = item
                        chunk = into[place : place + size]
                        self._read_chunk(file, chunk, offset + place, is_wanted)
                        arrived(index, chunk)
                except BaseException:
                    stopped = True
                    raise

            workers = [self._pool.submit(work) for _ in range(min(self._threads, len(chunks)))]
            errors = [error for worker in workers if (error := worker.exception()) is not None]
            if not through_cache and not is_direct:
                with suppress(OSError):
                    os.posix_fadvise(file, offset, len(into), os.POSIX_FADV_DONTNEED)
            if errors:
                raise errors[0]

    def _read_chunk(
        self, file: int, chunk: memoryview, offset: int, is_wanted: Wanted | None
    ) -> None:
        """Read a chunk at once; with `is_wanted` in pieces, and no more once it is not wanted."""
        most = _PIECE_BYTES if is_wanted is not None else max(1, len(chunk))
        for at in range(0, len(chunk), most):
            if is_wanted is not None and not is_wanted():
                raise ReadAbandonedError
            piece = chunk[at : at + most]
            if self._pace is not None:
                self._pace(len(piece))
            _fill(file, piece, offset + at)


def _fill(file: int, chunk: memoryview, offset: int) -> None:
    done = 0
    while done < len(chunk):
        count = os.preadv(file, [chunk[done:]], offset + done)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset + done}")
        done += count


@contextmanager
def _opened(path: Path, *, direct: bool) -> Iterator[tuple[int, bool]]:
    """The file's descriptor, and whether reads pass the page cache."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    file, is_direct = -1, False
    if direct and hasattr(os, "O_DIRECT"):
        try:
            file, is_direct = os.open(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    if file < 0:
        file = os.open(path, flags)
    try:
        yield file, is_direct
    finally:
        os.close(file)
