"""Values of a site's screens, for edgectl and the dashboard: rates of stages, by their nodes'
counters in two snapshots, and words for states. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgeshard.domain.control.site import Site
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.nodes.device import Node, StageKey, StageStatus

LEAST_S = 0.2
"""Between two heartbeats for a rate."""


@dataclass(frozen=True, slots=True)
class Look:
    """The site as it was `at_s`, in seconds of a steady clock."""

    at_s: float
    site: Site
    deployments: tuple[Deployment, ...]


class Rates:
    """Rates of stages since an earlier snapshot, by their counters, over the time between the
    heartbeats that reported them. A stage that began again, or sent no new report, has no rate."""

    def __init__(self, look: Look, before: Look | None) -> None:
        self._now = _heard(look)
        self._before = _heard(before) if before is not None else {}

    def of(self, stage: StageStatus, counter: str) -> float | None:
        """How much a counter of `StageStatus` grew in a second."""
        key = stage.key, stage.epoch
        if key not in self._before or key not in self._now:
            return None
        (former, then_s), (_, now_s) = self._before[key], self._now[key]
        if now_s - then_s < LEAST_S:
            return None
        grown: int = getattr(stage, counter) - getattr(former, counter)
        return round(max(0, grown) / (now_s - then_s), 1)


def _heard(look: Look) -> Mapping[tuple[StageKey, int], tuple[StageStatus, float]]:
    """Each stage, and the time of its node's report."""
    ages = {node.node_id: node.heartbeat_age_s for node in look.site.nodes}
    return {
        (stage.key, stage.epoch): (
            stage,
            look.at_s - ages.get(deployment.placement.stages[stage.stage].node_id, 0.0),
        )
        for deployment in look.deployments
        for stage in deployment.stages
        if stage.stage < len(deployment.placement.stages)
    }


def node_status(node: Node) -> str:
    if not node.connected:
        return "away"
    return "starting" if node.starting else "connected"
