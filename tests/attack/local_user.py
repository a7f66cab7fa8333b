"""Another user of the machine: the files of a site that their modes let it read. For sites of one's
own on loopback."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path


def open_to_others(directory: Path) -> Iterator[str]:
    """The parts of a directory that another user can read, write or connect to, at any depth, if it
    can enter its parents.
    """
    for path in directory.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            continue
        if stat.S_ISDIR(mode):
            if mode & stat.S_IWOTH:
                yield f"{path.name}: anybody may write into it"
            if mode & stat.S_IXOTH:
                yield from open_to_others(path)
        elif mode & stat.S_IROTH or mode & stat.S_IWOTH:
            yield f"{path.name}: anybody may open it"


def is_open(directory: Path) -> list[str]:
    """The files that another user can open in a directory."""
    return list(open_to_others(directory)) if directory.stat().st_mode & stat.S_IXOTH else []
