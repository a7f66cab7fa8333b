"""Weights that this node keeps for stages that others may lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from edgeshard.domain.control.commands import KeepStandby, PrepareStage
from edgeshard.domain.ids import DeploymentName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard_agent.hosting.around import HeldWeights, LoadProgress, LoadStandby, weights_key

log = structlog.get_logger()


@dataclass(slots=True)
class _Entry:
    command: KeepStandby
    layers: LayerRange
    held_weights: HeldWeights | None = None
    is_lent: bool = False
    """Whether the load of a stage may count on all that is held."""
    progress: LoadProgress = field(default_factory=LoadProgress)


class Standbys:
    """Standby weights: at most one range of layers for each deployment. `changed` is called when
    the coordinator must be notified."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._entries: dict[DeploymentName, _Entry] = {}

    async def set(self, command: KeepStandby, load: LoadStandby) -> None:
        """Hold the layers that the command names, and no others for its deployment. Raises what
        loading raises.

        Cancelled, it holds nothing. One call at a time for each deployment.
        """
        deployment, layers = command.deployment, command.layers
        entry = self._entries.get(deployment)
        if layers is None:
            self.drop(deployment)
            return
        if (
            entry is not None
            and entry.held_weights is not None
            and entry.held_weights.serves(command, layers)
        ):
            entry.command, entry.layers = command, layers
            self._changed()
            return
        former = (
            self._taken(deployment, layers)
            if entry is not None and _same_weights(entry, command)
            else None
        )
        self.drop(deployment)
        entry = self._entries[deployment] = _Entry(command, layers)
        try:
            entry.held_weights = await load(
                command, layers, entry.progress, [former] if former is not None else []
            )
        finally:
            if former is not None:
                former.pin.release()
            if entry.held_weights is None:
                self._entries.pop(deployment, None)
            self._changed()
        log.info(
            "standby_ready",
            deployment=deployment,
            layers=str(layers),
            seconds=round(entry.held_weights.load_s, 3),
        )

    def usable(self, prepare: PrepareStage) -> HeldWeights | None:
        """Held weights of a stage's layers; if none of them serve, they are dropped: the stage
        needs the memory.

        Weights that stream are not shared.
        """
        entry = self._entries.get(prepare.deployment)
        if entry is None or entry.held_weights is None:
            return None
        same = (
            entry.held_weights.key == weights_key(prepare)
            and not prepare.placed.weight_budget_bytes
        )
        if same and entry.held_weights.weights.shareable(prepare.placed.layers):
            entry.is_lent = True
            return entry.held_weights
        self.drop(prepare.deployment)
        return None

    def drop(self, deployment: DeploymentName) -> None:
        entry = self._entries.pop(deployment, None)
        if entry is not None and entry.held_weights is not None:
            entry.held_weights.pin.release()
            self._changed()

    def statuses(self) -> tuple[StageStatus, ...]:
        return tuple(_status(entry) for entry in self._entries.values())

    def _taken(self, deployment: DeploymentName, layers: LayerRange) -> HeldWeights | None:
        """Weights held of these layers, which are no standby any more; the rest goes."""
        entry = self._entries.pop(deployment)
        if entry.held_weights is not None and not entry.is_lent:
            entry.held_weights.weights.keep(layers)
        return entry.held_weights


def _same_weights(entry: _Entry, command: KeepStandby) -> bool:
    return entry.held_weights is not None and entry.held_weights.key == weights_key(command)


def _status(entry: _Entry) -> StageStatus:
    held_weights, command = entry.held_weights, entry.command
    return StageStatus(
        deployment=command.deployment,
        epoch=command.epoch,
        stage=0,
        layers=entry.layers,
        phase=StagePhase.STANDBY,
        parameter_bytes=0 if held_weights is None else held_weights.weights.parameter_bytes,
        fetched_bytes=entry.progress.fetched_bytes,
        total_bytes=entry.progress.total_bytes,
        load_s=0.0 if held_weights is None else held_weights.load_s,
        filling=entry.progress.filling if held_weights is None else None,
    )
