"""What this box is: processor, memory, accelerator."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import psutil
import torch

from edgeshard import __version__
from edgeshard.domain.device import DeviceFacts
from edgeshard.domain.errors import InvalidArgumentError

# Left to the operating system and to this daemon itself (an idle agent with torch and transformers is about 280 MB).
RESERVE_BYTES = 512 << 20


def read_facts(device: str, memory_limit_bytes: int | None) -> DeviceFacts:
    """Facts of `cpu` or of a CUDA device; raises InvalidArgumentError for a device that is not there."""
    software = f"edgeshard {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    if device == "cpu":
        total, available = memory.total, memory.available
        model, unified = _processor_name(), False
    elif device.startswith("cuda") and torch.cuda.is_available():
        try:
            available, total = torch.cuda.mem_get_info(device)
            properties = torch.cuda.get_device_properties(device)
        except (AssertionError, RuntimeError, ValueError):  # a number too high, or not a device's name
            raise InvalidArgumentError(
                f"device {device!r} is not on this machine, which has {torch.cuda.device_count()} CUDA devices",
                field="device",
            ) from None
        model, unified = properties.name, bool(properties.is_integrated)
        if unified:  # one memory, counted once: the accelerator can take what the system has left
            available = min(available, memory.available)
    else:
        raise InvalidArgumentError(f"device {device!r} is not on this machine; use cpu", field="device")
    budget = max(0, available - RESERVE_BYTES)
    return DeviceFacts(
        kind=device.partition(":")[0],
        model=model,
        cores=cores,
        memory_total_bytes=total,
        memory_budget_bytes=budget if memory_limit_bytes is None else min(memory_limit_bytes, total),
        unified_memory=unified,
        software=software,
    )


def available_bytes() -> int:
    """Memory the operating system could give out now."""
    return psutil.virtual_memory().available


def _processor_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(("model name", "Model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def has_cpu_quota(root: Path = Path("/")) -> bool:
    """Whether a control group of this process, or one around it, limits its processor time; `root` is for tests."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(_limited(root / "sys/fs/cgroup", *line.split(":", 2)[1:]) for line in groups if line.count(":") >= 2)


def _limited(mounted: Path, controllers: str, group: str) -> bool:
    """`controllers` is empty for cgroup v2."""
    if controllers and "cpu" not in controllers.split(","):
        return False
    mounted, name = (mounted / "cpu", "cpu.cfs_quota_us") if controllers else (mounted, "cpu.max")
    here = mounted / group.lstrip("/")
    for directory in (here, *here.parents):
        if not directory.is_relative_to(mounted):
            break
        with contextlib.suppress(OSError):
            if (directory / name).read_text(encoding="ascii").split()[0].isdecimal():
                return True
    return False
