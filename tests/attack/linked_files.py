"""Writes into the files of a model that was added on the coordinator's machine, which links them
into its store."""

from __future__ import annotations

import os
from pathlib import Path


def edit(file: Path, find: bytes, put: bytes) -> int:
    """Replace the bytes `find` in place by others of the same length, and restore the file's size
    and times; return the number of replacements."""
    assert len(find) == len(put)
    before, data = file.stat(), file.read_bytes()
    with file.open("r+b") as opened:
        opened.write(data.replace(find, put))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return data.count(find)


def flip(file: Path, offset: int) -> None:
    """Turn the bits of one byte, such as a weight's, in place, and leave the file's times as they
    were."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 0xFF]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
