"""What a process finds out about its machine from the files of the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeshard.process.machine import cpu_quota


def lay(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 0.0),
        ({"proc/self/cgroup": "0::/\n"}, 0.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 0.0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/c\n", "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "20000\n"}, 0.2),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/c\n", "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "-1\n"}, 0.0),
        ({"proc/self/cgroup": "4:memory:/c\n", "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "20000\n"}, 0.0),
    ],
)
def test_a_quota_of_the_process_or_of_a_group_around_it(files: dict[str, str], cores: float, tmp_path: Path) -> None:
    lay(tmp_path, files)
    assert cpu_quota(tmp_path) == cores
