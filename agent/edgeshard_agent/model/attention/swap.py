"""The KV of requests that were swapped out, and their states: copies, in memory or in files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from edgeshard.domain.errors import InternalError, ResourceExhaustedError
from edgeshard.storage.files import free_bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    """One request's `parts`: the tensors in memory or, if there is a `file`, only their shapes and
    dtypes."""

    length: int
    count: int
    parts: Sequence[torch.Tensor]
    file: BinaryIO | None = None


class SwapSpace:
    """Room for copies of `blocks` KV blocks. With a directory they lie in files there, which have
    no name.

    Such a file ends with the process, however that ends.
    """

    def __init__(self, blocks: int = 0, directory: Path | None = None) -> None:
        self.blocks = blocks
        self.used = 0
        """Blocks kept."""
        self.swapped_out = 0
        """Requests that were put here so far, and that were taken back."""
        self.swapped_in = 0
        self._directory = directory
        self._kept: dict[int, _Kept] = {}

    @property
    def requests(self) -> frozenset[int]:
        return frozenset(self._kept)

    def length(self, request: int) -> int:
        """Number of kept positions of a request, 0 if the request is not here."""
        return self._kept[request].length if request in self._kept else 0

    def count(self, request: int) -> int:
        """Blocks kept of a request."""
        return self._kept[request].count if request in self._kept else 0

    def put(self, request: int, length: int, count: int, parts: Sequence[torch.Tensor]) -> None:
        """Keep `length` positions of a request: a copy of each of `parts`, which are its `count`
        blocks and its states.

        Raises ResourceExhaustedError if the disk is full.
        """
        if self._directory is None:
            entry = _Kept(length, count, [part.to("cpu", copy=True) for part in parts])
        else:
            shapes = [torch.empty_like(part, device="meta") for part in parts]
            entry = _Kept(length, count, shapes, _written(self._directory, parts))
        self._kept[request] = entry
        self.used += count
        self.swapped_out += 1

    def take(self, request: int) -> list[torch.Tensor]:
        """The parts that are kept of a request, on the CPU; they are kept no more."""
        entry = self._kept.pop(request)
        self.used -= entry.count
        self.swapped_in += 1
        if entry.file is None:
            return list(entry.parts)
        with entry.file as file:
            file.seek(0)
            return [_read(file, part) for part in entry.parts]

    def drop(self, request: int) -> None:
        """Forget a request, which may not be here."""
        entry = self._kept.pop(request, None)
        if entry is None:
            return
        self.used -= entry.count
        if entry.file is not None:
            entry.file.close()

    def clear(self) -> None:
        for request in list(self._kept):
            self.drop(request)


def _read(file: BinaryIO, part: torch.Tensor) -> torch.Tensor:
    """The next part of a file, of this shape and dtype."""
    memory = bytearray(part.numel() * part.itemsize)
    rest = memoryview(memory)
    while rest:  # one call reads no more than 2 GiB
        count = file.readinto(rest)  # type: ignore[attr-defined]  # a raw file has it
        if not count:
            raise InternalError("a file of swapped KV ends too early")
        rest = rest[count:]
    return torch.frombuffer(memory, dtype=part.dtype).view(part.shape)


def _written(directory: Path, parts: Sequence[torch.Tensor]) -> BinaryIO:
    """A file without a name that holds these parts; only this process can read it."""
    file: BinaryIO | None = None
    needed = sum(part.nbytes for part in parts)
    try:
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (it outlives this call)
        for part in parts:
            rest = part.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
            while rest:  # one call writes no more than 2 GiB, and less if the disk is nearly full
                rest = rest[file.write(rest) :]
    except OSError as error:
        if file is not None:
            file.close()
        raise ResourceExhaustedError(
            f"kv_swap_on_disk: KV to swap out needs {needed} bytes on the disk of {directory}, "
            "where "
            f"{free_bytes(directory)} are free: {error.strerror}; free space, or deploy without "
            "kv_swap_on_disk",
            field="kv_swap_on_disk",
            reason="KV_SWAP_DISK_FULL",
        ) from error
    return file
