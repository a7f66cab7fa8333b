"""Facts of this machine from its operating system. Linux reports most; elsewhere figures are
missing, nothing fails."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from functools import cache
from importlib.util import find_spec
from math import ceil
from pathlib import Path

from edgeshard.domain.nodes.device import Condition, Support
from edgeshard.process.control_groups import ROOT, cpu_quota, process_memory, text_of
from edgeshard.rpc.tls import TlsFiles

WRITTEN_BYTES = 4 << 20
"""Written to measure a disk: half a second on a slow card."""
AGENT_BYTES = 300 << 20
"""Memory of an agent with all that it imports, without a stage."""
_KERNELS = Path("ops/libedgeshard_ops.so")
_NO_CUDA = re.compile(r"^cuda\b[^=]*=\s*None\s*$", re.MULTILINE)


def utc_s() -> float:
    """The wall clock, in seconds since 1970."""
    return time.time()


def read_condition(
    version: str,
    directory: Path,
    tls: TlsFiles | None,
    disk_write_bps: float = 0.0,
    root: Path = ROOT,
) -> Condition:
    """This machine's condition, with the disk of `directory` and its measured `disk_write_bps`.
    `root` is for tests."""
    system = _memory(root)
    memory = process_memory(system.get("MemTotal", 0), system.get("MemAvailable", 0), root)
    total, free = disk_bytes(directory)
    ends, due = _certificate(tls)
    return Condition(
        version=version,
        utc_s=utc_s(),
        cores=usable_cores(),
        cpu_quota=cpu_quota(root),
        memory_total_bytes=memory.total_bytes,
        memory_available_bytes=memory.available_bytes,
        swap_used_bytes=system.get("SwapTotal", 0) - system.get("SwapFree", 0),
        disk_total_bytes=total,
        disk_free_bytes=free,
        disk_write_bps=disk_write_bps,
        huge_pages=_huge_pages(root),
        kernels=_kernels(),
        cuda=_cuda(root),
        certificate_ends_s=ends,
        certificate_due_s=due,
    )


def usable_cores() -> int:
    """The processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_threads(cores: int, quota: float) -> int:
    """Threads that compute: one for each core, or one for each core that a quota pays for, begun
    ones included.

    More threads than that would wait for each other in the middle of each step.
    """
    return min(cores, max(1, ceil(quota))) if quota else cores


def disk_bytes(directory: Path) -> tuple[int, int]:
    """Bytes of the disk that a directory is on or will be on: all, and free for this process. Zeros
    if unknown."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def disk_write_bps(directory: Path) -> float:
    """Bytes a second that can be written to `directory` and flushed; 0 if none can. Blocks while it
    measures."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            began = time.monotonic()
            for _ in range(WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return WRITTEN_BYTES / max(time.monotonic() - began, 1e-6)
    except OSError:
        return 0.0


class Machine:
    """The machine of a daemon, with the disk of its state `directory` and its own certificate."""

    def __init__(self, version: str, directory: Path, tls: TlsFiles | None) -> None:
        self._version = version
        self._directory = directory
        self._tls = tls
        self._disk_write_bps = 0.0

    async def measure(self) -> None:
        """Measure the disk. Once is enough: a disk does not grow slow by itself, and each time
        wears it a little."""
        self._disk_write_bps = await asyncio.to_thread(disk_write_bps, self._directory)

    def condition(self) -> Condition:
        """The machine's condition now."""
        return read_condition(self._version, self._directory, self._tls, self._disk_write_bps)


def _certificate(tls: TlsFiles | None) -> tuple[float, float]:
    """When this process's certificate ends and when it is to be renewed, in seconds since 1970;
    zeros without one."""
    if tls is None:
        return 0.0, 0.0
    from edgeshard.identity.certificates import validity_of

    try:
        validity = validity_of(tls.cert.read_bytes())
    except (OSError, ValueError):
        return 0.0, 0.0
    return validity.ends.timestamp(), validity.renewal.timestamp()


def _memory(root: Path) -> dict[str, int]:
    """Bytes of memory by the kernel's names."""
    text = text_of(root / "proc/meminfo")
    return {
        name: int(kilobytes) << 10
        for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }


def _huge_pages(root: Path) -> str:
    match = re.search(r"\[(\w+)\]", text_of(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return match[1] if match else ""


@cache
def _kernels() -> Support:
    """Whether the agent's kernels for the processor are built; unknown if no agent is installed."""
    agent = find_spec("edgeshard_agent")
    if agent is None or agent.origin is None:
        return Support.UNKNOWN
    return Support.USED if (Path(agent.origin).parent / _KERNELS).exists() else Support.MISSING


@cache
def _cuda(root: Path) -> Support:
    """Whether PyTorch can use the NVIDIA card whose driver is here, by its files: importing it
    takes seconds."""
    torch = find_spec("torch")
    if not (root / "proc/driver/nvidia/version").exists() or torch is None or torch.origin is None:
        return Support.UNKNOWN
    text = text_of(Path(torch.origin).parent / "version.py")
    if not text:
        return Support.UNKNOWN
    return Support.MISSING if _NO_CUDA.search(text) else Support.USED
