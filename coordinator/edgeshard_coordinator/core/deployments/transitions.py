"""The phases of a deployment and the legal ways between them, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.errors import InternalError


class Trigger(StrEnum):
    ALL_PREPARED = "all-prepared"
    """Every stage of the epoch answered its prepare."""
    HEAD_READY = "head-ready"
    """The head answered its activate and is attached."""
    HEAD_DETACHED = "head-detached"
    BROKE_BEFORE_READY = "broke-before-ready"
    """A stage, a node or the head failed, and the deployment has never been ready."""
    BROKE_AFTER_READY = "broke-after-ready"
    """The same for a deployment that has been ready: it is kept and tried again."""
    REPLANNED = "replanned"
    """Other nodes take over what the lost ones held."""
    ADOPTED = "adopted"
    """After a restart of the coordinator every stage reports that it still holds the epoch."""
    NODES_BACK = "nodes-back"
    """Every node is connected and the delay before another attempt is over."""
    MOVE = "move"
    """An operator had it planned again, and the disk has the placement that was found."""
    DELETE = "delete"


TRANSITIONS: Mapping[tuple[Phase, Trigger], Phase] = MappingProxyType(
    {
        (Phase.LOADING, Trigger.ALL_PREPARED): Phase.ACTIVATING,
        (Phase.LOADING, Trigger.BROKE_BEFORE_READY): Phase.FAILED,
        (Phase.LOADING, Trigger.BROKE_AFTER_READY): Phase.WAITING,
        (Phase.LOADING, Trigger.DELETE): Phase.DELETING,
        (Phase.ACTIVATING, Trigger.HEAD_READY): Phase.READY,
        (Phase.ACTIVATING, Trigger.BROKE_BEFORE_READY): Phase.FAILED,
        (Phase.ACTIVATING, Trigger.BROKE_AFTER_READY): Phase.WAITING,
        (Phase.ACTIVATING, Trigger.DELETE): Phase.DELETING,
        (Phase.READY, Trigger.HEAD_DETACHED): Phase.ACTIVATING,
        (Phase.READY, Trigger.BROKE_AFTER_READY): Phase.WAITING,
        (Phase.READY, Trigger.MOVE): Phase.LOADING,
        (Phase.READY, Trigger.DELETE): Phase.DELETING,
        (Phase.WAITING, Trigger.NODES_BACK): Phase.LOADING,
        (Phase.WAITING, Trigger.REPLANNED): Phase.LOADING,
        (Phase.WAITING, Trigger.ADOPTED): Phase.ACTIVATING,
        (Phase.WAITING, Trigger.DELETE): Phase.DELETING,
        (Phase.FAILED, Trigger.DELETE): Phase.DELETING,
    }
)


def next_phase(phase: Phase, trigger: Trigger) -> Phase:
    """Raises InternalError for a pair that is not in the table."""
    if (phase, trigger) not in TRANSITIONS:
        raise InternalError(
            f"a deployment in {phase} cannot follow {trigger}", reason="ILLEGAL_TRANSITION"
        )
    return TRANSITIONS[phase, trigger]
