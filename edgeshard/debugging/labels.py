"""An event or an action in a line of the log: its kind, and what it is about."""

from __future__ import annotations

from enum import Enum
from typing import Any

from edgeshard.domain.control.commands import CommandKey
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.errors import EdgeShardError
from edgeshard.forms import field_names

_NAMED = frozenset(
    {"name", "node", "node_id", "deployment", "epoch", "stage", "phase", "revision", "connection"}
    | {"attachment", "operation_id", "uid", "incarnation", "retry_after_s", "active_requests"}
)
_DEPTH = 2


def labels(value: Any) -> dict[str, Any]:
    """`kind` and the fields that name node, deployment, epoch or operation, also of nested values.

    Whatever is not of these few names stays out.
    """
    label_values: dict[str, Any] = {"kind": type(value).__name__}
    _collect(value, label_values, _DEPTH)
    return label_values


def _collect(value: Any, label_values: dict[str, Any], depth: int) -> None:
    inner: list[Any] = []
    for name in field_names(type(value)):
        part = getattr(value, name)
        if isinstance(part, EdgeShardError):
            label_values.setdefault("reason", part.reason)
        elif isinstance(part, CommandKey):
            label_values.setdefault("operation_id", part.operation_id)
        elif name in _NAMED and isinstance(part, str | int | float | Enum):
            label_values.setdefault(_label(value, name), part)
        elif field_names(type(part)):
            inner.append((name, part))
    for name, part in inner:
        if name in ("command", "task", "action"):
            label_values.setdefault(name, type(part).__name__)
        if depth:
            _collect(part, label_values, depth - 1)


def _label(value: Any, name: str) -> str:
    if name != "name":
        return name
    return "deployment" if isinstance(value, DeploymentSpec) else "node"
