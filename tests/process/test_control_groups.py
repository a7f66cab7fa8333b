"""A process's reading of its control groups, from trees of files as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeshard.process.control_groups import ProcessMemory, cpu_quota, process_memory
from edgeshard.process.machine_facts import compute_threads, read_condition

MIB = 1 << 20
TOTAL = 8192 * MIB
AVAILABLE = 6000 * MIB
V1_NONE = 9223372036854771712
OWN_MOUNTS = """\
30 23 0:28 / /proc rw - proc proc rw
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
DOCKER_V1 = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
ELSEWHERE_V2 = "41 31 0:38 / /mnt/all\\040groups rw,relatime - cgroup2 none rw\n"


def lay(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")


def v1(limit: int, used: int = 0, files: int = 0, above: int = V1_NONE) -> dict[str, str]:
    """A group of memory of version 1. Its own pages are in other counts than the pages of the
    groups inside it."""
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": (
            f"active_file 7\nhierarchical_memory_limit {above}\n"
            f"total_inactive_file {files}\ntotal_active_file 0\ntotal_rss {used - files}\n"
        ),
    }


def v2(limit: str, used: int = 0, files: int = 0, high: str = "max") -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon {used - files}\nactive_file {files}\ninactive_file "
        "0\nslab_reclaimable 0\n",
    }


