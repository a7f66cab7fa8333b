"""The kernels of nodes in words: what runs, how fast, and warnings with a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edgeshard.domain.nodes.device import Node
from edgeshard.domain.nodes.kernels import KernelSpeed

COMPILE_AGAIN = (
    "in its checkout run python hatch_build.py, or install a wheel, and restart the agent"
)


def kernel_text(speed: KernelSpeed) -> str:
    """The instruction set, the compiler, and the shares of the machine's limits."""
    if not speed.name:
        return "none: torch's operators compute"
    parts = [f"{speed.name} by {speed.compiler}"]
    if speed.read_gb_per_s:
        parts.append(
            f"one row {speed.row_share:.0%} of the read rate ({speed.read_gb_per_s:.1f} GB/s)"
        )
    if speed.fma_gflop_per_s:
        parts.append(
            f"many rows {speed.rows_share:.0%} of the FMA rate ({speed.fma_gflop_per_s:.0f} "
            "GFLOP/s)"
        )
    return ", ".join(parts)


def kernel_problem(speed: KernelSpeed) -> str:
    """The fault of these kernels in words, without a remedy; "" if there is none."""
    if not speed.name:
        return "native kernels are missing or switched off: layers run several times slower"
    if speed.lacks_best:
        return f"kernels {speed.name} run, and the processor could run {speed.best_name}"
    if speed.is_slow:
        return f"kernels are slow for this machine: {kernel_text(speed)}"
    return ""


def kernel_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """A line for each connected node that reported its kernels."""
    for node in nodes:
        if node.connected and node.facts.kernels is not None:
            yield f"{node.name}: kernels {kernel_text(node.facts.kernels)}"


def kernel_warnings(nodes: Iterable[Node]) -> Iterator[str]:
    """A warning with a remedy for each node whose kernels are missing, not the best, or slow."""
    for node in nodes:
        speed = node.facts.kernels
        if speed is not None and (problem := kernel_problem(speed)):
            yield f"warning: {node.name}: {problem}; {COMPILE_AGAIN} (edgectl doctor)"
