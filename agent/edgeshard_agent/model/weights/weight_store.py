"""Weights of a stage that does not fit into memory: layers pass through a few slots while others
compute.

The slots are a ring, because layers are always used in the same order (ZeRO-Inference).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.models.residency import in_disk_blocks
from edgeshard_agent.model.weights.packed_modules import AdoptedUnit, unit_checksum
from edgeshard_agent.ops.huge_pages import mapped
from edgeshard_agent.store.direct import ChunkReader


@dataclass(slots=True)
class StoreCounts:
    """Counts of a weight store since it began: bytes read, reads, and seconds that steps waited for
    them.

    Read n is for layer n % layers, into slot n % slots; reads below `layers_read` are finished.
    """

    bytes_read: int = 0
    layers_read: int = 0
    waited_s: float = 0.0


class ReadObserver(Protocol):
    """Told of every read, one after the other, on a thread that reads; times are monotonic seconds
    of this machine.

    `expert` is the expert of the layer that was read, None if the read has all streamed data of the
    layer.
    """

    def read(
        self, layer: int, size_bytes: int, began_s: float, ended_s: float, expert: int | None = None
    ) -> None: ...


UNITS_AT_ONCE = 2
"""Layers, or other units, that are read at once."""


class WeightStore:
    """`units` are the streamed layers in the order they run, each with its packed units.

    One thread acquires and releases them in that order, round after round. Others read ahead into
    free slots, two layers at a time, so that the disk does not pause between the chunks of two
    layers. After a failed step the next one may begin with any layer.
    """

    def __init__(self, layers: Sequence[tuple[int, Sequence[AdoptedUnit]]], slots: int) -> None:
        self._layers = [(index, tuple(units)) for index, units in layers]
        self._places = {index: place for place, (index, _) in enumerate(self._layers)}
        size = max(sum(unit.large_bytes for unit in units) for _, units in self._layers)
        self._slots = [
            mapped((in_disk_blocks(size),), torch.uint8)
            for _ in range(min(slots, len(self._layers)))
        ]
        self._changed = threading.Condition()
        self._begun = 0
        """Reads begun. Some may be finished before an earlier one: they count once that one has
        finished."""
        self._used = 0
        """Reads that were used or passed over; those from here up to `counts.layers_read` are in
        memory."""
        self.failure: EdgeShardError | None = None
        """Why nothing can be read any more."""
        self._closed = False
        self.counts = StoreCounts()
        self._ended_s = 0.0
        """End of the last read that an observer received."""
        self.observer: ReadObserver | None = None
        self._reader = ChunkReader(unit_checksum)
        names = [f"weights-{index}" for index in range(UNITS_AT_ONCE)]
        self._threads = [
            threading.Thread(target=self._read_ahead, name=name, daemon=True) for name in names
        ]
        for thread in self._threads:
            thread.start()

    @property
    def streamed_bytes(self) -> int:
        """Bytes that one round reads."""
        return sum(unit.large_bytes for _, units in self._layers for unit in units)

    def streams(self, layer: int) -> bool:
        return layer in self._places

    def acquire(self, layer: int) -> None:
        """Wait until the layer is in memory. Raises DataLossError if its file is damaged."""
        place, count = self._places[layer], len(self._layers)
        began = time.monotonic()
        with self._changed:
            # Layers that a failed step left out are passed over.
            skipped = (place - self._used) % count
            for _ in range(skipped):
                self._pass_one()
            while self.counts.layers_read <= self._used:
                if self.failure is not None:
                    raise self.failure
                if self._closed:
                    raise InternalError("weights were used after they were given back")
                self._changed.wait()
        self.counts.waited_s += time.monotonic() - began
        slot = self._slots[self._used % len(self._slots)]
        offset = 0
        for unit in self._layers[place][1]:
            unit.place(slot[offset : offset + unit.large_bytes])
            offset += unit.large_bytes

    def release(self, layer: int) -> None:
        """Free the layer's slot, which the next layer is read into: it is not needed any more in
        this round."""
        for unit in self._layers[self._places[layer]][1]:
            unit.place(None)
        with self._changed:
            self._pass_one()

    def _pass_one(self) -> None:
        while self.counts.layers_read <= self._used and not self._is_over:
            self._changed.wait()  # reads on their way cannot be called back
        self._used += 1
        self._changed.notify_all()

    def close(self) -> None:
        """Give the slots back, once the reads on their way have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._reader.close()
        for _, units in self._layers:
            for unit in units:
                unit.place(None)
        self._slots.clear()

    def _read_ahead(self) -> None:
        while (number := self._next()) is not None:
            began = time.monotonic()
            failure = None
            size = 0
            try:
                size = self._read_layer(number)
            except EdgeShardError as error:
                failure = error
            except Exception as error:
                failure = InternalError(f"reading weights failed: {type(error).__name__}: {error}")
            self._end(number, size, began, failure)

    def _next(self) -> int | None:
        """The number of the next read, once there is a slot for it; None if there will be no
        more."""
        with self._changed:
            while not self._is_over and self._begun - self._used >= len(self._slots):
                self._changed.wait()
            if self._is_over:
                return None
            self._begun += 1
            return self._begun - 1

    def _end(self, number: int, size: int, began: float, failure: EdgeShardError | None) -> None:
        """A read has ended, which counts once those before it have."""
        with self._changed:
            while not self._is_over and self.counts.layers_read != number:
                self._changed.wait()
            if failure is not None and not self._is_over:
                self.failure = failure
            elif not self._is_over:
                self.counts.bytes_read += size
                self.counts.layers_read += 1
                if (observer := self.observer) is not None:
                    # Until the one before it had ended, the disk was that one's.
                    began, self._ended_s = max(began, self._ended_s), time.monotonic()
                    observer.read(
                        self._layers[number % len(self._layers)][0], size, began, self._ended_s
                    )
            self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self._closed or self.failure is not None

    def _read_layer(self, number: int) -> int:
        _, units = self._layers[number % len(self._layers)]
        slot, offset = self._slots[number % len(self._slots)].numpy().data, 0
        for unit in units:
            # Past the page cache: the data of every step's reads would evict everything else.
            unit.file.read_large(
                self._reader, slot[offset : offset + unit.large_bytes], cached=False
            )
            offset += unit.large_bytes
        return offset
