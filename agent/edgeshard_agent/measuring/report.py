"""A profile being made, with a progress bar on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.profile import ComputeProfile
from edgeshard.profiles.grid import FULL_GRID, QUICK_GRID
from edgeshard_agent.measuring.compute import Profiler


def measured(
    config: Mapping[str, Any],
    dtype: DType,
    device: str,
    threads: int,
    quick: bool,
    quantisation: Quantisation | None = None,
) -> ComputeProfile:
    """Measure, and show how far it is. Raises what `Profiler.run` raises."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        grid = QUICK_GRID if quick else FULL_GRID
        return Profiler(config, dtype, device, threads, grid, quantisation, progress=show).run()
