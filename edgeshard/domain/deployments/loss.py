"""The cost of losing a node of a deployment: how long its requests would pause, and which nodes take its layers."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.deployments.placement import ExplicitStage
from edgeshard.domain.ids import NodeName


@dataclass(frozen=True, slots=True)
class Pause:
    """The parts of a pause, in seconds: until the loss is detected, until another placement is
    found, until its nodes have the weights, and until the next token. Before that token the earlier
    positions are computed again."""

    detect_s: float
    plan_s: float
    load_s: float
    rebuild_s: float

    @property
    def total_s(self) -> float:
        return self.detect_s + self.plan_s + self.load_s + self.rebuild_s


@dataclass(frozen=True, slots=True)
class Loss:
    """The consequences if this node fails now.

    `taken_by` are the stages that would be new. `warm` is whether their nodes have the weights in
    memory already. `pause` is None if the deployment could not continue, or if its length is
    unknown; `note` has the reason.
    """

    node: NodeName
    pause: Pause | None = None
    taken_by: tuple[ExplicitStage, ...] = ()
    warm: bool = False
    note: str = ""
