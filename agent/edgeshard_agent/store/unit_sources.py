"""The sources of a load's units: chosen once, and pinned from then on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import cached_property

from edgeshard.architectures.units import UnitForm
from edgeshard_agent.store.packed_files import PackedFile, UnitBytes
from edgeshard_agent.store.packed_units import PackedUnits


class UnitSources:
    """Whether each unit of one load comes from its packed file or from the blobs of its tensors.

    `tensors` has the canonical names of the tensors in each unit that is to be loaded. Until
    `choose`, all of them come from blobs. The choice decides what is fetched and what is read.
    Files that were chosen, and files that the load writes, are pinned until `release`. A thread may
    use it while another one releases it.
    """

    def __init__(
        self, units: PackedUnits, form: UnitForm, tensors: Mapping[str, frozenset[str]]
    ) -> None:
        self.tensors = tensors
        self.sizes: dict[str, int] = {}
        """Bytes of the packed files that were chosen, by unit."""
        self._units = units
        self._form = form
        self._lock = threading.Lock()
        self._pinned: set[str] = set()
        self._is_released = False

    def choose(self, most: Mapping[str, int] | None = None) -> None:
        """Take the packed file of each unit that has one. With `most`, a file larger than the
        unit's entry is not taken.

        Called once, before anything is fetched or read.
        """
        for unit in self.tensors:
            with self._lock:
                if self._is_released:
                    return
                size = self._units.take(self._form.name(unit), None if most is None else most[unit])
                if size is not None:
                    self.sizes[unit] = size
                    self._pinned.add(unit)

    @cached_property
    def from_blobs(self) -> frozenset[str]:
        """Canonical names of the tensors that are loaded from blobs; one of two units may be in a
        packed file too."""
        return frozenset().union(
            *(names for unit, names in self.tensors.items() if unit not in self.sizes)
        )

    @property
    def kept(self) -> frozenset[str]:
        """Units whose packed files this load uses or has written."""
        with self._lock:
            return frozenset(self._pinned)

    def find(self, unit: str) -> PackedFile | None:
        """The packed file of a unit, which counts as used now; None if blobs were chosen.

        Raises DataLossError (PACKED_DAMAGED) for one that is not as it was written any more, or
        gone.
        """
        if unit not in self.sizes:
            return None
        return self._units.find(self._form.name(unit), self._form.key(unit))

    def write(self, unit: str, data: UnitBytes) -> PackedFile | None:
        """Write a unit's packed file and pin it; None if there is no room for it, or if the load
        has ended."""
        name = self._form.name(unit)
        with self._lock:
            if self._is_released:
                return None
            self._units.pin([name])
            self._pinned.add(unit)
        written = self._units.write(name, self._form.key(unit), data)
        if written is None:
            self._unpin({unit})
        return written

    def release(self) -> None:
        """Pin nothing any more; twice is harmless."""
        with self._lock:
            self._is_released = True
        self._unpin(self.kept)

    def _unpin(self, units: Iterable[str]) -> None:
        with self._lock:
            released_units = self._pinned & set(units)
            self._pinned -= released_units
        self._units.unpin(self._form.name(unit) for unit in released_units)
