"""Control groups, for processes that must get by with less than the machine has: memory (cgroup
v1), or a core."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")
CORES = Path("/sys/fs/cgroup/cpu")
"""The folder of cgroup v1; in v2 all groups are above it."""
_PERIOD_US = 100_000


@contextmanager
def capped(name: str, limit: int) -> Iterator[Path]:
    """A group with a limit in bytes, page cache included; gone afterwards, when its processes
    are."""
    group = GROUPS / f"edgeshard-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


@contextmanager
def part_of_a_core(name: str, share: float) -> Iterator[Path | None]:
    """A group whose processes together get this fraction of a core. It is removed when they have
    ended; None if this user cannot make groups."""
    group = (CORES if CORES.is_dir() else CORES.parent) / f"edgeshard-{os.getpid()}-{name}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        yield group if _limited(group, int(share * _PERIOD_US)) else None
    finally:
        group.rmdir()


def _limited(group: Path, quota_us: int) -> bool:
    """Whether the group has the controller of cores, and now gets `quota_us` of each period."""
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    except OSError:
        return False
    return True


def command_inside(group: Path, command: Sequence[str]) -> list[str]:
    """The same command in a group from its beginning."""
    return ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


def most_bytes(group: Path) -> int:
    """The most that the group ever had."""
    return int((group / "memory.max_usage_in_bytes").read_text())
