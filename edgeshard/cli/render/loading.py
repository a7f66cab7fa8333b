"""How far a deployment is with loading: a bar with the time left on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edgeshard.domain.nodes.device import StagePhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.status import Status

    from edgeshard.domain.deployments.deployment import Deployment
    from edgeshard.domain.nodes.device import StageStatus

LINE_EVERY_S = 5.0
_BAR_WIDTH = 30


class DeployReporter:
    """Reports a deployment's progress on stderr: a line for each phase, the details in the
    terminal's status."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._phase = ""
        self._pace = RemainingTime()
        self._began_s = self._said_s = time.monotonic()
        self._told_measuring = False

    @property
    def begun(self) -> bool:
        return self._phase != ""

    def measuring(self, nodes: Sequence[str]) -> None:
        """Nodes measure themselves before anything is placed."""
        if not nodes or self.begun:
            return
        from edgeshard.planning.inputs.site_cluster import listed

        now_s, console = time.monotonic(), self._status.console
        text = f"measuring {listed(nodes)}: {now_s - self._began_s:.0f} s"
        if console.is_terminal:
            self._status.update(text)
        elif not self._told_measuring or now_s - self._said_s >= LINE_EVERY_S:
            self._said_s, self._told_measuring = now_s, True
            console.print(text, markup=False)

    def show(self, deployment: Deployment) -> None:
        now_s = time.monotonic()
        console = self._status.console
        name = deployment.spec.name
        if deployment.phase.value != self._phase:
            self._phase = deployment.phase.value
            self._pace = RemainingTime()
            self._said_s = now_s
            # Above the live line, not into it.
            console.print(f"{name}: {self._phase}", markup=False)
        share = loaded_share(deployment)
        told_s = max(
            (stage.filling.left_s for stage in deployment.stages if stage.filling is not None),
            default=0.0,
        )
        left_s = told_s or self._pace.left_s(share, now_s)
        text = loading_text(deployment)
        if console.is_terminal:
            self._status.update(_line(text, share, left_s))
        elif now_s - self._said_s >= LINE_EVERY_S and deployment.stages:
            self._said_s = now_s
            console.print(f"{name}: {text}", markup=False)


class RemainingTime:
    """The time that is left at the pace so far. Pure: times are seconds of one clock."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left_s(self, share: float, now_s: float) -> float:
        """Seconds until the share is 1; 0 while that is not known."""
        if self._first is None:
            self._first = (share, now_s)
        share_before, before_s = self._first
        done = share - share_before
        return (now_s - before_s) * (1.0 - share) / done if done > 0 else 0.0


def loaded_share(deployment: Deployment) -> float:
    """Progress of loading, from 0 to 1; each stage, and fetching and filling of each, counts
    alike."""
    shares = [
        _share_of(stage) for stage in deployment.stages if stage.phase is not StagePhase.STANDBY
    ]
    return sum(shares) / len(deployment.placement.stages) if shares else 0.0


def _share_of(stage: StageStatus) -> float:
    if stage.phase is not StagePhase.LOADING:
        return 1.0
    filling = stage.filling
    filled = (
        filling.done_bytes / filling.total_bytes
        if filling is not None and filling.total_bytes
        else 0.0
    )
    if not stage.total_bytes:
        return filled
    return (stage.fetched_bytes / stage.total_bytes + filled) / 2


def loading_text(deployment: Deployment) -> str:
    """`loading: a ready, b fetching 3.2 MiB of 6.4 MiB`."""
    from edgeshard.cli.render.views import stage_text

    nodes = {stage.index: stage.node_name for stage in deployment.placement.stages}
    parts = [
        f"{nodes.get(stage.stage, stage.stage)} {stage_text(stage)}" for stage in deployment.stages
    ]
    return f"{deployment.phase.value}: {', '.join(parts)}" if parts else deployment.phase.value


def _line(text: str, share: float, left_s: float) -> RenderableType:
    """A bar before the text, while something of the loading is done and not all."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from edgeshard.cli.render.views import rough_seconds

    if not 0.0 < share < 1.0:
        return Text(text)
    left = f"about {rough_seconds(left_s)} left" if left_s else ""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(ProgressBar(1.0, share, width=_BAR_WIDTH), Text(left, no_wrap=True), Text(text))
    return line
