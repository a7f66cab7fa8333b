"""A profile being made, with a progress bar on stderr, and what it says in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from edgeshard.dtypes import DType
from edgeshard.profile import ComputeProfile, LayerKind
from edgeshard.profile_fit import LayerFit, fit_profile
from edgeshard_agent.profiler.compute import FULL_GRID, QUICK_GRID, Profiler

UNDISTURBED = 0.95
"""Share of a core below which a profile is worth another attempt."""


def measured(config: Mapping[str, Any], dtype: DType, device: str, threads: int, quick: bool) -> ComputeProfile:
    """Measure, and show how far it is. Raises what `Profiler.run` raises."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        grid = QUICK_GRID if quick else FULL_GRID
        return Profiler(config, dtype, device, threads, grid, progress=show).run()


def lines(profile: ComputeProfile) -> Iterator[str]:
    """What an operator wants to see of a profile."""
    fitted = fit_profile(profile)
    yield f"box {profile.fingerprint}, model shape {profile.model_hash}, {profile.dtype}, {profile.device}"
    yield f"{profile.threads} threads" + (", quick: fewer points, less exact" if profile.quick else "")
    if profile.processor_share < UNDISTURBED:
        yield f"warning: the box was busy ({profile.processor_share:.0%} of a core was left); measure again"
    for fit in fitted.layers:
        yield from _layer(fit)
    yield f"step overhead: {_time(profile.step_overhead_s)}, and {_time(profile.overhead.seconds_per_byte * 2**20)}/MiB"
    memory = profile.memory
    shared = ", shared with the accelerator" if memory.unified else ""
    yield f"memory: {_size(memory.free_bytes)} free of {_size(memory.total_bytes)}{shared}"
    yield f"the agent itself: {_size(memory.daemon_bytes)}"


def _layer(fit: LayerFit) -> Iterator[str]:
    layer = fit.profile
    name = f"{layer.kind}" + (f", window {layer.window}" if layer.window else "")
    yield f"{name}: {layer.layers} of {layer.parameters:,} parameters"
    if layer.kind is not LayerKind.HEAD:
        times = ", ".join(f"{s.count}: {_time(s.seconds)}" for s in layer.prefill if s.context == 0)
        yield f"  prefill by tokens: {times}  (fit within {fit.prefill.error.max:.1%})"
    if layer.kind is not LayerKind.EMBEDDING:
        context = layer.decode[0].context
        times = ", ".join(f"{s.count}: {_time(s.seconds)}" for s in layer.decode if s.context == context)
        yield f"  decode by sequences, {context} positions: {times}  (fit within {fit.decode.error.max:.1%})"
        slowest = max(sample.spread for sample in layer.decode)
        yield f"  repeats differ by {slowest:.1%} at most (median deviation)"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
