"""Data types, layers, nodes and stage statuses: message <-> value."""

from __future__ import annotations

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName
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
    return pb.DeviceFacts(
        kind=facts.kind,
        model=facts.model,
        cores=facts.cores,
        memory_total_bytes=facts.memory_total_bytes,
        memory_budget_bytes=facts.memory_budget_bytes,
        unified_memory=facts.unified_memory,
        software=facts.software,
        bits_fingerprint=facts.bits_fingerprint,
    )


def facts_from_wire(message: pb.DeviceFacts) -> DeviceFacts:
    return DeviceFacts(
        kind=message.kind,
        model=message.model,
        cores=message.cores,
        memory_total_bytes=message.memory_total_bytes,
        memory_budget_bytes=message.memory_budget_bytes,
        unified_memory=message.unified_memory,
        software=message.software,
        bits_fingerprint=message.bits_fingerprint,
    )


def stage_status_to_wire(status: StageStatus) -> pb.StageStatus:
    return pb.StageStatus(
        deployment=status.deployment,
        epoch=status.epoch,
        stage=status.stage,
        layers=layers_to_wire(status.layers),
        phase=_STAGE_PHASES[status.phase],
        parameter_bytes=status.parameter_bytes,
        kv_bytes_capacity=status.kv_bytes_capacity,
        kv_bytes_in_use=status.kv_bytes_in_use,
        fetched_bytes=status.fetched_bytes,
        total_bytes=status.total_bytes,
        steps_done=status.steps_done,
        tokens_done=status.tokens_done,
        busy_share=status.busy_share,
        steps_waiting=status.steps_waiting,
        requests_running=status.requests_running,
        requests_waiting=status.requests_waiting,
        micro_batches=status.micro_batches,
        step_age_s=status.step_age_s,
        step_cpu_s=status.step_cpu_s,
        failure_reason=status.failure_reason,
        load_s=status.load_s,
        streaming=None if status.streaming is None else _streaming_to_wire(status.streaming),
        filling=None if status.filling is None else _filling_to_wire(status.filling),
        experts=None if status.experts is None else _experts_to_wire(status.experts),
        swap=None if status.swap is None else _swap_to_wire(status.swap),
    )


def _streaming_to_wire(streaming: StageStreaming) -> pb.StageStreaming:
    return pb.StageStreaming(
        resident_bytes=streaming.resident_bytes,
        streamed_bytes=streaming.streamed_bytes,
        read_bytes=streaming.read_bytes,
        waited_s=streaming.waited_s,
    )


def _streaming_from_wire(message: pb.StageStreaming) -> StageStreaming:
    return StageStreaming(message.resident_bytes, message.streamed_bytes, message.read_bytes, message.waited_s)


def _filling_to_wire(filling: StageFilling) -> pb.StageFilling:
    return pb.StageFilling(
        work=_FILLING_WORKS[filling.work],
        done_bytes=filling.done_bytes,
        total_bytes=filling.total_bytes,
        left_s=filling.left_s,
    )


def _filling_from_wire(message: pb.StageFilling) -> StageFilling:
    work = _FILLING_WORKS_BACK.get(message.work, WeightLoadingWork.CONVERTING)
    return StageFilling(work, message.done_bytes, message.total_bytes, message.left_s)


def _experts_to_wire(experts: StageExperts) -> pb.StageExperts:
    return pb.StageExperts(
        cached_bytes=experts.cached_bytes,
        room_bytes=experts.room_bytes,
        total_bytes=experts.total_bytes,
        hits=experts.hits,
        misses=experts.misses,
        read_bytes=experts.read_bytes,
        waited_s=experts.waited_s,
    )


def _experts_from_wire(message: pb.StageExperts) -> StageExperts:
    return StageExperts(
        message.cached_bytes,
        message.room_bytes,
        message.total_bytes,
        message.hits,
        message.misses,
        message.read_bytes,
        message.waited_s,
    )


def _swap_to_wire(swap: StageSwap) -> pb.StageSwap:
    return pb.StageSwap(
        capacity_bytes=swap.capacity_bytes,
        kept_bytes=swap.kept_bytes,
        swapped_out=swap.swapped_out,
        swapped_in=swap.swapped_in,
    )


def _swap_from_wire(message: pb.StageSwap) -> StageSwap:
    return StageSwap(message.capacity_bytes, message.kept_bytes, message.swapped_out, message.swapped_in)


