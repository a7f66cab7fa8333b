"""Lines appended to a file of bounded size; some earlier, full files are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeshard.domain.audit import AuditCheck
from edgeshard_coordinator.core.values.seals import (
    LINES_PER_SEAL,
    SEAL_BYTES,
    Chain,
    SealKey,
    check_files,
    seal_of,
)

LIMIT_BYTES = 8 << 20
KEPT = 4
"""Files in all."""


class RotatedLines:
    """A log in files: `NAME.jsonl`, before it `NAME.1.jsonl` and so on, the oldest with the highest
    number. It is for one thread at a time.

    Only their owner can read the files. A disk that refuses raises OSError; the next `append`
    begins afresh. With `key` the files hold seals of their lines (`seals.py`).
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        limit_bytes: int = LIMIT_BYTES,
        file_count: int = KEPT,
        key: SealKey | None = None,
    ) -> None:
        self._directory = directory
        self._name = name
        self._key = key
        self._chain: Chain | None = None
        """The end of the open file; None if it is not open, or not sealed."""
        self._head: str | None = None
        """The newest seal of this process."""
        numbers = ("", *(f".{number}" for number in range(1, file_count)))
        self._paths = [directory / f"{name}{number}.jsonl" for number in numbers]
        self._limit_bytes = limit_bytes
        self._file = -1
        self._size_bytes = 0

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines, each with a newline at its end and none longer than a file may be. They are
        on disk when this returns."""
        try:
            for line in lines:
                self._open_with_room(len(line))
                self._write(line)
                if self._chain is not None and self._chain.unsealed >= LINES_PER_SEAL:
                    self._seal()
            os.fdatasync(self._file)
        except OSError:
            self._drop()
            raise

    def newest(self, count: int) -> list[bytes]:
        """The newest `count` lines at most, the oldest first and no seals. A line that the end of a
        process cut off is left out."""
        newest_lines: list[bytes] = []
        for _, content in self._files():
            lines = [line for line in content.splitlines(keepends=True) if seal_of(line) is None]
            newest_lines[:0] = (
                lines[-(count - len(newest_lines)) :] if count > len(newest_lines) else []
            )
        return newest_lines

    def check(self) -> tuple[AuditCheck, ...]:
        """The verdict of the seals on each file, the oldest first; all lines until now are sealed
        first. () without a key."""
        if self._key is None:
            return ()
        if self._file < 0 and self._paths[0].exists():
            self._open()
        self._seal_rest()
        files = [(path.name, content) for path, content in self._files()]
        is_whole = not self._paths[-1].exists()
        return check_files(self._key, self._name, files[::-1], self._head, is_whole=is_whole)

    def close(self) -> None:
        self._seal_rest()
        self._drop()

    def _seal_rest(self) -> None:
        if self._chain is not None and self._chain.unsealed:
            self._seal()
            os.fdatasync(self._file)

    def _seal(self) -> None:
        assert self._chain is not None
        self._write_all(self._chain.sealed())
        self._head = self._chain.head

    def _drop(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._chain = -1, None

    def _files(self) -> Iterator[tuple[Path, bytes]]:
        """The newest first."""
        for path in self._paths:
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            yield path, data[: data.rfind(b"\n") + 1]

    def _open_with_room(self, size_bytes: int) -> None:
        if self._file < 0:
            self._open()
        room_bytes = self._limit_bytes - (0 if self._key is None else SEAL_BYTES)
        if self._size_bytes > 0 and self._size_bytes + size_bytes > room_bytes:
            self.close()
            for older, newer in zip(
                reversed(self._paths[1:]), reversed(self._paths[:-1]), strict=True
            ):
                if newer.exists():
                    newer.replace(older)
            self._open()

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._paths[0], flags, 0o600)
        self._size_bytes = os.fstat(self._file).st_size
        if self._size_bytes and os.pread(self._file, 1, self._size_bytes - 1) != b"\n":
            self._write_all(b"\n")  # A line that was cut off stays one of its own.
        if self._key is not None:
            self._chain = self._resumed(self._key)

    def _resumed(self, key: SealKey) -> Chain:
        """The chain after the file's lines. The last seal of this process counts more than one in
        the file; a new file continues from the last seal of the previous file."""
        own, *older = [content for _, content in self._files()]
        if self._head is None:
            lines = [
                line for content in (*older[:1], own) for line in content.splitlines(keepends=True)
            ]
            self._head = next(
                (seal.code for seal in map(seal_of, reversed(lines)) if seal is not None), ""
            )
        return Chain(key, self._name, self._head, own)

    def _write(self, line: bytes) -> None:
        self._write_all(line)
        if self._chain is not None:
            self._chain.take(line)

    def _write_all(self, data: bytes) -> None:
        written = os.write(self._file, data)
        self._size_bytes += written
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")
