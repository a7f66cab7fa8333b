"""What the control groups of this process leave it: memory and processor time. Linux, versions 1
and 2.

A group may use no more than each group around it, so the least of all limits holds. A container
sees only its own part of the tree, so the mounts are read and not assumed.
(https://docs.kernel.org/admin-guide/cgroup-v2.html,
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html)
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
UNLIMITED = 1 << 60
"""Stands for "max". Version 1 writes a larger number; no machine has an exbibyte."""
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
"""Counts of memory.stat in bytes. The kernel takes this memory back before it ends a process."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that a process may count on. `limited`: its groups leave it less than the machine
    has."""

    total_bytes: int
    available_bytes: int
    limited: bool


def process_memory(total_bytes: int, available_bytes: int, root: Path = ROOT) -> ProcessMemory:
    """The machine's memory, or the part of it that the groups of this process leave. `root` is for
    tests."""
    least_bytes = total_bytes
    for group in _groups(root, "memory"):
        limit = _limit(group)
        if limit < total_bytes:
            least_bytes = min(least_bytes, limit)
            available_bytes = min(available_bytes, max(0, limit - _used(group)))
    return ProcessMemory(least_bytes, min(available_bytes, least_bytes), least_bytes < total_bytes)


def cpu_quota(root: Path = ROOT) -> float:
    """The cores that the groups of this process leave it; 0 if none limits it."""
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group))]
    return min(quotas, default=0.0)


@dataclass(frozen=True, slots=True)
class _Group:
    directory: Path
    version: int


def _limit(group: _Group) -> int:
    """The bytes that a group may have, the groups around it left aside. memory.high stops it as
    memory.max does."""
    if group.version == 2:
        return min(_number(group.directory / name) for name in ("memory.max", "memory.high"))
    # of groups that a container cannot see
    above = _stat(group).get("hierarchical_memory_limit", UNLIMITED)
    return min(above, _number(group.directory / "memory.limit_in_bytes"))


def _used(group: _Group) -> int:
    """The bytes that a group has, less what the kernel would take back. Groups inside it are
    counted."""
    name = "memory.current" if group.version == 2 else "memory.usage_in_bytes"
    used = _number(group.directory / name)
    stat = _stat(group)
    prefix = "" if group.version == 2 else "total_"
    return (0 if used == UNLIMITED else used) - sum(
        stat.get(prefix + count, 0) for count in _RECLAIMABLE
    )


def _quota(group: _Group) -> float:
    """The cores that a group may use; 0 if it has no limit."""
    if group.version == 2:
        words = text_of(group.directory / "cpu.max").split()
    else:
        # the kernel's own
        period = text_of(group.directory / "cpu.cfs_period_us").strip() or "100000"
        words = [text_of(group.directory / "cpu.cfs_quota_us").strip(), period]
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return 0.0
    return int(words[0]) / max(1, int(words[1]))


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """The group of this process for a controller, then the groups around it, as far as they can be
    seen."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        version = 1 if parts[1] else 2
        if version == 1 and controller not in parts[1].split(","):
            continue
        mount = _mount(root, version, controller)
        path = PurePosixPath(parts[2])
        inside = (
            path.relative_to(mount.top_group)
            if path.is_relative_to(mount.top_group)
            else path.relative_to("/")
        )
        if ".." in inside.parts:
            inside = PurePosixPath()
        here = mount.directory / inside
        for directory in (here, *here.parents):
            if not directory.is_relative_to(mount.directory):
                break
            yield _Group(directory, version)


@dataclass(frozen=True, slots=True)
class _Mount:
    """A tree of groups, mounted at `directory`. `top_group` is the group that its top is."""

    directory: Path
    top_group: PurePosixPath


def _mount(root: Path, version: int, controller: str) -> _Mount:
    """The mount of a tree of groups; the customary place if the system names none."""
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        fields, more = head.split(), tail.split()
        if len(fields) < 5 or len(more) < 3:
            continue
        kind = {"cgroup": 1, "cgroup2": 2}.get(more[0])
        if kind != version or (version == 1 and controller not in more[2].split(",")):
            continue
        top_group, directory = _unescaped(fields[3]), _unescaped(fields[4])
        return _Mount(root / directory.lstrip("/"), PurePosixPath(top_group))
    customary = root / "sys/fs/cgroup"
    return _Mount(customary if version == 2 else customary / controller, PurePosixPath("/"))


def _unescaped(text: str) -> str:
    r"""A path of mountinfo, in which a space is \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _stat(group: _Group) -> dict[str, int]:
    pairs = (line.split() for line in text_of(group.directory / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int:
    """The bytes in a file; UNLIMITED for "max", and if the file cannot be read."""
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else UNLIMITED


def text_of(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""
