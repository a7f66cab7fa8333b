"""The allowed writers: a row for each field of each message of an agent, and the checks that the
state machine makes.

A node speaks for itself and for what the coordinator gave it: a stage of a placement, a command.
Its word on anything else counts for nothing: such a message changes no deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from edgeshard.domain.control import commands
from edgeshard.domain.control.commands import CommandKey, CommandKind
from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.device import Condition, StagePhase, StageStatus
from edgeshard.domain.nodes.profile import MeasuredLink
from edgeshard.domain.requests import head
from edgeshard.domain.requests.link import LinkSuspected

if TYPE_CHECKING:
    from edgeshard_coordinator.core.values.state import DeploymentRecord


class Writer(StrEnum):
    """The allowed writer of a field."""

    ITSELF = "itself"
    """Any node, of itself. It decides nothing of another node or of a deployment in which the node
    has no part."""
    STAGE = "stage"
    """The node of the stage, by the placement of the current epoch."""
    HEAD = "head"
    """The node of the first stage, by the placement of the current epoch."""
    COMMANDED = "commanded"
    """The node to which the command was sent."""
    NONE = "none"
    """No node: it is compared with what the coordinator knows, and a message that differs counts
    for nothing."""


_ITSELF = Writer.ITSELF
_STAGE = Writer.STAGE
_HEAD = Writer.HEAD
_COMMANDED, _NONE = Writer.COMMANDED, Writer.NONE


def _fields(authority: Writer, *names: str) -> dict[str, Writer]:
    return dict.fromkeys(names, authority)


_STAGE_FIGURES = (
    *(
        "layers",
        "phase",
        "parameter_bytes",
        "kv_bytes_capacity",
        "kv_bytes_in_use",
        "fetched_bytes",
        "total_bytes",
    ),
    *(
        "steps_done",
        "tokens_done",
        "busy_share",
        "steps_waiting",
        "requests_running",
        "requests_waiting",
    ),
    *(
        "micro_batches",
        "step_age_s",
        "step_cpu_s",
        "failure_reason",
        "load_s",
        "streaming",
        "filling",
        "experts",
    ),
    *("swap", "guesses"),
)
_CONDITION = (
    *(
        "version",
        "utc_s",
        "cores",
        "cpu_quota",
        "memory_total_bytes",
        "memory_available_bytes",
        "swap_used_bytes",
    ),
    *("disk_total_bytes", "disk_free_bytes", "disk_write_bps", "huge_pages", "kernels", "cuda"),
    *("certificate_ends_s", "certificate_due_s", "clock_ahead_s"),
)

TABLE: Mapping[type, Mapping[str, Writer]] = {
    commands.Registration: {
        # The certificate has the name, and an id belongs to the name that used it first.
        **_fields(_NONE, "node_id", "name", "wire_version"),
        # An operator's labels hide a node's own (`KnownNode.labels`).
        **_fields(_ITSELF, "address", "facts", "incarnation", "starting", "labels"),
    },
    commands.ControlHello: _fields(_NONE, "node_id", "incarnation"),
    commands.Heartbeat: {
        **_fields(_NONE, "node_id", "incarnation"),
        **_fields(
            _ITSELF, "stages", "memory_available_bytes", "huge_pages", "others_share", "packed"
        ),
    },
    commands.HeartbeatChange: _fields(
        _ITSELF,
        "stages",
        "removed",
        "memory_available_bytes",
        "huge_pages",
        "others_share",
        "urgent",
        "packed",
    ),
    # A stage beyond the node's placement counts for two things: the node is to release it, and the
    # next epoch of the name is above `State.epoch_floor`, which no node chooses.
    StageStatus: {
        **_fields(_NONE, "deployment", "epoch", "stage"),
        **_fields(_STAGE, *_STAGE_FIGURES),
    },
    commands.CommandResult: {
        **_fields(_NONE, "operation_id"),
        **_fields(_COMMANDED, "failure", "stage", "trace", "packed"),
    },
    commands.CommandProgress: {
        **_fields(_NONE, "operation_id"),
        **_fields(_COMMANDED, "done", "total", "what"),
    },
    commands.DumpPart: {**_fields(_NONE, "operation_id"), **_fields(_COMMANDED, "part", "last")},
    LinkSuspected: {
        **_fields(_NONE, "deployment", "epoch", "from_stage", "to_stage"),
        **_fields(_STAGE, "recovered", "why"),
    },
    Condition: _fields(_ITSELF, *_CONDITION),
    commands.ProfileReport: {
        **_fields(_NONE, "node_id"),
        **_fields(_ITSELF, "facts", "compute", "links"),
    },
    MeasuredLink: {**_fields(_NONE, "sender", "receiver"), **_fields(_ITSELF, "profile")},
    head.HeadHello: {
        **_fields(_NONE, "node_id", "deployment", "epoch"),
        **_fields(_HEAD, "held", "beacons", "head_for_s"),
    },
    head.HeadBeacon: _fields(_HEAD, "follows"),
    head.HeadEvents: {**_fields(_NONE, "epoch"), **_fields(_HEAD, "events")},
    head.HeadEvent: {**_fields(_NONE, "request_id"), **_fields(_HEAD, "event")},
}
"""A test compares it with the messages."""


def may_set(
    kind: type, field: str, record: DeploymentRecord, node_id: NodeId, stage: int = 0
) -> bool:
    """Whether a node may set this field of a message that is about a stage of the deployment, by
    its row."""
    match TABLE[kind][field]:
        case Writer.STAGE:
            return has_stage(record, node_id, stage)
        case Writer.HEAD:
            return has_stage(record, node_id, 0)
        case rest:
            return rest is Writer.ITSELF


def has_stage(record: DeploymentRecord, node_id: NodeId, stage: int) -> bool:
    """Whether a node has this stage of the deployment by its placement."""
    stages = record.placement.stages
    return 0 <= stage < len(stages) and stages[stage].node_id == node_id


def speaks_for_stage(record: DeploymentRecord, node_id: NodeId, status: StageStatus) -> bool:
    """Whether a node's status of a stage counts for the deployment: it is of the epoch, and of the
    node's own stage."""
    is_of_epoch = (status.deployment, status.epoch) == (record.name, record.epoch)
    is_running = is_of_epoch and status.phase is not StagePhase.STANDBY
    return is_running and may_set(StageStatus, "phase", record, node_id, status.stage)


def may_answer(record: DeploymentRecord, node_id: NodeId, key: CommandKey) -> bool:
    """Whether a command of the deployment was for this node: one of the current epoch for its
    stage, or its standby."""
    if key.kind is CommandKind.STANDBY:
        return any(
            entry.number == key.stage and entry.node_id == node_id for entry in record.standbys
        )
    return key.epoch == record.epoch and has_stage(record, node_id, key.stage)
