"""What a stage keeps of requests that were swapped out: copies of their KV blocks, in memory or in files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from edgeshard.domain.errors import ResourceExhaustedError


@dataclass(frozen=True, slots=True)
class _Kept:
    """One request's `blocks` [parts, n, elements], in memory or as bytes of a file."""

    length: int
    count: int
    blocks: torch.Tensor | None
    file: BinaryIO | None = None


class SwapSpace:
    """Room for copies of `blocks` KV blocks. With a directory they lie in files there, which have no name.

    Such a file ends with the process, however that ends.
    """

    def __init__(self, blocks: int = 0, directory: Path | None = None) -> None:
        self.blocks = blocks
        self._directory = directory
        self._kept: dict[int, _Kept] = {}

    @property
    def used(self) -> int:
        """Blocks kept."""
        return sum(kept.count for kept in self._kept.values())

    @property
    def requests(self) -> frozenset[int]:
        return frozenset(self._kept)

    def length(self, request: int) -> int:
        """Positions kept of a request, 0 where it is not here."""
        return self._kept[request].length if request in self._kept else 0

    def count(self, request: int) -> int:
        """Blocks kept of a request."""
        return self._kept[request].count if request in self._kept else 0

    def put(self, request: int, length: int, blocks: torch.Tensor) -> None:
        """Keep `length` positions of a request, a copy of its blocks [parts, n, elements].

        Raises ResourceExhaustedError where the disk is full.
        """
        count = blocks.shape[1]
        if self._directory is None:
            self._kept[request] = _Kept(length, count, blocks.to("cpu", copy=True))
            return
        try:
            file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 (it outlives this call)
            file.write(blocks.cpu().contiguous().view(torch.uint8).numpy().data)
        except OSError as error:
            raise ResourceExhaustedError(f"no room to swap KV out to {self._directory}: {error}") from error
        self._kept[request] = _Kept(length, count, None, file)

    def take(self, request: int, out: torch.Tensor, blocks: Iterable[int]) -> None:
        """Put what is kept of a request into `blocks` of `out` [parts, all, elements], and keep it no more."""
        kept = self._kept.pop(request)
        places = list(blocks)
        if kept.file is None:
            assert kept.blocks is not None
            out[:, places] = kept.blocks.to(out.device)
            return
        with kept.file as file:
            file.seek(0)
            raw = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        out[:, places] = raw.view(out.dtype).view(out.shape[0], kept.count, out.shape[2]).to(out.device)

    def drop(self, request: int) -> None:
        """Forget a request, which may not be here."""
        kept = self._kept.pop(request, None)
        if kept is not None and kept.file is not None:
            kept.file.close()

    def clear(self) -> None:
        for request in list(self._kept):
            self.drop(request)
