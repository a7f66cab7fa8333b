"""What a box finds out about itself from the files of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from edgeshard_agent.measuring.machine import has_cores_of_its_own, has_cpu_quota


def lay(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")


@pytest.mark.parametrize(
    ("files", "limited"),
    [
        ({}, False),
        ({"proc/self/cgroup": "0::/\n"}, False),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, True),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, False),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
            },
            True,
        ),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/c\n", "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "20000\n"}, True),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/c\n", "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "-1\n"}, False),
        ({"proc/self/cgroup": "4:memory:/c\n", "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "20000\n"}, False),
    ],
)
def test_a_quota_of_the_process_or_of_a_group_around_it(files: dict[str, str], limited: bool, tmp_path: Path) -> None:
    lay(tmp_path, files)
    assert has_cpu_quota(tmp_path) is limited


@pytest.mark.parametrize(("allowed", "of_its_own"), [({0}, True), ({0, 1, 2}, True), ({0, 1, 2, 3}, False)])
def test_cores_of_its_own_are_fewer_than_the_machine_has(
    allowed: set[int], of_its_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert has_cores_of_its_own() is of_its_own
