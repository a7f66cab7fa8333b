"""Data types, layers, nodes and stage statuses: message <-> value."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.condition import Condition
from edgeshard.domain.nodes.device import DeviceFacts, HugePages, Node, StageKey, StageStatus
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.wire.codec import numbers, pair

AnyMessage = TypeVar("AnyMessage", bound=Message)
Value = TypeVar("Value")


def message_of(value: Any, kind: type[AnyMessage], /, **converted: Any) -> AnyMessage:
    """A message of `kind` with the fields of a dataclass."""
    names: tuple[str, ...] = value.__match_args__
    return kind(**{name: getattr(value, name) for name in names if name not in converted}, **converted)


def value_of(message: Message, kind: type[Value], /, **converted: Any) -> Value:
    """A value of `kind`, a dataclass, with the fields of a message."""
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    return kind(**{name: getattr(message, name) for name in names if name not in converted}, **converted)


dtype_to_wire, dtype_from_wire = numbers(DType, pb.DataType, "dtype")
layers_to_wire, layers_from_wire = pair(LayerRange, pb.LayerRange)
facts_to_wire, facts_from_wire = pair(DeviceFacts, pb.DeviceFacts)
stage_status_to_wire, stage_status_from_wire = pair(StageStatus, pb.StageStatus)
stage_key_to_wire, stage_key_from_wire = pair(StageKey, pb.StageKey)
huge_pages_to_wire, huge_pages_from_wire = pair(HugePages, pb.HugePages)
node_to_wire, node_from_wire = pair(Node, pb.Node)
condition_to_wire, condition_from_wire = pair(Condition, pb.Condition)
