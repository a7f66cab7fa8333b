"""The operating system's facts of this node: processor, memory and its huge pages, quota.

Without torch, so that a node joins quickly.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import psutil

from edgeshard import __version__
from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.nodes.device import BF16_PRODUCTS, DeviceFacts, HugePages, StageStatus
from edgeshard.process.control_groups import ProcessMemory, process_memory
from edgeshard.process.machine_facts import AGENT_BYTES, usable_cores
from edgeshard_agent.ops.sources import BF16_SWITCH, has_bf16_products, kernel_set

RESERVE_BYTES = 512 << 20
"""Left to the operating system and to this daemon itself."""
GROUP_MARGIN_BYTES = 64 << 20
"""Left free in a control group, which does not count the system's own memory: programs' files,
buffers of sockets."""


def machine_facts(device: str, memory_limit_bytes: int | None) -> DeviceFacts:
    """The facts of a node that computes on its processor. For other nodes: the facts that are known
    without torch.

    For an accelerator, model and memory are missing. Raises InvalidArgumentError for any other
    device.
    """
    kind = device.partition(":")[0]
    cores = usable_cores()
    versions = (
        f"edgeshard {__version__}, torch {version('torch')}, Python {platform.python_version()}"
    )
    software = f"{versions}, kernels {kernel_set() or 'none'}"
    if has_bf16_products():
        software = f"{software}, {BF16_PRODUCTS}"
    if kind == "cuda":
        return DeviceFacts(kind, "", cores, 0, 0, False, software)
    if device != "cpu":
        raise no_device(device)
    memory = own_memory()
    reserve = reserve_bytes(memory, psutil.Process().memory_info().rss)
    budget = budget_bytes(memory.total_bytes, memory.available_bytes, memory_limit_bytes, reserve)
    return DeviceFacts(kind, processor_name(), cores, memory.total_bytes, budget, False, software)


def no_device(device: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"device {device!r} is not on this machine; use cpu", field="device"
    )


def own_memory() -> ProcessMemory:
    """The memory of the machine, or of this process's control groups."""
    system = psutil.virtual_memory()
    return process_memory(system.total, system.available)


def reserve_bytes(memory: ProcessMemory, resident_bytes: int) -> int:
    """Bytes that stages must leave free. `resident_bytes` is the present size of this process.

    A control group holds this daemon and not the operating system.
    """
    if not memory.limited:
        return RESERVE_BYTES
    return min(RESERVE_BYTES, max(0, AGENT_BYTES - resident_bytes) + GROUP_MARGIN_BYTES)


def budget_bytes(
    total: int, available: int, limit: int | None, reserve: int = RESERVE_BYTES
) -> int:
    """Bytes that stages may use: the operator's limit, or the available memory less the reserve."""
    return max(0, available - reserve) if limit is None else min(limit, total)


def available_bytes() -> int:
    """Memory that this process could be given now."""
    return own_memory().available_bytes


def processor_name() -> str:
    """As the operating system names it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(("model name", "Model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def has_cores_of_its_own() -> bool:
    """Whether this process may run on some of the machine's cores only, as the operator pinned
    it."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def leave_out_bf16_products() -> None:
    """Let this process and its children compute without bfloat16 products, so that their bits are
    the common ones.

    Must run before the kernels are loaded.
    """
    os.environ[BF16_SWITCH] = "0"


AGAIN_S = 60.0
"""Reading takes the kernel some 10 ms for each gigabyte in ordinary pages. It makes them huge in
the background."""
_FLAGS = re.compile(rb"\nVmFlags:([^\n]*)\n")
_MAPS = Path("/proc/self/smaps")


def read_huge_pages(maps: Path = _MAPS) -> HugePages | None:
    """Read the mappings that ask for huge pages; None if the system does not report it. `maps` is
    for tests."""
    try:
        text = maps.read_bytes()
    except OSError:
        return None
    parts = _FLAGS.split(text)  # a mapping, its flags, the next mapping, its flags, ...
    asking = [
        entry
        for entry, flags in zip(parts[::2], parts[1::2], strict=False)
        if b"hg" in flags.split()
    ]
    return HugePages(
        sum(_kilobytes(entry, b"Rss") for entry in asking) << 10,
        sum(_kilobytes(entry, b"AnonHugePages") for entry in asking) << 10,
    )


def _kilobytes(entry: bytes, key: bytes) -> int:
    match = re.search(rb"\n" + key + rb": +(\d+) kB", entry)
    return 0 if match is None else int(match[1])


class HugePageWatch:
    """The result of `read_huge_pages`, read again when a stage has come or gone, and every
    `AGAIN_S` seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: frozenset[tuple[object, ...]] | None = None
        self._due = 0.0
        self._known: HugePages | None = None

    async def read(self, stages: Iterable[StageStatus]) -> HugePages | None:
        """Read in a thread: the kernel walks through all of the process's memory."""
        now = self._clock.now()
        stage_phases = frozenset((stage.deployment, stage.epoch, stage.phase) for stage in stages)
        if stage_phases != self._seen or now >= self._due:
            self._seen, self._due = stage_phases, now + AGAIN_S
            self._known = await asyncio.to_thread(read_huge_pages)
        return self._known
