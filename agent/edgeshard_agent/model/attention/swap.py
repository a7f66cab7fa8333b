"""The KV of requests that were swapped out: copies of their KV blocks, in memory or in files."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from edgeshard.domain.errors import ResourceExhaustedError


@dataclass(frozen=True, slots=True)
class _Kept:
    """One request's `blocks`, each [parts, n, elements], in memory or as bytes of a file."""

    length: int
    count: int
    blocks: Sequence[torch.Tensor] = ()
    file: BinaryIO | None = None


class SwapSpace:
    """Room for copies of `blocks` KV blocks. With a directory they lie in files there, which have no name.

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
        """Positions kept of a request, 0 where it is not here."""
        return self._kept[request].length if request in self._kept else 0

    def count(self, request: int) -> int:
        """Blocks kept of a request."""
        return self._kept[request].count if request in self._kept else 0

    def put(self, request: int, length: int, blocks: Sequence[torch.Tensor]) -> None:
        """Keep `length` positions of a request, copies of its blocks, each [parts, n, elements].

        Raises ResourceExhaustedError where the disk is full.
        """
        count = blocks[0].shape[1]
        if self._directory is None:
            kept = _Kept(length, count, [part.to("cpu", copy=True) for part in blocks])
        else:
            kept = _Kept(length, count, file=_written(self._directory, blocks))
        self._kept[request] = kept
        self.used += count
        self.swapped_out += 1

    def take(self, request: int, out: Sequence[torch.Tensor], blocks: Iterable[int]) -> None:
        """Put what is kept of a request into `blocks` of `out`, each [parts, all, elements], and keep it no more."""
        kept = self._kept.pop(request)
        self.used -= kept.count
        self.swapped_in += 1
        places = list(blocks)
        if kept.file is None:
            for memory, part in zip(out, kept.blocks, strict=True):
                memory[:, places] = part.to(memory.device)
            return
        with kept.file as file:
            file.seek(0)
            raw = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        for memory in out:
            shape = memory.shape[0], kept.count, memory.shape[2]
            size = math.prod(shape) * memory.itemsize
            memory[:, places] = raw[:size].view(memory.dtype).view(shape).to(memory.device)
            raw = raw[size:]

    def drop(self, request: int) -> None:
        """Forget a request, which may not be here."""
        kept = self._kept.pop(request, None)
        if kept is None:
            return
        self.used -= kept.count
        if kept.file is not None:
            kept.file.close()

    def clear(self) -> None:
        for request in list(self._kept):
            self.drop(request)


def _written(directory: Path, blocks: Sequence[torch.Tensor]) -> BinaryIO:
    """A file without a name that holds these blocks, which nobody but this process can read."""
    file: BinaryIO | None = None
    try:
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (it outlives this call)
        for part in blocks:
            rest = part.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
            while rest:  # one call writes no more than 2 GiB, and less where the disk is nearly full
                rest = rest[file.write(rest) :]
    except OSError as error:
        if file is not None:
            file.close()
        raise ResourceExhaustedError(
            f"kv_swap_on_disk: no room to swap KV out to {directory}: {error}",
            field="kv_swap_on_disk",
            reason="KV_SWAP_DISK_FULL",
        ) from error
    return file
