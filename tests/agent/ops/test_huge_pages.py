"""Memory in huge pages: what the kernel gives, and that nobody holds on to what is gone."""

from __future__ import annotations

import mmap
import re
import struct
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.ops import huge_pages
from edgeshard_agent.ops.huge_pages import HUGE_PAGE, Arena
from edgeshard_agent.ops.linear import PackedLinear

from edgeshard.architectures import KvHeads
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange

_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    arena = Arena()
    pieces = [arena.take((size,), torch.uint8) for size in (1, 64, 65, 70 << 20, 3)]
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert all(first % 64 == 0 for first, _ in spans)
    assert all(end <= following for (_, end), (following, _) in pairwise(spans))


def test_a_piece_has_the_shape_and_the_type_asked_for() -> None:
    arena = Arena(1 << 20)
    for shape in ((3, 5), (2, 1 << 20), (0, 4)):
        piece = arena.take(shape, torch.bfloat16)
        assert piece.shape == shape and piece.dtype is torch.bfloat16 and piece.is_contiguous()


def test_a_chunk_is_gone_with_its_last_piece_and_not_before() -> None:
    arena = Arena()
    first, second = (arena.take((8,), torch.float32) for _ in range(2))
    chunk = arena._chunk
    assert chunk is not None
    del first
    assert chunk() is not None
    second.fill_(3.0)
    del second
    assert chunk() is None, "the arena keeps a chunk that nobody uses"
    assert arena.take((8,), torch.float32).fill_(1.0).sum() == 8.0


def test_threads_that_take_at_the_same_time_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compute threads of two agents in one process do: both would be given the same
    memory."""
    real = huge_pages._mapping
    meeting = threading.Barrier(2)
    met = []

    def mapping(size: int) -> object:
        try:
            meeting.wait(0.2)
            met.append(size)
        except threading.BrokenBarrierError:  # nobody came
            pass
        return real(size)

    monkeypatch.setattr(huge_pages, "_mapping", mapping)
    arena = Arena()
    threads = [threading.Thread(target=arena.take, args=((64,), torch.uint8)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met


@pytest.mark.parametrize("bytes_wanted", [1 << 60, 1 << 70])
def test_want_of_memory_is_said_as_such(bytes_wanted: int) -> None:
    with pytest.raises(MemoryError, match="the system has no"):
        huge_pages.mapped((bytes_wanted,), torch.uint8)


@pytest.mark.skipif(
    not _MODE.is_file() or "[always]" in _MODE.read_text(),
    reason="this kernel gives huge pages to everybody",
)
@pytest.mark.parametrize("size", [4096, HUGE_PAGE + 4096])
def test_no_more_is_resident_than_was_asked_for(size: int) -> None:
    """Not a whole huge page for a few bytes, nor for the end of a tensor."""
    memory, start = huge_pages._mapping(size)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    everything[start : start + size].fill_(1)
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(everything.data_ptr() // mmap.PAGESIZE * 8)
        entries = struct.unpack(
            f"<{len(memory) // mmap.PAGESIZE}Q", pages.read(len(memory) // mmap.PAGESIZE * 8)
        )
    assert sum(entry >> 63 for entry in entries) * mmap.PAGESIZE == size


@pytest.mark.skipif(
    not _MODE.is_file() or "[never]" in _MODE.read_text(),
    reason="this kernel gives no huge pages to those who ask",
)
class TestAnonHugePages:
    def test_packed_weights_lie_in_huge_pages(self) -> None:
        rows, columns = 4096, 8192
        layer = PackedLinear.pack(torch.ones(rows, columns), "bf16")
        assert layer._native is not None, "the native library is missing"
        assert layer.packed_memory is not None
        resident, huge = _resident(layer.packed_memory)
        assert resident >= 2 * rows * columns
        assert huge >= 0.9 * resident

    def test_a_kv_pool_lies_in_huge_pages_and_is_resident_as_a_whole(self) -> None:
        pool = KvPool(
            LayerRange(0, 4), KvMemory(DType.BFLOAT16, 256, 16), [KvHeads(8, 128)] * 4, "cpu"
        )
        resident, huge = _resident(pool.arena(0).keys)
        assert pool.bytes_capacity == 64 << 20
        assert pool.bytes_capacity <= resident < pool.bytes_capacity + HUGE_PAGE
        assert huge >= 0.9 * resident


def _resident(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of the mappings around a tensor that are resident, and how many of them in huge pages.

    A mapping is in two parts, one after the other, where only its first part asked for huge pages.
    """
    address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    resident = huge = 0
    for entry in re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    )[1:]:
        first, last = (int(part, 16) for part in entry.split(" ", 1)[0].split("-"))
        if first < end and last > address:
            resident += _kilobytes(entry, "Rss")
            huge += _kilobytes(entry, "AnonHugePages")
    return resident, huge


def _kilobytes(entry: str, key: str) -> int:
    found = re.search(rf"^{key}: +(\d+) kB", entry, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10
