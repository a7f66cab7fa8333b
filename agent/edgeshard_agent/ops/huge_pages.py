"""Memory for what a processor reads in every step: huge pages where the system has them.

A core that reads gigabytes in pages of 4 KiB spends much of its time on looking addresses up. The
kernel gives huge pages only to private mappings that ask for them. Python's own anonymous mappings
are shared ones: there the kernel ignores the request, unless
`/sys/kernel/mm/transparent_hugepage/shmem_enabled` says otherwise.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch

HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
"""A cache line."""


class Arena:
    """Hands out pieces of large chunks, so that small tensors share huge pages.

    A chunk goes back to the system when the last tensor in it is gone. The unused end of a chunk is
    never touched and takes no memory, but for the rest of one huge page.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._next = self._end = 0
        # agents in one process share it, and each packs in a thread of its own
        self._lock = threading.Lock()

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, alignment: int = _ALIGNMENT
    ) -> torch.Tensor:
        """A tensor in memory of its own, aligned to a cache line or more. Raises MemoryError."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if rounded > self._chunk_bytes:
            return mapped(shape, dtype)
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            offset = self._next + -self._next % alignment
            if chunk is None or self._end - offset < rounded:
                chunk, offset = _mapping(self._chunk_bytes)
                self._end = offset + self._chunk_bytes
                self._chunk = weakref.ref(chunk)
            self._next = offset + rounded
        return _tensor(chunk, offset, shape, dtype)

    def part(self) -> None:
        """Have what is taken from now on share no chunk with what was taken before, so that the two
        go separately."""
        with self._lock:
            self._chunk = None


WEIGHTS = Arena()
"""For the weights of every stage in this process."""
SMALL_WEIGHTS = Arena()
"""For small weights that stay when the large ones beside them leave memory, and would hold whole
chunks back."""


def mapped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in a mapping of its own, which the system has back as soon as it is gone.
    Raises MemoryError.

    Its whole huge pages are asked for as such; what is left over comes in ordinary pages.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return _tensor(*_mapping(size), shape, dtype)


def _mapping(size: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where in it `size` bytes begin at the start of a huge page."""
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(-1, size)
            return memory, 0
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"the system has no {size} bytes: {error}") from error
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
    whole = size // HUGE_PAGE * HUGE_PAGE
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them; ordinary pages do
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory, start


def _tensor(
    memory: mmap.mmap, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(
        tuple(shape)
    )
