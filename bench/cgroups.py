"""Groups of memory, for processes that must get by with less of it than the machine has (cgroup v1)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def capped(name: str, limit: int) -> Iterator[Path]:
    """A group with a limit in bytes, page cache included; gone afterwards, when its processes are."""
    group = GROUPS / f"edgeshard-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def command_inside(group: Path, command: Sequence[str]) -> list[str]:
    """The same command in a group from its beginning."""
    return ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


def most_bytes(group: Path) -> int:
    """The most that the group ever had."""
    return int((group / "memory.max_usage_in_bytes").read_text())
