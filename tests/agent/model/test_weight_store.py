"""Layers that are read two at a time count in their order."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from edgeshard_agent.model.weights.weight_store import WeightStore

from edgeshard.domain.errors import DataLossError
from edgeshard.domain.models.residency import DISK_BLOCK_BYTES

pytestmark = pytest.mark.timing

WAIT_S = 30.0


@dataclass
class Unit:
    """One layer's only unit, and its file: its read begins, and ends once it may."""

    fill: int
    fails: bool = False
    large_bytes: int = DISK_BLOCK_BYTES
    may_end: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    placed: torch.Tensor | None = None

    @property
    def file(self) -> Unit:
        return self

    def read_large(self, reader: object, into: memoryview, *, cached: bool) -> None:
        self.began.set()
        assert self.may_end.wait(WAIT_S)
        if self.fails:
            raise DataLossError(f"unit {self.fill} is damaged")
        into[:] = bytes([self.fill]) * len(into)
        self.ended.set()

    def place(self, memory: torch.Tensor | None) -> None:
        self.placed = memory


class Reads:
    """The reads that an observer received."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.spans: list[tuple[float, float]] = []

    def read(
        self, layer: int, size_bytes: int, began_s: float, ended_s: float, expert: int | None = None
    ) -> None:
        self.layers.append(layer)
        self.spans.append((began_s, ended_s))


def store_of(units: list[Unit]) -> WeightStore:
    layers: Any = [(index, [unit]) for index, unit in enumerate(units)]
    return WeightStore(layers, 2)


def test_a_layer_that_is_read_before_the_one_ahead_of_it_waits_for_it() -> None:
    units = [Unit(fill) for fill in (1, 2, 3)]
    store, reads = store_of(units), Reads()
    store.observer = reads
    assert units[0].began.wait(WAIT_S) and units[1].began.wait(WAIT_S), "two at once"
    units[1].may_end.set()
    assert units[1].ended.wait(WAIT_S)
    assert store.counts.layers_read == 0 and not units[2].began.is_set()
    units[0].may_end.set()
    units[2].may_end.set()
    for layer, unit in enumerate(units):
        store.acquire(layer)
        assert unit.placed is not None and unit.placed.unique().tolist() == [unit.fill]
        store.release(layer)
    store.close()
    assert reads.layers[:3] == [0, 1, 2]
    assert all(first[1] <= second[0] <= second[1] for first, second in pairwise(reads.spans))


def test_a_damaged_layer_fails_only_once_those_before_it_are_there() -> None:
    units = [Unit(1), Unit(2, fails=True)]
    store = store_of(units)
    units[1].may_end.set()
    assert units[0].began.wait(WAIT_S) and units[1].began.wait(WAIT_S)
    assert store.failure is None
    units[0].may_end.set()
    store.acquire(0)
    store.release(0)
    with pytest.raises(DataLossError, match="unit 2 is damaged"):
        store.acquire(1)
    store.close()


def test_closing_waits_for_reads_on_their_way_and_counts_none() -> None:
    units = [Unit(1), Unit(2), Unit(3)]
    store = store_of(units)
    assert units[0].began.wait(WAIT_S) and units[1].began.wait(WAIT_S)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    units[1].may_end.set()
    units[0].may_end.set()
    closing.join(WAIT_S)
    assert not closing.is_alive() and not units[2].began.is_set()
    assert store.counts.layers_read == 0
