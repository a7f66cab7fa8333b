"""The packed files of a box. Threads that load may use it while the event loop lists and drops files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from edgeshard.architectures import ModelShape
from edgeshard.architectures.units import EMBEDDING_UNIT, HEAD_UNIT, place_of_expert
from edgeshard.domain.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.errors import DataLossError, NotFoundError, ResourceExhaustedError
from edgeshard.domain.ids import Digest
from edgeshard.domain.packed import PackedUnit
from edgeshard.storage.files import TEMPORARY
from edgeshard_agent.store.packed import LAYOUT, SUFFIX, PackedEntry, PackedFile, write_packed

log = structlog.get_logger()

_NAME = re.compile(r"([0-9a-f]{12})-(.+)-([a-z0-9]+)-([0-9a-f]{16})")
"""As `UnitForm.name` makes it."""


@dataclass(frozen=True, slots=True)
class UnitForm:
    """How the units of a stage are packed; a packed file serves only what has the same. `model` is a manifest."""

    model: Digest
    dtype: DType
    quantisation: Quantisation | None
    shape: ModelShape

    def key(self, unit: str) -> str:
        """What must be equal for a file to serve as this unit."""
        return json.dumps(
            {
                "model": self.model,
                "unit": unit,
                "dtype": str(self.dtype),
                "integers": self._integers(unit),
                "layout": LAYOUT,
            },
            sort_keys=True,
        )

    def name(self, unit: str) -> str:
        """Of the unit's file: readable in its beginning, unique in its end."""
        form = self._integers(unit).partition("/")[0] or self.dtype
        return f"{self.model[:12]}-{unit}-{form}-{hashlib.sha256(self.key(unit).encode()).hexdigest()[:16]}"

    def _width(self, unit: str) -> IntegerFormat | None:
        """Of an expert that has one of its own."""
        place = place_of_expert(unit)
        return None if place is None or self.shape.expert_widths is None else self.shape.expert_widths.of(*place)

    def _integers(self, unit: str) -> str:
        if self.quantisation is None or unit == EMBEDDING_UNIT:
            return ""
        chosen = self.quantisation.head if unit == HEAD_UNIT else self._width(unit) or self.quantisation.blocks
        return "" if chosen is None else f"{chosen}/{self.shape.group_of(chosen)}"


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """A packed file by its name, without reading it."""

    name: str
    size: int
    used_ns: int
    in_use: bool


def _in_order(unit: str) -> list[tuple[int, str]]:
    """So that layer 2 comes before layer 10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in unit.split("-")]


class PackedUnits:
    """Packed files under `directory`, which one process owns. `limit` is how many more bytes may be written now."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._pins: Counter[str] = Counter()
        self._room = 0
        self._used: int | None = None
        for stray in directory.glob("*" + TEMPORARY):
            stray.unlink()

    @property
    def used_bytes(self) -> int:
        """Of all packed files; looked at once, and counted from then on."""
        with self._lock:
            if self._used is None:
                self._used = sum(info.size for info in self.files())
            return self._used

    def files(self) -> list[PackedInfo]:
        """All packed files, least recently used first."""
        found = []
        for path in self._directory.glob("*" + SUFFIX):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            name = path.name.removesuffix(SUFFIX)
            found.append(PackedInfo(name, status.st_size, status.st_mtime_ns, self._pins[name] > 0))
        return sorted(found, key=lambda info: info.used_ns)

    def units(self) -> tuple[PackedUnit, ...]:
        """All packed files as an operator sees them, by model and layer."""
        return tuple(unit for _, unit in self._named())

    def drop_units(self, ids: Sequence[str]) -> tuple[PackedUnit, ...]:
        """Remove these, or without any all that are not in use. Those in use stay, and are said to be so.

        Raises NotFoundError naming those that are not there; then none is removed.
        """
        found = self._named()
        if unknown := sorted(set(ids) - {unit.id for _, unit in found}):
            raise NotFoundError(f"there are no packed units {', '.join(unknown)[:400]}", field="ids")
        chosen = [(name, unit) for name, unit in found if (unit.id in ids if ids else not unit.in_use)]
        return tuple(replace(unit, in_use=not self._drop_unused(name)) for name, unit in chosen)

    def _named(self) -> list[tuple[str, PackedUnit]]:
        found = []
        for info in self.files():
            if parts := _NAME.fullmatch(info.name):
                model, unit, form, id_ = parts.groups()
                found.append((info.name, PackedUnit(id_, model, unit, form, info.size, info.in_use)))
        return sorted(found, key=lambda named: (named[1].model, _in_order(named[1].unit), named[1].form))

    def _drop_unused(self, name: str) -> bool:
        """Whether it is gone. Nobody begins to use it meanwhile."""
        with self._lock:
            if self._pins[name] > 0:
                return False
            self._path(name).unlink(missing_ok=True)
            self._used = None
        log.info("packed_file_dropped", file=name)
        return True

    def find(self, name: str, key: str) -> PackedFile | None:
        """The packed file of that key, which counts as used now; None where there is none.

        Raises DataLossError (PACKED_DAMAGED) for one that is not as it was written, which is gone then.
        """
        path = self._path(name)
        try:
            if not path.exists():
                return None
            found = PackedFile(path, key)
            os.utime(path)
            return found
        except FileNotFoundError:
            return None
        except DataLossError:
            path.unlink(missing_ok=True)
            self._forget_size()
            raise

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def allow(self, size: int) -> None:
        """So many bytes may be written from now on."""
        with self._lock:
            self._room = size

    def write(
        self,
        name: str,
        key: str,
        entries: Iterable[PackedEntry],
        small: bytes,
        large: Iterable[memoryview],
        large_bytes: int,
    ) -> PackedFile | None:
        """Write a packed file; None where there is no room for it, on the disk or within the limit."""
        with self._lock:
            if len(small) + large_bytes > self._room:
                return None
            self._room -= len(small) + large_bytes
        try:
            write_packed(self._path(name), key, entries, small, large, large_bytes)
        except ResourceExhaustedError as error:
            log.warning("packed_file_not_written", file=name, why=error.message)
            return None
        finally:
            self._forget_size()
        return PackedFile(self._path(name), key)

    def _forget_size(self) -> None:
        with self._lock:
            self._used = None

    def pin(self, names: Iterable[str]) -> None:
        """Do not drop these while they are in use; once for each `unpin`."""
        with self._lock:
            self._pins.update(names)

    def unpin(self, names: Iterable[str]) -> None:
        with self._lock:
            self._pins.subtract(names)
            self._pins += Counter()  # without those that nobody uses

    def drop(self, name: str) -> int:
        """Remove a packed file, used or not; returns its bytes. Raises NotFoundError."""
        path = self._path(name)
        try:
            size = path.stat().st_size
            path.unlink()
            self._forget_size()
        except FileNotFoundError:
            raise NotFoundError(f"there is no packed file {name!r}", field="packed") from None
        return size

    def make_room(self, size: int, limit: int) -> int:
        """Drop files that are not in use, least recently used first, until `size` bytes more stay within `limit`.

        Returns how many bytes there is room for.
        """
        files = self.files()
        used = sum(info.size for info in files)
        for info in files:
            if used + size <= limit:
                break
            if not info.in_use:
                log.info("packed_file_evicted", file=info.name, bytes=info.size)
                used -= self.drop(info.name)
        return max(0, limit - used)

    def _path(self, name: str) -> Path:
        if name != Path(name).name or name.startswith("."):
            raise NotFoundError(f"{name!r} is no name of a packed file", field="packed")
        return self._directory / (name + SUFFIX)
