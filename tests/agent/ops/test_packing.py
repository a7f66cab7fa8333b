"""The memory of packed weights."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from edgeshard_agent.ops import packing
from edgeshard_agent.ops.packing import _Arena


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    arena = _Arena()
    pieces = [arena.take(size) for size in (1, 64, 65, 70 << 20, 3)]
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert all(first % 64 == 0 for first, _ in spans)
    assert all(end <= following for (_, end), (following, _) in pairwise(spans))


def test_threads_that_pack_at_the_same_time_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compute threads of two agents in one process do: both would be given the same memory."""
    real, meeting, met = packing._huge_pages, threading.Barrier(2), []

    def pages(size: int) -> torch.Tensor:
        try:
            meeting.wait(0.2)
            met.append(size)
        except threading.BrokenBarrierError:  # nobody came
            pass
        return real(size)

    monkeypatch.setattr(packing, "_huge_pages", pages)
    arena = _Arena()
    threads = [threading.Thread(target=arena.take, args=(64,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
