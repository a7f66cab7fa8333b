"""The packed files of a node. Threads that load may use it while the event loop lists and drops
files."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from edgeshard.domain.errors import DataLossError, NotFoundError, ResourceExhaustedError
from edgeshard.domain.models.packed_units import PackedUnit
from edgeshard.storage.files import TEMPORARY
from edgeshard_agent.store.packed_files import (
    SUFFIX,
    PackedFile,
    UnitBytes,
    packed_bytes,
    write_packed,
)

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
    """A sort key that puts layer 2 before layer 10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in unit.split("-")]


class PackedUnits:
    """Packed files under `directory`, which one process owns. `limit` returns how many bytes all of
    them may take now.

    A caller that lowers the limit holds `lock` from its read of `used_bytes` on.
    """

    def __init__(self, directory: Path, limit: Callable[[], int] = lambda: sys.maxsize) -> None:
        self._directory = directory
        self._limit = limit
        self.lock = threading.RLock()
        self._pins: Counter[str] = Counter()
        self._writing = 0
        self._sizes: dict[str, int] | None = None
        self._changes = 0
        self._ids: tuple[int, ...] | None = None
        for stray in directory.glob("*" + TEMPORARY):
            stray.unlink()

    @property
    def used_bytes(self) -> int:
        """Bytes of all packed files; looked at once (`files`), and counted from then on. One that
        is written counts whole."""
        with self.lock:
            return sum(self._known().values()) + self._writing

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all packed files that are named as they should be, in order: `UnitForm.id` as
        numbers."""
        names = self._known()
        with self.lock:
            if self._ids is None:
                matches = (_NAME.fullmatch(name) for name in names)
                self._ids = tuple(sorted({int(parts[4], 16) for parts in matches if parts}))
            return self._ids

    def _known(self) -> dict[str, int]:
        """Sizes by name, which others do not change."""
        with self.lock:
            if self._sizes is not None:
                return self._sizes
        self.files()
        return self._known()

    def _note(self, name: str, size: int | None) -> None:
        """A file is there, or None: it is gone."""
        with self.lock:
            self._changes += 1
            if self._sizes is None or self._sizes.get(name) == size:
                return
            self._sizes = {
                other_name: other_size
                for other_name, other_size in self._sizes.items()
                if other_name != name
            }
            if size is not None:
                self._sizes[name] = size
            self._ids = None

    def files(self) -> list[PackedInfo]:
        """All packed files, least recently used first."""
        infos, changes = [], self._changes
        for path in self._directory.glob("*" + SUFFIX):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            name = path.name.removesuffix(SUFFIX)
            infos.append(PackedInfo(name, status.st_size, status.st_mtime_ns, self._pins[name] > 0))
        with self.lock:
            # else a scan slower than a write would forget the written file
            if self._changes == changes:
                self._sizes, self._ids = {info.name: info.size for info in infos}, None
        return sorted(infos, key=lambda info: info.used_ns)

    def units(self) -> tuple[PackedUnit, ...]:
        """All packed files as an operator sees them, by model and layer."""
        return tuple(unit for _, unit in self._named())

    def drop_units(self, ids: Sequence[str]) -> tuple[PackedUnit, ...]:
        """Remove these, or without any all that are not in use. Files in use stay, and the result
        reports them as in use.

        Raises NotFoundError naming the missing ones; then no file is removed.
        """
        named_units = self._named()
        if unknown := sorted(set(ids) - {unit.id for _, unit in named_units}):
            raise NotFoundError(
                f"there are no packed units {', '.join(unknown)[:400]}", field="ids"
            )
        victims = [
            (name, unit)
            for name, unit in named_units
            if (unit.id in ids if ids else not unit.in_use)
        ]
        dropped = tuple(replace(unit, in_use=not self._drop_unused(name)) for name, unit in victims)
        for unit in dropped:
            if not unit.in_use:
                log.info("packed_unit_dropped", model=unit.model, unit=unit.unit, form=unit.form)
        return dropped

    def _named(self) -> list[tuple[str, PackedUnit]]:
        named_units = []
        for info in self.files():
            if parts := _NAME.fullmatch(info.name):
                model, unit, form, id_ = parts.groups()
                named_units.append(
                    (info.name, PackedUnit(id_, model, unit, form, info.size, info.in_use))
                )
        return sorted(
            named_units, key=lambda named: (named[1].model, _in_order(named[1].unit), named[1].form)
        )

    def _drop_unused(self, name: str) -> bool:
        """Whether it is gone. It cannot be taken into use meanwhile."""
        with self.lock:
            if self._pins[name] > 0:
                return False
            self._path(name).unlink(missing_ok=True)
            self._note(name, None)
        return True

    def find(self, name: str, key: str) -> PackedFile:
        """The packed file of that key, which counts as used now.

        Raises DataLossError (PACKED_DAMAGED) for one that is gone or not as it was written, which
        is gone then.
        """
        path = self._path(name)
        try:
            file = PackedFile(path, key)
        except DataLossError:
            with self.lock:  # another load may just have made and counted it again
                path.unlink(missing_ok=True)
                self._note(name, None)
            raise
        with suppress(FileNotFoundError):  # its next reader notices it
            os.utime(path)
        return file

    def take(self, name: str, most: int | None = None) -> int | None:
        """Pin a file if it exists and has at most `most` bytes; return its size, or None if there
        is none.

        Undone by `unpin`.
        """
        with self.lock:
            try:
                size = self._path(name).stat().st_size
            except FileNotFoundError:
                self._note(name, None)  # what damaged it, or who removed it, did not say so
                return None
            if most is not None and size > most:
                return None
            self._pins[name] += 1
        return size

    def write(self, name: str, key: str, unit: UnitBytes) -> PackedFile | None:
        """Write a packed file; None if there is no room for it, on the disk or within the limit."""
        size = packed_bytes(key, unit)
        with self.lock:
            if self.used_bytes + size > self._limit():
                return None
            self._writing += size
        written = False
        try:
            write_packed(self._path(name), key, unit)
            written = True
        except ResourceExhaustedError as error:
            log.warning("packed_file_not_written", file=name, why=error.message)
            return None
        finally:
            with self.lock:
                self._writing -= size
                if written:
                    self._note(name, size)
        return PackedFile(self._path(name), key)

    def pin(self, names: Iterable[str]) -> None:
        """Do not drop these while they are in use; once for each `unpin`."""
        with self.lock:
            self._pins.update(names)

    def unpin(self, names: Iterable[str]) -> None:
        with self.lock:
            self._pins.subtract(names)
            self._pins += Counter()  # without unused ones

    def make_room(self, limit: int) -> None:
        """Drop files that are not in use, least recently used first, until all take at most `limit`
        bytes."""
        for info in self.files():
            if self.used_bytes <= limit:
                break
            if self._drop_unused(info.name):
                log.info("packed_file_evicted", file=info.name, bytes=info.size)

    def _path(self, name: str) -> Path:
        if name != Path(name).name or name.startswith("."):
            raise NotFoundError(f"{name!r} is not the name of a packed file", field="packed")
        return self._directory / (name + SUFFIX)
