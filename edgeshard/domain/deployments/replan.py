"""The outcome of planning a running deployment again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edgeshard.domain.deployments.placement import Placement, Prediction
from edgeshard.domain.ids import OperationId

NO_OPERATION = OperationId("")


class ReplanReason(StrEnum):
    MOVED = "MOVED"
    """It goes on with the placement that was found."""
    WOULD_MOVE = "WOULD_MOVE"
    """It would, but that was only asked."""
    SAME_LAYERS = "SAME_LAYERS"
    """Each node has the layers that it would get."""
    SMALL_GAIN = "SMALL_GAIN"
    """Less than `edgeshard.domain.deployments.traffic.WORTH_SAYING`."""
    NOT_WEIGHED = "NOT_WEIGHED"
    """One of the two placements cannot be predicted."""
    NOTHING_NEW = "NOTHING_NEW"
    """Nodes, links and profiles are those of an earlier plan, which found nothing that would move it."""


@dataclass(frozen=True, slots=True)
class ReplanCall:
    """An operator's call. A dry run changes nothing and has no operation id; `force` moves for any gain."""

    name: str
    dry_run: bool = False
    force: bool = False
    operation_id: OperationId = NO_OPERATION


@dataclass(frozen=True, slots=True)
class Replan:
    """The placement that a deployment has (`current`) beside the best one for the nodes that are there now (`found`).

    `expected` is predicted of the current one now, and `found.predicted` of the other; each None where it cannot be,
    and the note says why. `gain` is the share of the cost that the found one saves or, of a rate, by which it is
    higher; None unless both are predicted.
    """

    current: Placement
    found: Placement
    expected: Prediction | None
    gain: float | None
    reason: ReplanReason
    note: str = ""

    @property
    def changed(self) -> bool:
        return self.reason is ReplanReason.MOVED
