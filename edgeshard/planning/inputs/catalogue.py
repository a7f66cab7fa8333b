"""Figures of unmeasured nodes: from data sheets, each with its source. Pure.

They are ceilings, not measurements: real kernels reach part of them. A measured profile is always
better; a cluster file may override any figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.device import DeviceFacts

GB = 1e9
TERA = 1e12


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A kind of node."""

    kind: str
    memory_bytes: float
    system_bytes: float
    """Part of the memory that is not for stages: operating system, driver context, the daemon
    itself."""
    bandwidth_bytes_per_s: float
    flops: Mapping[DType, float]
    """Operations a second by dtype (dense)."""
    unified: bool
    """Whether processor and accelerator share one memory."""
    source: str
    """Source of the figures."""
    step_overhead_s: float = 0.0
    """Seconds that a step costs whatever its layers. No data sheet has it, so it is 0 unless the
    cluster file has another."""
    idle_w: float | None = None
    """Watts of an idle node; both or neither of `idle_w` and `busy_w` are known. For a Jetson the
    catalogue has the whole module's, without its carrier board. For a discrete GPU it has the
    board's, without the computer around it. For the energy of whole nodes, put a wall meter's
    figure into the cluster file."""
    busy_w: float | None = None
    """Watts of a node that computes a model."""
    disk_bytes_per_s: float | None = None
    """Rate at which a node's disk is read; None if unknown, as in the whole catalogue."""
    disk_bytes: float | None = None
    """Free bytes of that disk; None for enough."""

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes - self.system_bytes


_FIGURES: Mapping[str, tuple[float, float, float, float, float, float | None, float | None]] = {
    "agx-orin": (32, 3, 204.8, 3.33, 27.0, 15, 40),
    "agx-orin-64": (64, 3, 204.8, 5.32, 42.5, 15, 60),
    "orin-nx": (16, 3, 102.4, 1.88, 15.0, 10, 25),
    "orin-nano": (8, 2, 68.0, 1.28, 10.0, 7, 15),
    "p100": (16, 2, 732.0, 9.3, 18.7, 26, 250),
    "rtx-3090": (24, 2, 936.0, 35.6, 71.0, 18, 350),
    "rtx-4090": (24, 2, 1008.0, 82.6, 165.2, 21, 450),
    "h100": (80, 2, 3350.0, 67.0, 989.0, None, None),
    "h200": (141, 2, 4800.0, 67.0, 989.0, 80, 700),
    "raspberry-pi-5": (8, 1, 17.1, 0.154, 0.154, None, None),
    "laptop-cpu": (16, 3, 76.8, 0.77, 0.77, None, None),
    "desktop-cpu": (64, 3, 89.6, 1.95, 1.95, None, None),
    "server-cpu": (256, 4, 307.2, 4.1, 4.1, None, None),
}
"""By kind: GB of memory, of them the system's, GB/s of memory, TFLOPS in fp32 and in fp16 (dense),
watts idle and busy.

The watts are None unless a public figure supports both.
"""
_DISCRETE = frozenset({"p100", "rtx-3090", "rtx-4090", "h100", "h200"})
_NO_BFLOAT16 = frozenset({"p100"})
"""Kinds that compute bfloat16 in fp32, although they have fp16."""

