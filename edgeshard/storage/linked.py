"""Other owners' files that a store uses in their place: linked into it, with a note of each blob's bytes.

A model on the store's own file system is not copied. `linked/NAME` is a hard link to its file; where the file is not
the process's own, a clone when the file system can share blocks; and otherwise a copy. `linked/NAME.json` has the
offset and the size of each blob in it. A hard link keeps the bytes when their owner deletes the file, and not when the
owner writes into it: so each reader of a blob compares the sha256 of the bytes. Small files, which are read again and
again, are copied instead (`copy`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import Digest, check_digest
from edgeshard.storage.files import TEMPORARY, check_room, naming_full_disk, sync, write_atomically
from edgeshard.storage.locations import BlobLocation

_CLONE = 0x40049409
"""FICLONE of linux/fs.h: the new file shares all blocks of the old one until either is written to."""
_COPY_BYTES = 4 << 20
_NOTE = ".json"


class LinkedFiles:
    """The directory of linked files. Blocking; safe to call from any thread, and to read from another process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._read_at: int | None = None
        self._blobs: dict[Digest, BlobLocation] = {}

    def take(self, source: Path, file: BinaryIO, room_bytes: Callable[[], int]) -> Path:
        """A file of this directory with the bytes of the open `file`, which lies at `source`; no blob is in it yet.

        `room_bytes` gives the bytes that a copy may have. Raises ResourceExhaustedError for a full disk.
        """
        return self._made(source, file, room_bytes)

    def copy(self, file: BinaryIO, room_bytes: Callable[[], int]) -> Path:
        """A file as of `take` that has no other owner."""
        return self._made(None, file, room_bytes)

    def _made(self, source: Path | None, file: BinaryIO, room_bytes: Callable[[], int]) -> Path:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.directory / f"{uuid.uuid4().hex}{TEMPORARY}"
        try:
            with naming_full_disk(temporary):
                if source is None or not _hard_linked(source, file, temporary):
                    _clone_or_copy(file, temporary, room_bytes)
            path = temporary.with_suffix("")
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def keep(self, blobs: Mapping[Digest, BlobLocation]) -> None:
        """Note that these blobs lie in files of this directory."""
        with self._lock:
            self._refresh()
            noted = {**self._blobs, **blobs}
            for path in {at.path for at in blobs.values()}:
                self._write(path, {digest: at for digest, at in noted.items() if at.path == path})

    def find(self, digest: Digest) -> BlobLocation | None:
        """The place of a blob; None when it is not here, or its file has become too short."""
        with self._lock:
            self._refresh()
            found = self._blobs.get(digest)
        return replace(found, is_linked=True) if found is not None and _holds(found) else None

    def digests(self) -> Collection[Digest]:
        """The digests of all blobs that are noted."""
        with self._lock:
            self._refresh()
            return tuple(self._blobs)

    def remove(self, digests: Collection[Digest]) -> None:
        """Forget blobs, and drop the files in which no other is left."""
        with self._lock:
            self._refresh()
            gone = self._blobs.keys() & digests
            left = {digest: at for digest, at in self._blobs.items() if digest not in gone}
            for path in {self._blobs[digest].path for digest in gone}:
                self._write(path, {digest: at for digest, at in left.items() if at.path == path})

    def drop_unused(self, paths: Collection[Path] | None = None) -> None:
        """Remove files in which no blob is noted: of `paths`, or of all files, such as a process left that died."""
        with self._lock:
            self._refresh()
            used = {at.path for at in self._blobs.values()}
            for path in self._files() if paths is None else paths:
                if path.suffix != _NOTE and path not in used:
                    path.unlink(missing_ok=True)

    def _write(self, path: Path, blobs: Mapping[Digest, BlobLocation]) -> None:
        note = path.with_name(path.name + _NOTE)
        if blobs:
            places = {digest: (at.offset, at.size) for digest, at in blobs.items()}
            write_atomically(note, json.dumps({"blobs": places}, sort_keys=True))
        else:
            note.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        self._blobs = {digest: at for digest, at in self._blobs.items() if at.path != path}
        self._blobs |= blobs
        self._read_at = _stamp(self.directory)

    def _refresh(self) -> None:
        """Read the notes again when the directory has changed: another process may own it."""
        stamp = _stamp(self.directory)
        if stamp == self._read_at:
            return
        self._blobs = {}
        for note in self._files():
            if note.suffix == _NOTE:
                self._blobs |= _read_note(note)
        self._read_at = stamp

    def _files(self) -> Iterator[Path]:
        return iter(sorted(self.directory.glob("*"))) if self.directory.is_dir() else iter(())


def _read_note(note: Path) -> dict[Digest, BlobLocation]:
    """The places in a note; none of a damaged one, so that its blobs are asked for again."""
    path = note.with_name(note.name.removesuffix(_NOTE))
    try:
        values = json.loads(note.read_text(encoding="utf-8"))["blobs"]
        return {
            check_digest(digest): BlobLocation(path, int(offset), int(size))
            for digest, (offset, size) in values.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InvalidArgumentError):
        return {}


def _hard_linked(source: Path, file: BinaryIO, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or a file of somebody else
        return False
    if os.path.samestat(target.stat(), os.fstat(file.fileno())):
        return True
    target.unlink()  # another file took its place meanwhile
    return False


def _clone_or_copy(file: BinaryIO, target: Path, room_bytes: Callable[[], int]) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), _CLONE, file.fileno())
        except OSError:
            size = os.fstat(file.fileno()).st_size
            check_room(target, "a copy of a file of the model", size, room_bytes())
            file.seek(0)
            shutil.copyfileobj(file, copy, _COPY_BYTES)
    sync(target)


def _holds(location: BlobLocation) -> bool:
    try:
        return location.path.stat().st_size >= location.offset + location.size
    except OSError:
        return False


def _stamp(directory: Path) -> int | None:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return None
