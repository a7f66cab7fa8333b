"""Weights that a node keeps in memory for stages that other nodes may lose: one range of layers for
each deployment. Pure.

The executor makes the held weights equal to the newest command, so a command may be repeated or
replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgeshard.domain.control.commands import KeepStandby
from edgeshard.domain.errors import EdgeShardError, StaleEpochError
from edgeshard.domain.ids import DeploymentName, Epoch, OperationId


@dataclass(frozen=True, slots=True)
class Standby:
    """`command` is the newest command, `begun` the newest that the executor was given. `operations`
    wait for it."""

    command: KeepStandby
    begun: KeepStandby | None = None
    operations: tuple[OperationId, ...] = ()

    @property
    def is_done(self) -> bool:
        return self.begun == self.command and not self.operations


@dataclass(frozen=True, slots=True)
class SetStandby:
    """Action: hold these weights, and no others, for the deployment. Answered by StandbySet."""

    command: KeepStandby


@dataclass(frozen=True, slots=True)
class StandbySet:
    """Event: the command's weights are held or, with a reason, none are."""

    command: KeepStandby
    error: EdgeShardError | None = None


Standbys = dict[DeploymentName, Standby]
Answers = tuple[tuple[OperationId, EdgeShardError | None], ...]


def asked(
    standbys: Standbys, operation_id: OperationId, command: KeepStandby
) -> tuple[Standbys, Answers]:
    """A command arrived: the standbys with it, and the immediate answers."""
    standby = standbys.get(command.deployment)
    if standby is None:
        return {**standbys, command.deployment: Standby(command, None, (operation_id,))}, ()
    if operation_id in standby.operations:
        return standbys, ()
    if command.epoch < standby.command.epoch:
        low = f"epoch {command.epoch} is below {standby.command.epoch}"
        return standbys, ((operation_id, StaleEpochError(low, field="epoch")),)
    if standby.is_done and command == standby.command:
        return standbys, ((operation_id, None),)
    superseded = StaleEpochError(
        "a newer command for this standby took its place", reason="SUPERSEDED"
    )
    if command == standby.command:
        return {
            **standbys,
            command.deployment: replace(standby, operations=(*standby.operations, operation_id)),
        }, ()
    changed = Standby(command, standby.begun, (operation_id,))
    return {**standbys, command.deployment: changed}, tuple(
        (former, superseded) for former in standby.operations
    )


def released(
    standbys: Standbys, deployment: DeploymentName, epoch: Epoch
) -> tuple[Standbys, Answers]:
    """The deployment is released up to this epoch, and so are the weights kept for it."""
    standby = standbys.get(deployment)
    if standby is None or standby.command.epoch > epoch or standby.command.layers is None:
        return standbys, ()
    error = StaleEpochError(f"deployment {deployment} was released", reason="SUPERSEDED")
    nothing = replace(standby, command=replace(standby.command, layers=None), operations=())
    return {**standbys, deployment: nothing}, tuple(
        (operation, error) for operation in standby.operations
    )


def due(standbys: Standbys) -> list[SetStandby]:
    return [
        SetStandby(standby.command)
        for standby in standbys.values()
        if standby.begun != standby.command
    ]


def begun(standbys: Standbys, action: SetStandby) -> Standbys:
    command = action.command
    return {**standbys, command.deployment: replace(standbys[command.deployment], begun=command)}


def ended(standbys: Standbys, event: StandbySet) -> tuple[Standbys, Answers]:
    """The executor has finished a command. If the command was replaced meanwhile, nothing
    changes."""
    command = event.command
    standby = standbys.get(command.deployment)
    if standby is None or standby.command != command:
        return standbys, ()
    answers = tuple((operation, event.error) for operation in standby.operations)
    if event.error is not None or command.layers is None:
        return {
            name: other for name, other in standbys.items() if name != command.deployment
        }, answers
    return {**standbys, command.deployment: replace(standby, operations=())}, answers
