"""Other owners' files that a store uses in their place, with a note of each blob's bytes.

A model on the store's own machine is not copied if that can be avoided. `take` chooses, in this
order:

1. a hard link `linked/NAME` to the file, if it is on the store's file system and the process may
   link to it;
2. a clone, if the file system can share blocks;
3. the file itself, read in place, unless it is temporary (`LocalFile.stays`);
4. a copy.

Callers of `edgeshard.client.uploads.add_model` need do nothing for a file of another user, such as
Ollama's, or of another disk: it is read in place.

`linked/NAME.json` has the offset and the size of each blob, and the path from which the file was
added. A hard link keeps the bytes when their owner deletes the file, and not when the owner writes
into it. So each reader of a blob compares the sha256 of the bytes. The note of a file that is read
in place has its size and time of change as well (`Stamp`), which each read compares first. Small
files, which are read again and again, are copied instead (`copy`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, BinaryIO

from edgeshard.domain.control.site import WeightsFile
from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.domain.ids import Digest, check_digest
from edgeshard.domain.models.model import RowOrder
from edgeshard.storage.files import TEMPORARY, check_room, naming_full_disk, sync, write_atomically
from edgeshard.storage.forms import parse_json_object
from edgeshard.storage.locations import BlobLocation, Stamp, changed_file

_CLONE = 0x40049409
"""FICLONE of linux/fs.h: the new file shares all blocks of the old one until either is written
to."""
_COPY_BYTES = 4 << 20
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NOTE = ".json"
_NOTE_LIMIT_BYTES = 64 << 20
_NEVER = Stamp(0, 0)
"""The stamp of a file that is not read any more; no file with a blob has it."""


class LinkedFiles:
    """The directory of linked files. Blocking; safe to call from any thread, and to read from
    another process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._read_at: int | None = None
        self._notes: dict[Path, dict[Digest, BlobLocation]] = {}
        """The blobs of each note."""
        self._note_of: dict[Digest, Path] = {}

    def take(
        self, source: Path, file: BinaryIO, room_bytes: Callable[[], int], *, stays: bool = False
    ) -> BlobLocation:
        """The place of the bytes of the open `file`, which lies at `source`; no blob is in it yet.

        If it `stays`, the file itself is read in place of a copy. `room_bytes` gives the bytes that
        a copy may have. Raises ResourceExhaustedError for a full disk.
        """
        status = os.fstat(file.fileno())
        with self._temporary() as temporary:
            if _hard_linked(source, file, temporary) or _cloned(file, temporary):
                path = self._named(temporary)
            elif stays:
                return BlobLocation(
                    source, 0, status.st_size, source=source, stamp=Stamp.of(status)
                )
            else:
                _copied(file, temporary, room_bytes)
                path = self._named(temporary)
        return BlobLocation(path, 0, status.st_size, source=source)

    def copy(self, file: BinaryIO, room_bytes: Callable[[], int]) -> BlobLocation:
        """The place of the bytes in a file of this directory that has no other owner."""
        with self._temporary() as temporary:
            if not _cloned(file, temporary):
                _copied(file, temporary, room_bytes)
            path = self._named(temporary)
        return BlobLocation(path, 0, path.stat().st_size)

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        """The path of a new file; there is none of that name afterwards."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.directory / f"{uuid.uuid4().hex}{TEMPORARY}"
        try:
            with naming_full_disk(temporary):
                yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _named(self, temporary: Path) -> Path:
        path = temporary.with_suffix("")
        temporary.rename(path)
        return path

    def keep(self, blobs: Mapping[Digest, BlobLocation]) -> None:
        """Note the places of these blobs; earlier notes lose them."""
        with self._lock:
            self._refresh()
            earlier = {self._note_of[digest] for digest in blobs if digest in self._note_of}
            notes = {path: self._new_note(path) for path in {at.path for at in blobs.values()}}
            for path, note in notes.items():
                added = {digest: at for digest, at in blobs.items() if at.path == path}
                self._write(note, {**self._notes.get(note, {}), **added})
            for note in earlier - set(notes.values()):
                self._write(
                    note, {of: at for of, at in self._notes[note].items() if of not in blobs}
                )

    def find(self, digest: Digest) -> BlobLocation | None:
        """The place of a blob; None if it is not here, or its file is not as it was added
        (`lost`)."""
        at = self._noted(digest)
        return replace(at, is_linked=True) if at is not None and at.is_readable else None

    def lost(self, digest: Digest) -> DataLossError | None:
        """The error that names the file of a blob that was here, if the file is not as it was
        added; else None."""
        at = self._noted(digest)
        return None if at is None or at.is_readable else changed_file(at)

    def distrust(self, digest: Digest) -> DataLossError | None:
        """Read nothing from the file of this blob any more: its bytes do not match their sha256.

        The error that names the file; None if no file has the blob.
        """
        with self._lock:
            self._refresh()
            note = self._note_of.get(digest)
            if note is None:
                return None
            self._write(
                note, {of: replace(at, stamp=_NEVER) for of, at in self._notes[note].items()}
            )
            return changed_file(self._notes[note][digest])

    def digests(self) -> Collection[Digest]:
        """The digests of all blobs that are noted."""
        with self._lock:
            self._refresh()
            return tuple(self._note_of)

    def files_of(self, digests: Collection[Digest]) -> tuple[WeightsFile, ...]:
        """The files outside of the store that have these blobs, by path."""
        with self._lock:
            self._refresh()
            noted = [
                self._notes[self._note_of[digest]][digest]
                for digest in digests
                if digest in self._note_of
            ]
        sizes: Counter[tuple[Path, bool]] = Counter()
        last: dict[tuple[Path, bool], BlobLocation] = {}
        for at in noted:
            if at.source is not None:
                key = (at.source, at.path == at.source)
                sizes[key] += at.size
                last[key] = max(last.get(key, at), at, key=lambda location: location.offset)
        return tuple(
            WeightsFile(str(source), size, in_place, not last[source, in_place].is_readable)
            for (source, in_place), size in sorted(sizes.items())
        )

    def remove(self, digests: Collection[Digest]) -> None:
        """Forget blobs, and drop the files of this directory in which no other is left."""
        with self._lock:
            self._refresh()
            removals = self._note_of.keys() & digests
            for note in {self._note_of[digest] for digest in removals}:
                self._write(
                    note, {of: at for of, at in self._notes[note].items() if of not in removals}
                )

    def drop_unused(self, paths: Collection[Path] | None = None) -> None:
        """Remove files in which no blob is noted: of `paths`, or of all files, such as a process
        left that died.

        Only files of this directory: others are not the store's.
        """
        with self._lock:
            self._refresh()
            used = {at.path for blobs in self._notes.values() for at in blobs.values()}
            for path in self._files() if paths is None else paths:
                if path.suffix != _NOTE and path not in used:
                    self._unlink(path)

    def _noted(self, digest: Digest) -> BlobLocation | None:
        with self._lock:
            self._refresh()
            note = self._note_of.get(digest)
            return None if note is None else self._notes[note][digest]

    def _new_note(self, path: Path) -> Path:
        """The note of a file: next to one of this directory, else of a new name."""
        name = path.name if path.parent == self.directory else uuid.uuid4().hex
        return self.directory / (name + _NOTE)

    def _unlink(self, path: Path) -> None:
        if path.parent == self.directory:
            path.unlink(missing_ok=True)

    def _write(self, note: Path, blobs: Mapping[Digest, BlobLocation]) -> None:
        if blobs:
            write_atomically(note, _to_json(blobs))
        else:
            note.unlink(missing_ok=True)
            self._unlink(note.with_name(note.name.removesuffix(_NOTE)))
        self._set(note, blobs)
        self._read_at = _directory_stamp(self.directory)

    def _set(self, note: Path, blobs: Mapping[Digest, BlobLocation]) -> None:
        for digest in self._notes.pop(note, {}):
            if self._note_of.get(digest) == note:
                del self._note_of[digest]
        if not blobs:
            return
        self._notes[note] = dict(blobs)
        for digest, at in blobs.items():
            other = self._note_of.get(digest)
            # Two notes have it if a process died between their writes.
            if other is None or not self._notes[other][digest].is_readable or at.stamp is None:
                self._note_of[digest] = note

    def _refresh(self) -> None:
        """Read the notes again when the directory has changed: another process may own it."""
        stamp = _directory_stamp(self.directory)
        if stamp == self._read_at:
            return
        self._notes, self._note_of = {}, {}
        for note in self._files():
            if note.suffix == _NOTE:
                self._set(note, read_note(note))
        self._read_at = stamp

    def _files(self) -> Iterator[Path]:
        return iter(sorted(self.directory.glob("*"))) if self.directory.is_dir() else iter(())


def _to_json(blobs: Mapping[Digest, BlobLocation]) -> str:
    """The text of a note; all blobs lie in one file."""
    first = next(iter(blobs.values()))
    values: dict[str, Any] = {
        "blobs": {digest: [at.offset, at.size] for digest, at in blobs.items()},
        "orders": {
            digest: astuple(at.order) for digest, at in blobs.items() if at.order is not None
        },
    }
    if first.source is not None:
        values["source"] = str(first.source)
    if first.path == first.source:
        values["in_place"] = True
    if first.stamp is not None:
        values["stamp"] = astuple(first.stamp)
    return json.dumps(values, sort_keys=True)


def read_note(note: Path) -> dict[Digest, BlobLocation]:
    """The places in a note; none of a damaged one, so that its blobs are asked for again."""
    path = note.with_name(note.name.removesuffix(_NOTE))
    try:
        if note.stat().st_size > _NOTE_LIMIT_BYTES:
            return {}
        values = parse_json_object(note.read_text(encoding="utf-8"), note.name)
        source = Path(values["source"]) if "source" in values else None
        stamp = Stamp(*_numbers(values["stamp"], 2)) if "stamp" in values else None
        if values.get("in_place"):
            if source is None or stamp is None or not source.is_absolute():
                return {}
            path = source
        orders = {
            digest: RowOrder(*_numbers(order, 3))
            for digest, order in values.get("orders", {}).items()
        }
        return {
            check_digest(digest): _location(
                path, _numbers(place, 2), source, stamp, orders.get(digest)
            )
            for digest, place in values["blobs"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InvalidArgumentError):
        return {}


def _numbers(values: Any, count: int) -> list[int]:
    """The whole numbers of a list, 0 to 2^63 - 1. Raises ValueError for anything else."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(values)
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(values)
    return values


