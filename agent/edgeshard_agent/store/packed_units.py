"""The packed files of a box. Threads that load may use it while the event loop lists and drops files."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from edgeshard.domain.errors import DataLossError, NotFoundError, ResourceExhaustedError
from edgeshard.domain.packed import PackedUnit
from edgeshard.storage.files import TEMPORARY
from edgeshard_agent.store.packed import SUFFIX, PackedEntry, PackedFile, write_packed

log = structlog.get_logger()

_NAME = re.compile(r"([0-9a-f]{12})-(.+)-([a-z0-9]+)-([0-9a-f]{16})")
"""As `UnitForm.name` makes it."""


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
        self._sizes: dict[str, int] | None = None
        self._changes = 0
        self._ids: tuple[int, ...] | None = None
        for stray in directory.glob("*" + TEMPORARY):
            stray.unlink()

    @property
    def used_bytes(self) -> int:
        """Of all packed files; looked at once (`files`), and counted from then on."""
        return sum(self._known().values())

    @property
    def ids(self) -> tuple[int, ...]:
        """Of all packed files that are named as they should be, in order: `UnitForm.id` as numbers."""
        known = self._known()
        with self._lock:
            if self._ids is None:
                found = (_NAME.fullmatch(name) for name in known)
                self._ids = tuple(sorted({int(parts[4], 16) for parts in found if parts}))
            return self._ids

    def _known(self) -> dict[str, int]:
        """Sizes by name, which others do not change."""
        with self._lock:
            if self._sizes is not None:
                return self._sizes
        self.files()
        return self._known()

    def _note(self, name: str, size: int | None) -> None:
        """A file is there, or None: it is gone."""
        with self._lock:
            self._changes += 1
            if self._sizes is None or self._sizes.get(name) == size:
                return
            self._sizes = {known: held for known, held in self._sizes.items() if known != name}
            if size is not None:
                self._sizes[name] = size
            self._ids = None

    def files(self) -> list[PackedInfo]:
        """All packed files, least recently used first."""
        found, changes = [], self._changes
        for path in self._directory.glob("*" + SUFFIX):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            name = path.name.removesuffix(SUFFIX)
            found.append(PackedInfo(name, status.st_size, status.st_mtime_ns, self._pins[name] > 0))
        with self._lock:
            if self._changes == changes:  # else a look that was slower than a write would forget what was written
                self._sizes, self._ids = {info.name: info.size for info in found}, None
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
        self._note(name, None)
        log.info("packed_file_dropped", file=name)
        return True

    def find(self, name: str, key: str) -> PackedFile | None:
        """The packed file of that key, which counts as used now; None where there is none.

        Raises DataLossError (PACKED_DAMAGED) for one that is not as it was written, which is gone then.
        """
        path = self._path(name)
        try:
            if not self.has(name):
                return None
            found = PackedFile(path, key)
            os.utime(path)
            return found
        except FileNotFoundError:
            return None
        except DataLossError:
            path.unlink(missing_ok=True)
            self._note(name, None)
            raise

    def has(self, name: str) -> bool:
        there = self._path(name).exists()
        if not there:
            self._note(name, None)  # what damaged it, or who removed it, did not say so
        return there

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
        self._note(name, self._path(name).stat().st_size)
        return PackedFile(self._path(name), key)

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
            self._note(name, None)
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