def inside(directory: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{directory}/{name}": text for name, text in files.items()}


NONE: dict[str, str] = {}
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
UNLIMITED = ProcessMemory(TOTAL, AVAILABLE, False)
MEMORIES: dict[str, tuple[dict[str, str], ProcessMemory]] = {
    "no groups": (NONE, UNLIMITED),
    "version 2, top": ({"proc/self/cgroup": "0::/\n"}, UNLIMITED),
    "version 2, no limit": (
        {"proc/self/cgroup": "0::/a\n", **inside(f"{V2}/a", v2("max", MIB))},
        UNLIMITED,
    ),
    "version 2, its own": (
        {"proc/self/cgroup": "0::/a\n", **inside(f"{V2}/a", v2(str(900 * MIB), 300 * MIB))},
        ProcessMemory(900 * MIB, 600 * MIB, True),
    ),
    "version 2, a container": (
        {"proc/self/cgroup": "0::/\n", **inside(V2, v2(str(900 * MIB), 300 * MIB))},
        ProcessMemory(900 * MIB, 600 * MIB, True),
    ),
    "version 2, files are given back": (
        {
            "proc/self/cgroup": "0::/a\n",
            **inside(f"{V2}/a", v2(str(900 * MIB), 800 * MIB, 700 * MIB)),
        },
        ProcessMemory(900 * MIB, 800 * MIB, True),
    ),
    "version 2, the one around is smaller and fuller": (
        {
            "proc/self/cgroup": "0::/a/b/c\n",
            **inside(f"{V2}/a/b/c", v2(str(900 * MIB), 100 * MIB)),
            **inside(f"{V2}/a/b", v2("max", 650 * MIB)),
            **inside(f"{V2}/a", v2(str(700 * MIB), 650 * MIB)),
        },
        ProcessMemory(700 * MIB, 50 * MIB, True),
    ),
    "version 2, the one around is larger and full": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            **inside(f"{V2}/a/b", v2(str(500 * MIB), 100 * MIB)),
            **inside(f"{V2}/a", v2(str(1000 * MIB), 990 * MIB)),
        },
        ProcessMemory(500 * MIB, 10 * MIB, True),
    ),
    "version 2, high": (
        {"proc/self/cgroup": "0::/a\n", **inside(f"{V2}/a", v2("max", 0, high=str(400 * MIB)))},
        ProcessMemory(400 * MIB, 400 * MIB, True),
    ),
    "version 2, over its limit": (
        {"proc/self/cgroup": "0::/a\n", **inside(f"{V2}/a", v2(str(400 * MIB), 500 * MIB))},
        ProcessMemory(400 * MIB, 0, True),
    ),
    "version 2, more than the machine has": (
        {"proc/self/cgroup": "0::/a\n", **inside(f"{V2}/a", v2(str(2 * TOTAL), MIB))},
        UNLIMITED,
    ),
    "version 2, mounted elsewhere": (
        {
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": ELSEWHERE_V2,
            **inside("mnt/all groups/a", v2(str(900 * MIB))),
        },
        ProcessMemory(900 * MIB, 900 * MIB, True),
    ),
    "version 2, a path out of the container": (
        {"proc/self/cgroup": "0::/../b\n", **inside(V2, v2(str(900 * MIB)))},
        ProcessMemory(900 * MIB, 900 * MIB, True),
    ),
    "version 1, no limit": (
        {"proc/self/cgroup": "4:memory:/c\n", **inside(f"{V1}/c", v1(V1_NONE, MIB))},
        UNLIMITED,
    ),
    "version 1, its own": (
        {
            "proc/self/cgroup": "4:memory:/c\n",
            **inside(f"{V1}/c", v1(900 * MIB, 500 * MIB, 200 * MIB)),
        },
        ProcessMemory(900 * MIB, 600 * MIB, True),
    ),
    "version 1, other controllers": (
        {"proc/self/cgroup": "5:cpu,cpuacct:/c\n", **inside(f"{V1}/c", v1(900 * MIB))},
        UNLIMITED,
    ),
    "version 1, beside an empty version 2": (
        {
            "proc/self/cgroup": "4:memory:/c\n0::/\n",
            "proc/self/mountinfo": OWN_MOUNTS,
            **inside(f"{V1}/c", v1(900 * MIB, 300 * MIB)),
        },
        ProcessMemory(900 * MIB, 600 * MIB, True),
    ),
    "version 1, a container that sees its host's path": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc/inner\n",
            "proc/self/mountinfo": DOCKER_V1,
            **inside(V1, v1(900 * MIB, 300 * MIB)),
            **inside(f"{V1}/inner", v1(500 * MIB, 300 * MIB)),
        },
        ProcessMemory(500 * MIB, 200 * MIB, True),
    ),
    "version 1, a limit around the container": (
        {
            "proc/self/cgroup": "4:memory:/c\n",
            **inside(f"{V1}/c", v1(V1_NONE, 300 * MIB, 0, 900 * MIB)),
        },
        ProcessMemory(900 * MIB, 600 * MIB, True),
    ),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_that_the_groups_leave(name: str, tmp_path: Path) -> None:
    files, memory = MEMORIES[name]
    lay(tmp_path, files)
    assert process_memory(TOTAL, AVAILABLE, tmp_path) == memory


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
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "20000\n",
            },
            0.2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "-1\n",
            },
            0.0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "20000\n",
            },
            0.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/c\n",
                "proc/self/mountinfo": OWN_MOUNTS,
                "sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us": "200000\n",
            },
            0.25,
        ),
    ],
)
def test_a_quota_of_the_process_or_of_a_group_around_it(
    files: dict[str, str], cores: float, tmp_path: Path
) -> None:
    lay(tmp_path, files)
    assert cpu_quota(tmp_path) == cores


@pytest.mark.parametrize(
    ("cores", "quota", "threads"), [(4, 0.0, 4), (4, 0.5, 1), (4, 1.0, 1), (4, 1.5, 2), (4, 8.0, 4)]
)
def test_threads_follow_the_quota(cores: int, quota: float, threads: int) -> None:
    assert compute_threads(cores, quota) == threads


def test_a_condition_has_the_memory_of_the_groups(tmp_path: Path) -> None:
    memory = f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {AVAILABLE >> 10} kB\n"
    groups = inside(V2, v2(str(900 * MIB), 300 * MIB))
    lay(tmp_path, {"proc/meminfo": memory, "proc/self/cgroup": "0::/\n", **groups})
    condition = read_condition("", tmp_path, None, root=tmp_path)
    assert (condition.memory_total_bytes, condition.memory_available_bytes) == (
        900 * MIB,
        600 * MIB,
    )
