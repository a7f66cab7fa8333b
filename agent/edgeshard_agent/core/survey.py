"""What the coordinator wants measured of this box: one thing at a time, and no layers while it holds a stage. Pure.

A measurement of layers and a stage would slow each other down without a word, and share one memory. So the box refuses
to measure while it holds a stage, and a stage that is to be loaded ends a measurement under way and waits for its end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from edgeshard.commands import MeasureCompute, ProbeLinks
from edgeshard.errors import AbortedError, EdgeShardError, FailedPreconditionError, ResourceExhaustedError
from edgeshard.ids import DeploymentName, OperationId

SurveyCommand = MeasureCompute | ProbeLinks


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A command to measure, and the operation to answer."""

    operation_id: OperationId
    command: SurveyCommand


# Events


@dataclass(frozen=True, slots=True)
class SurveyEnded:
    """By itself; what was measured is reported."""

    inquiry: Inquiry
    error: EdgeShardError | None = None


@dataclass(frozen=True, slots=True)
class SurveyStopped:
    """As it was told; nothing of it is left in memory."""


@dataclass(frozen=True, slots=True)
class ControlLost:
    """Nobody is there to be told of a measurement. Who still wants it asks again, by the same id."""


SurveyEvent = SurveyEnded | SurveyStopped | ControlLost


# Actions


@dataclass(frozen=True, slots=True)
class StartSurvey:
    """Measure and report."""

    inquiry: Inquiry


@dataclass(frozen=True, slots=True)
class StopSurvey:
    """End what runs, and give its memory back."""


@dataclass(frozen=True, slots=True)
class Survey:
    """`wanted` is still to be answered; `running` is what the executor is at, which may be another one that is ending.

    `stopping` says that the executor was told to end it.
    """

    wanted: Inquiry | None = None
    running: Inquiry | None = None
    stopping: bool = False

    @property
    def measuring(self) -> bool:
        """Whether a measurement of layers has the box's memory and cores."""
        return self.running is not None and isinstance(self.running.command, MeasureCompute)

    @property
    def startable(self) -> Inquiry | None:
        return self.wanted if self.running is None else None

    @property
    def superfluous(self) -> bool:
        """Whether something runs that is wanted no more and was not told so yet."""
        return self.running is not None and self.running != self.wanted and not self.stopping

    def refusal(self, inquiry: Inquiry, held: Collection[DeploymentName]) -> EdgeShardError | None:
        """Why the box cannot do this now, None when it can. `held` are the deployments it has a stage of."""
        if self.wanted is not None:
            what = "its layers" if isinstance(self.wanted.command, MeasureCompute) else "its links"
            return ResourceExhaustedError(
                f"the box is measuring {what}; ask again when that is done", reason="BOX_MEASURES", retry_after_s=5.0
            )
        if isinstance(inquiry.command, MeasureCompute) and held:
            return FailedPreconditionError(
                f"the box holds a stage of {', '.join(sorted(held))}: it and the measurement would slow each other "
                "down; delete the deployment first, or leave the box out",
                reason="STAGE_HELD",
            )
        return None

    def asked(self, inquiry: Inquiry) -> Survey:
        return replace(self, wanted=inquiry)

    def dropped(self) -> Survey:
        """Nothing is wanted any more."""
        return replace(self, wanted=None)

    def started(self, inquiry: Inquiry) -> Survey:
        return replace(self, running=inquiry)

    def told_to_stop(self) -> Survey:
        return replace(self, stopping=True)

    def ended(self, inquiry: Inquiry) -> tuple[Survey, bool]:
        """After a measurement's own end, and whether its operation is still to be answered."""
        if self.running != inquiry or self.stopping:
            return self, False  # the end of the stop follows
        return Survey(), True

    def stopped(self) -> Survey:
        """What is wanted by now begins."""
        return Survey(self.wanted)


def stage_came() -> EdgeShardError:
    """The answer to a measurement that a stage took the place of."""
    return AbortedError(
        "a stage came to the box while it was measured; measure again when it holds none", reason="STAGE_CAME"
    )