_NVIDIA = "NVIDIA datasheet, "
_DERIVED = "derived from the datasheet: cores x clock x vector width; "
_TYPICAL = _DERIVED + "typical: "
_MODES = "; module power: {busy} W at most, idle at most that of the smallest power mode, {idle} W"
_BOARD = "; board power: {busy} W at most (data sheet), idle {idle} W "
_SOURCES = {
    "agx-orin": _NVIDIA
    + "Jetson AGX Orin 32GB: 204.8 GB/s; 1792 cores x 0.93 GHz x 2 = 3.33 TFLOPS fp32; "
    "108 sparse INT8 TOPS of the GPU / 4 = 27 dense fp16" + _MODES,
    "agx-orin-64": _NVIDIA + "Jetson AGX Orin 64GB: 204.8 GB/s; 2048 cores x 1.3 GHz x 2; "
    "170 sparse INT8 TOPS of the GPU / 4" + _MODES,
    "orin-nx": _NVIDIA + "Jetson Orin NX 16GB: 102.4 GB/s; 1024 cores x 0.918 GHz x 2; "
    "60 sparse INT8 TOPS of the GPU / 4" + _MODES,
    "orin-nano": _NVIDIA + "Jetson Orin Nano 8GB (15 W): 68 GB/s; 1024 cores x 0.625 GHz x 2; "
    "40 sparse INT8 TOPS / 4" + _MODES,
    "p100": _NVIDIA + "Tesla P100 PCIe 16GB: 732 GB/s; 9.3 fp32; 18.7 fp16; "
    "bf16 is computed in fp32" + _BOARD + "(published listings of nvidia-smi)",
    "rtx-3090": _NVIDIA + "GeForce RTX 3090 (GA102 whitepaper): 936 GB/s; 35.6 fp32; "
    "71 dense fp16 with fp32 accumulation" + _BOARD + "(published reviews)",
    "rtx-4090": _NVIDIA + "GeForce RTX 4090 (Ada whitepaper): 1008 GB/s; 82.6 fp32; "
    "165.2 dense fp16 with fp32 accumulation" + _BOARD + "(published reviews)",
    "h100": _NVIDIA + "H100 SXM: 3.35 TB/s; 67 fp32; 989 dense fp16/bf16",
    "h200": _NVIDIA
    + "H200 SXM: 4.8 TB/s; 67 fp32; 989 dense fp16/bf16"
    + _BOARD
    + "(a published measurement)",
    "raspberry-pi-5": f"Raspberry Pi 5 datasheet: LPDDR4X-4267, 32 bit; {_DERIVED}4 Cortex-A76 x "
    "2.4 GHz x 16 fp32; "
    "half precision is computed in fp32",
    "laptop-cpu": _TYPICAL + "8 cores x 3.0 GHz x 32 (AVX2), two channels DDR5-4800",
    "desktop-cpu": _TYPICAL + "16 cores x 3.8 GHz x 32 (AVX2), two channels DDR5-5600",
    "server-cpu": _TYPICAL + "32 cores x 2.0 GHz x 64 (AVX-512), eight channels DDR5-4800",
}


def _device(kind: str) -> DeviceSpec:
    memory, system, bandwidth, single, half, idle_w, busy_w = _FIGURES[kind]
    brain = single if kind in _NO_BFLOAT16 else half
    return DeviceSpec(
        kind=kind,
        memory_bytes=memory * GB,
        system_bytes=system * GB,
        bandwidth_bytes_per_s=bandwidth * GB,
        flops={
            DType.FLOAT32: single * TERA,
            DType.FLOAT16: half * TERA,
            DType.BFLOAT16: brain * TERA,
        },
        unified=kind not in _DISCRETE,
        source=_SOURCES[kind].format(idle=idle_w, busy=busy_w),
        idle_w=idle_w,
        busy_w=busy_w,
    )


CATALOGUE: Mapping[str, DeviceSpec] = {kind: _device(kind) for kind in _FIGURES}
"""Devices by kind, the name used in cluster files and in `--what-if "+2 orin-nx"`."""

_MODEL_NAMES = (
    (r"(nvidia )?tesla p100-pcie-16gb", "p100"),
    (r"(nvidia )?(geforce )?rtx 3090", "rtx-3090"),
    (r"(nvidia )?(geforce )?rtx 4090", "rtx-4090"),
    (r"(nvidia )?h100( sxm)?( 80gb hbm3)?", "h100"),
    (r"(nvidia )?h200( sxm)?", "h200"),
    (r"raspberry pi 5( .*)?", "raspberry-pi-5"),
)
_ORIN = re.compile(r"(nvidia )?(jetson )?((agx|nx|nano) )?orin( .*)?")
_ORIN_BY_MEMORY = ((48e9, "agx-orin-64"), (24e9, "agx-orin"), (12e9, "orin-nx"), (0.0, "orin-nano"))
"""Every Orin's accelerator has the same name; the memory that the system reports distinguishes
them."""


def recognise(facts: DeviceFacts) -> DeviceSpec | None:
    """The catalogue's device that a node reports; None if there is none, as for slower or faster
    variants."""
    name = facts.model.strip().lower()
    if _ORIN.fullmatch(name):
        kind = next(kind for least, kind in _ORIN_BY_MEMORY if facts.memory_total_bytes >= least)
        return CATALOGUE[kind]
    return next(
        (CATALOGUE[kind] for pattern, kind in _MODEL_NAMES if re.fullmatch(pattern, name)), None
    )