def stage_status_from_wire(message: pb.StageStatus) -> StageStatus:
    return StageStatus(
        deployment=DeploymentName(message.deployment),
        epoch=Epoch(message.epoch),
        stage=message.stage,
        layers=layers_from_wire(message.layers),
        phase=_STAGE_PHASES_BACK.get(message.phase, StagePhase.FAILED),
        parameter_bytes=message.parameter_bytes,
        kv_bytes_capacity=message.kv_bytes_capacity,
        kv_bytes_in_use=message.kv_bytes_in_use,
        fetched_bytes=message.fetched_bytes,
        total_bytes=message.total_bytes,
        steps_done=message.steps_done,
        tokens_done=message.tokens_done,
        busy_share=message.busy_share,
        steps_waiting=message.steps_waiting,
        requests_running=message.requests_running,
        requests_waiting=message.requests_waiting,
        micro_batches=message.micro_batches,
        step_age_s=message.step_age_s,
        step_cpu_s=message.step_cpu_s,
        failure_reason=message.failure_reason,
        load_s=message.load_s,
        streaming=_streaming_from_wire(message.streaming) if message.HasField("streaming") else None,
        filling=_filling_from_wire(message.filling) if message.HasField("filling") else None,
        experts=_experts_from_wire(message.experts) if message.HasField("experts") else None,
        swap=_swap_from_wire(message.swap) if message.HasField("swap") else None,
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
    return pb.Node(
        node_id=node.node_id,
        name=node.name,
        address=node.address,
        wire_version=node.wire_version,
        facts=facts_to_wire(node.facts),
        connected=node.connected,
        heartbeat_age_s=node.heartbeat_age_s,
        free_bytes=node.free_bytes,
        stages=[stage_status_to_wire(stage) for stage in node.stages],
        huge_pages=huge_pages_to_wire(node.huge_pages) if node.huge_pages is not None else None,
        starting=node.starting,
        unknown_profiles=node.unknown_profiles,
        unknown_links=node.unknown_links,
        condition=condition_to_wire(node.condition) if node.condition is not None else None,
    )


def node_from_wire(message: pb.Node) -> Node:
    return Node(
        node_id=NodeId(message.node_id),
        name=NodeName(message.name),
        address=message.address,
        wire_version=message.wire_version,
        facts=facts_from_wire(message.facts),
        connected=message.connected,
        heartbeat_age_s=message.heartbeat_age_s,
        free_bytes=message.free_bytes,
        stages=tuple(stage_status_from_wire(stage) for stage in message.stages),
        huge_pages=huge_pages_from_wire(message.huge_pages) if message.HasField("huge_pages") else None,
        starting=message.starting,
        unknown_profiles=message.unknown_profiles,
        unknown_links=message.unknown_links,
        condition=condition_from_wire(message.condition) if message.HasField("condition") else None,
    )


def condition_to_wire(condition: Condition) -> pb.Condition:
    return pb.Condition(
        version=condition.version,
        utc_s=condition.utc_s,
        cores=condition.cores,
        cpu_quota=condition.cpu_quota,
        memory_total_bytes=condition.memory_total_bytes,
        memory_available_bytes=condition.memory_available_bytes,
        swap_used_bytes=condition.swap_used_bytes,
        disk_total_bytes=condition.disk_total_bytes,
        disk_free_bytes=condition.disk_free_bytes,
        disk_write_bps=condition.disk_write_bps,
        huge_pages=condition.huge_pages,
        kernels=condition.kernels,
        cuda=condition.cuda,
        certificate_ends_s=condition.certificate_ends_s,
        certificate_due_s=condition.certificate_due_s,
        clock_ahead_s=condition.clock_ahead_s,
    )


def condition_from_wire(message: pb.Condition) -> Condition:
    """What this version does not know of kernels and CUDA counts as unknown."""
    return Condition(
        version=message.version,
        utc_s=message.utc_s,
        cores=message.cores,
        cpu_quota=message.cpu_quota,
        memory_total_bytes=message.memory_total_bytes,
        memory_available_bytes=message.memory_available_bytes,
        swap_used_bytes=message.swap_used_bytes,
        disk_total_bytes=message.disk_total_bytes,
        disk_free_bytes=message.disk_free_bytes,
        disk_write_bps=message.disk_write_bps,
        huge_pages=message.huge_pages,
        kernels=_support(message.kernels),
        cuda=_support(message.cuda),
        certificate_ends_s=message.certificate_ends_s,
        certificate_due_s=message.certificate_due_s,
        clock_ahead_s=message.clock_ahead_s,
    )


def _support(text: str) -> Support:
    return Support(text) if text in set(Support) else Support.UNKNOWN
