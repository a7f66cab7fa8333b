"""Data types, layers, nodes and stage statuses: message <-> value.

`message_of` and `value_of` are for values and messages whose fields have the same names: only the fields that are
converted are spelled out.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.condition import Condition, Support
from edgeshard.domain.nodes.device import (
    DeviceFacts,
    HugePages,
    Node,
    StageExperts,
    StageFilling,
    StageKey,
    StagePhase,
    StageStatus,
    StageStreaming,
    StageSwap,
    WeightLoadingWork,
)
from edgeshard.proto.v1 import common_pb2 as pb

AnyMessage = TypeVar("AnyMessage", bound=Message)
Value = TypeVar("Value")
_DTYPES = {
    DType.FLOAT32: pb.DATA_TYPE_FLOAT32,
    DType.FLOAT16: pb.DATA_TYPE_FLOAT16,
    DType.BFLOAT16: pb.DATA_TYPE_BFLOAT16,
}
_DTYPES_BACK: dict[int, DType] = {number: dtype for dtype, number in _DTYPES.items()}
_STAGE_PHASES = {phase: getattr(pb, f"STAGE_PHASE_{phase.name}") for phase in StagePhase}
_STAGE_PHASES_BACK = {number: phase for phase, number in _STAGE_PHASES.items()}
_FILLING_WORKS = {work: getattr(pb, f"FILLING_WORK_{work.name}") for work in WeightLoadingWork}
_FILLING_WORKS_BACK = {number: work for work, number in _FILLING_WORKS.items()}


def message_of(value: Any, kind: type[AnyMessage], /, **converted: Any) -> AnyMessage:
    """A message of `kind` with the fields of a dataclass."""
    names: tuple[str, ...] = value.__match_args__
    return kind(**{name: getattr(value, name) for name in names if name not in converted}, **converted)


def value_of(message: Message, kind: type[Value], /, **converted: Any) -> Value:
    """A value of `kind`, a dataclass, with the fields of a message."""
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    return kind(**{name: getattr(message, name) for name in names if name not in converted}, **converted)


def plain_value(value: Any) -> Any:
    """A field's value as Python has it: protobuf's lists and maps are none."""
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, MutableSequence) else value


def dtype_to_wire(dtype: DType) -> pb.DataType:
    return _DTYPES[dtype]


def dtype_from_wire(number: int, field: str = "dtype") -> DType:
    if number not in _DTYPES_BACK:
        raise InvalidArgumentError(f"{field}: unknown data type {number}", field=field, reason="UNKNOWN_DTYPE")
    return _DTYPES_BACK[number]


def kv_format_to_wire(kept: KvFormat) -> pb.DataType:
    return pb.DATA_TYPE_INT4 if kept is KvFormat.INT4 else _DTYPES[DType(kept)]


def kv_format_from_wire(number: int, field: str = "kv_dtype") -> KvFormat:
    return KvFormat.INT4 if number == pb.DATA_TYPE_INT4 else KvFormat(dtype_from_wire(number, field))


def quantisation_to_wire(quantisation: Quantisation | None) -> str:
    return quantisation or ""


def quantisation_from_wire(text: str) -> Quantisation | None:
    """None for the empty text. Raises InvalidArgumentError for a format this version does not know."""
    return Quantisation.parse(text) if text else None


def layers_to_wire(layers: LayerRange) -> pb.LayerRange:
    return pb.LayerRange(first=layers.first, end=layers.end)


def layers_from_wire(message: pb.LayerRange) -> LayerRange:
    return LayerRange(message.first, message.end)


def facts_to_wire(facts: DeviceFacts) -> pb.DeviceFacts:
    return message_of(facts, pb.DeviceFacts)


def facts_from_wire(message: pb.DeviceFacts) -> DeviceFacts:
    return value_of(message, DeviceFacts)


def stage_status_to_wire(status: StageStatus) -> pb.StageStatus:
    return message_of(
        status,
        pb.StageStatus,
        layers=layers_to_wire(status.layers),
        phase=_STAGE_PHASES[status.phase],
        streaming=None if status.streaming is None else message_of(status.streaming, pb.StageStreaming),
        filling=None
        if status.filling is None
        else message_of(status.filling, pb.StageFilling, work=_FILLING_WORKS[status.filling.work]),
        experts=None if status.experts is None else message_of(status.experts, pb.StageExperts),
        swap=None if status.swap is None else message_of(status.swap, pb.StageSwap),
    )


def _filling_to_wire(filling: StageFilling) -> pb.StageFilling:
    return message_of(filling, pb.StageFilling, work=_FILLING_WORKS[filling.work])


def _filling_from_wire(message: pb.StageFilling) -> StageFilling:
    work = _FILLING_WORKS_BACK.get(message.work, WeightLoadingWork.CONVERTING)
    return value_of(message, StageFilling, work=work)


def stage_status_from_wire(message: pb.StageStatus) -> StageStatus:
    return value_of(
        message,
        StageStatus,
        layers=layers_from_wire(message.layers),
        phase=_STAGE_PHASES_BACK.get(message.phase, StagePhase.FAILED),
        streaming=value_of(message.streaming, StageStreaming) if message.HasField("streaming") else None,
        filling=_filling_from_wire(message.filling) if message.HasField("filling") else None,
        experts=value_of(message.experts, StageExperts) if message.HasField("experts") else None,
        swap=value_of(message.swap, StageSwap) if message.HasField("swap") else None,
    )


def stage_key_to_wire(key: StageKey) -> pb.StageKey:
    return pb.StageKey(deployment=key.deployment, stage=key.stage, standby=key.standby)


def stage_key_from_wire(message: pb.StageKey) -> StageKey:
    return StageKey(DeploymentName(message.deployment), message.stage, message.standby)


def huge_pages_to_wire(huge_pages: HugePages) -> pb.HugePages:
    return pb.HugePages(wanted_bytes=huge_pages.wanted_bytes, held_bytes=huge_pages.held_bytes)


def huge_pages_from_wire(message: pb.HugePages) -> HugePages:
    return HugePages(message.wanted_bytes, message.held_bytes)


def node_to_wire(node: Node) -> pb.Node:
    return message_of(
        node,
        pb.Node,
        facts=facts_to_wire(node.facts),
        stages=[stage_status_to_wire(stage) for stage in node.stages],
        huge_pages=huge_pages_to_wire(node.huge_pages) if node.huge_pages is not None else None,
        condition=condition_to_wire(node.condition) if node.condition is not None else None,
    )


def node_from_wire(message: pb.Node) -> Node:
    return value_of(
        message,
        Node,
        facts=facts_from_wire(message.facts),
        stages=tuple(stage_status_from_wire(stage) for stage in message.stages),
        huge_pages=huge_pages_from_wire(message.huge_pages) if message.HasField("huge_pages") else None,
        condition=condition_from_wire(message.condition) if message.HasField("condition") else None,
    )


def condition_to_wire(condition: Condition) -> pb.Condition:
    return message_of(condition, pb.Condition)


def condition_from_wire(message: pb.Condition) -> Condition:
    """Kernels and CUDA that this version does not know count as unknown."""
    return value_of(message, Condition, kernels=_support(message.kernels), cuda=_support(message.cuda))


def _support(text: str) -> Support:
    return Support(text) if text in set(Support) else Support.UNKNOWN
