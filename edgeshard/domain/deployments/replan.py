"""The outcome of planning a running deployment again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edgeshard.domain.deployments.placement import Placement, Prediction
from edgeshard.domain.ids import OperationId

NO_OPERATION = OperationId("")


class ReplanReason(StrEnum):
    MOVED = "MOVED"
    """It continues with the new placement."""
    WOULD_MOVE = "WOULD_MOVE"
    """It would move, but this was a dry run."""
    SAME_LAYERS = "SAME_LAYERS"
    """Each node has the layers that it would get."""
    SMALL_GAIN = "SMALL_GAIN"
    """Less than `edgeshard.domain.deployments.traffic.WORTH_SAYING`."""
    NOT_WEIGHED = "NOT_WEIGHED"
    """One of the two placements cannot be predicted."""
    NOTHING_NEW = "NOTHING_NEW"
    """Nodes, links and profiles are the same as for an earlier plan, which found no reason to move it."""


@dataclass(frozen=True, slots=True)
class ReplanCall:
    """An operator's call. A dry run changes nothing and has no operation id; `force` moves for any gain."""

    name: str
    dry_run: bool = False
    force: bool = False
    operation_id: OperationId = NO_OPERATION


@dataclass(frozen=True, slots=True)
class ReplanResult:
    """A deployment's placement (`current`), compared with the best one for the nodes that are there now (`found`).

    `expected` is the current one's prediction now, and `found.predicted` the other's; each is None
    if it is impossible, and the note has the reason. `gain` is the share of the cost that the new
    one saves or, for a rate, by which it is higher; None unless both are predicted.
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