def _location(
    path: Path,
    place: Sequence[int],
    source: Path | None,
    stamp: Stamp | None,
    order: RowOrder | None,
) -> BlobLocation:
    offset, size = place
    if order is not None and not order.fits(size):
        raise ValueError(order)
    if stamp is not None and stamp != _NEVER and offset + size > stamp.size:
        raise ValueError(place)
    return BlobLocation(path, offset, size, source=source, stamp=stamp, order=order)


def _hard_linked(source: Path, file: BinaryIO, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or a file of somebody else
        return False
    if os.path.samestat(target.stat(), os.fstat(file.fileno())):
        return True
    target.unlink()  # another file took its place meanwhile
    return False


def _cloned(file: BinaryIO, target: Path) -> bool:
    descriptor = os.open(target, _NEW_FILE, 0o600)
    try:
        fcntl.ioctl(descriptor, _CLONE, file.fileno())
    except OSError:
        target.unlink()
        return False
    finally:
        os.close(descriptor)
    sync(target)
    return True


def _copied(file: BinaryIO, target: Path, room_bytes: Callable[[], int]) -> None:
    descriptor = os.open(target, _NEW_FILE, 0o600)
    with os.fdopen(descriptor, "wb") as copy:
        size = os.fstat(file.fileno()).st_size
        check_room(target, "a copy of a file of the model", size, room_bytes())
        file.seek(0)
        shutil.copyfileobj(file, copy, _COPY_BYTES)
    sync(target)


def _directory_stamp(directory: Path) -> int | None:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return None
