"""Lines appended to a file of bounded size, with some full ones kept beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

LIMIT_BYTES = 8 << 20
KEPT = 4
"""Files in all."""


class RotatedLines:
    """`NAME.jsonl`, before it `NAME.1.jsonl` and so on, the oldest with the highest number. For one thread at a time.

    The files are their owner's alone. Raises OSError for whatever the disk refuses; the next `append` begins afresh.
    """

    def __init__(self, directory: Path, name: str, limit_bytes: int = LIMIT_BYTES, kept: int = KEPT) -> None:
        self._directory = directory
        numbers = ("", *(f".{number}" for number in range(1, kept)))
        self._paths = [directory / f"{name}{number}.jsonl" for number in numbers]
        self._limit_bytes = limit_bytes
        self._file = -1
        self._size_bytes = 0

    def append(self, lines: Sequence[bytes]) -> None:
        """Each ends with a newline, and none is longer than a file may be. On disk when this returns."""
        try:
            for line in lines:
                self._open_with_room(len(line))
                self._write(line)
            os.fdatasync(self._file)
        except OSError:
            self.close()
            raise

    def newest(self, count: int) -> list[bytes]:
        """At most so many lines, the oldest first; what the end of a process cut off is left out."""
        found: list[bytes] = []
        for lines in self._files():
            found[:0] = lines[-(count - len(found)) :] if count > len(found) else []
        return found

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _files(self) -> Iterator[list[bytes]]:
        for path in self._paths:
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            yield data[: data.rfind(b"\n") + 1].splitlines(keepends=True)

    def _open_with_room(self, size_bytes: int) -> None:
        if self._file < 0:
            self._open()
        if self._size_bytes > 0 and self._size_bytes + size_bytes > self._limit_bytes:
            self.close()
            for older, newer in zip(reversed(self._paths[1:]), reversed(self._paths[:-1]), strict=True):
                if newer.exists():
                    newer.replace(older)
            self._open()

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._paths[0], flags, 0o600)
        self._size_bytes = os.fstat(self._file).st_size
        if self._size_bytes and os.pread(self._file, 1, self._size_bytes - 1) != b"\n":
            self._write(b"\n")  # A line that was cut off stays one of its own.

    def _write(self, data: bytes) -> None:
        written = os.write(self._file, data)
        self._size_bytes += written
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")
