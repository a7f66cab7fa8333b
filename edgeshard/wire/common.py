"""Specs, placements, boxes and stage statuses: message <-> value."""

from __future__ import annotations

from edgeshard.domain.deployment import Deployment, DeploymentPhase, DeploymentSpec, parse_spec
from edgeshard.domain.device import DeviceFacts, HugePages, Node, StagePhase, StageStatus
from edgeshard.domain.dtypes import DType, Quantisation
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName
from edgeshard.domain.model import LayerRange
from edgeshard.domain.placement import ExplicitStage, PlacedStage, Placement, Prediction
from edgeshard.domain.step_cost import StageCost
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.wire.status import from_failure, to_failure

_DTYPES = {
    DType.FLOAT32: pb.DATA_TYPE_FLOAT32,
    DType.FLOAT16: pb.DATA_TYPE_FLOAT16,
    DType.BFLOAT16: pb.DATA_TYPE_BFLOAT16,
}
_DTYPES_BACK: dict[int, DType] = {number: dtype for dtype, number in _DTYPES.items()}
_STAGE_PHASES = {phase: getattr(pb, f"STAGE_PHASE_{phase.name}") for phase in StagePhase}
_STAGE_PHASES_BACK = {number: phase for phase, number in _STAGE_PHASES.items()}
_DEPLOYMENT_PHASES = {phase: getattr(admin_pb2, f"DEPLOYMENT_PHASE_{phase.name}") for phase in DeploymentPhase}
_DEPLOYMENT_PHASES_BACK = {number: phase for phase, number in _DEPLOYMENT_PHASES.items()}

# Fields of a spec that are the same on the wire; None is absent there.
_SPEC_SCALARS = (
    "privacy",
    "objective",
    "mode",
    "max_context",
    "max_new_tokens",
    "concurrency",
    "max_time_per_token_s",
    "max_inter_token_latency_s",
    "kv_overcommit",
    "prefix_cache",
    "micro_batches",
    "head_quantisation",
)


def dtype_to_wire(dtype: DType) -> pb.DataType:
    return _DTYPES[dtype]


def dtype_from_wire(number: int, field: str = "dtype") -> DType:
    if number not in _DTYPES_BACK:
        raise InvalidArgumentError(f"{field}: unknown data type {number}", field=field, reason="UNKNOWN_DTYPE")
    return _DTYPES_BACK[number]


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
    )


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
    )


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
    )


def placement_to_wire(placement: Placement) -> pb.Placement:
    stages = [
        pb.PlacedStage(
            index=stage.index,
            node_id=stage.node_id,
            node_name=stage.node_name,
            address=stage.address,
            layers=layers_to_wire(stage.layers),
            parameter_bytes=stage.parameter_bytes,
            kv_bytes=stage.kv_bytes,
            workspace_bytes=stage.workspace_bytes,
        )
        for stage in placement.stages
    ]
    return pb.Placement(
        stages=stages,
        kv_block_tokens=placement.kv_block_tokens,
        kv_blocks=placement.kv_blocks,
        micro_batch=placement.micro_batch,
        micro_batches=placement.micro_batches,
        predicted=_prediction_to_wire(placement.predicted) if placement.predicted is not None else None,
        note=placement.note,
        costs=[_cost_to_wire(cost) for cost in placement.costs],
    )


def _cost_to_wire(cost: StageCost) -> pb.StageCost:
    return pb.StageCost(
        rows=cost.rows,
        decode_s=cost.decode_s,
        prefill_s=cost.prefill_s,
        decode_pair_s=cost.decode_pair_s,
        prefill_pair_s=cost.prefill_pair_s,
        hop_delay_s=cost.hop_delay_s,
        hop_s=cost.hop_s,
        hop_token_s=cost.hop_token_s,
        prefill_behind_s=cost.prefill_behind_s,
    )


def _cost_from_wire(message: pb.StageCost) -> StageCost:
    if not len(message.rows) == len(message.decode_s) == len(message.prefill_s) > 0:
        raise InvalidArgumentError("costs: rows and their seconds differ in number", field="costs")
    return StageCost(
        rows=tuple(message.rows),
        decode_s=tuple(message.decode_s),
        prefill_s=tuple(message.prefill_s),
        decode_pair_s=message.decode_pair_s,
        prefill_pair_s=message.prefill_pair_s,
        hop_delay_s=message.hop_delay_s,
        hop_s=message.hop_s,
        hop_token_s=message.hop_token_s,
        prefill_behind_s=message.prefill_behind_s,
    )


def _prediction_to_wire(prediction: Prediction) -> pb.Prediction:
    return pb.Prediction(
        time_to_first_token_s=prediction.time_to_first_token_s,
        time_per_token_s=prediction.time_per_token_s,
        throughput_tps=prediction.throughput_tps,
        bottleneck=prediction.bottleneck,
        gap=prediction.gap,
    )


def placement_from_wire(message: pb.Placement) -> Placement:
    stages = tuple(
        PlacedStage(
            index=stage.index,
            node_id=NodeId(stage.node_id),
            node_name=NodeName(stage.node_name),
            address=stage.address,
            layers=layers_from_wire(stage.layers),
            parameter_bytes=stage.parameter_bytes,
            kv_bytes=stage.kv_bytes,
            workspace_bytes=stage.workspace_bytes,
        )
        for stage in message.stages
    )
    return Placement(
        stages=stages,
        kv_block_tokens=message.kv_block_tokens,
        kv_blocks=message.kv_blocks,
        micro_batch=message.micro_batch,
        micro_batches=message.micro_batches,
        predicted=_prediction_from_wire(message.predicted) if message.HasField("predicted") else None,
        note=message.note,
        costs=tuple(_cost_from_wire(cost) for cost in message.costs),
    )


def _prediction_from_wire(message: pb.Prediction) -> Prediction:
    return Prediction(
        time_to_first_token_s=message.time_to_first_token_s,
        time_per_token_s=message.time_per_token_s,
        throughput_tps=message.throughput_tps,
        bottleneck=message.bottleneck,
        gap=message.gap if message.HasField("gap") else None,
    )


def spec_to_wire(spec: DeploymentSpec) -> pb.DeploymentSpec:
    return pb.DeploymentSpec(
        name=spec.name,
        model=spec.model,
        source=spec.source,
        **{name: getattr(spec, name) for name in _SPEC_SCALARS},
        dtype=dtype_to_wire(spec.dtype),
        kv_dtype=dtype_to_wire(spec.kv_dtype) if spec.kv_dtype is not None else None,
        exclude=spec.exclude,
        reserve=spec.reserve,
        quantisation=spec.quantisation,
        layers=[pb.ExplicitStage(node=stage.node, layers=layers_to_wire(stage.layers)) for stage in spec.layers],
    )


def spec_from_wire(message: pb.DeploymentSpec) -> DeploymentSpec:
    """A spec from a message; a field that is absent takes the spec's default. Raises InvalidArgumentError."""
    values: dict[str, object] = {"name": message.name, "model": message.model, "source": message.source}
    values |= {name: getattr(message, name) for name in _SPEC_SCALARS if message.HasField(name)}
    for name in ("dtype", "kv_dtype"):
        if message.HasField(name):
            values[name] = dtype_from_wire(getattr(message, name), name)
    values["exclude"] = tuple(message.exclude)
    values["reserve"] = dict(message.reserve)
    values["quantisation"] = dict(message.quantisation)
    values["layers"] = tuple(
        ExplicitStage(NodeName(stage.node), layers_from_wire(stage.layers)) for stage in message.layers
    )
    return parse_spec(values)


def deployment_to_wire(deployment: Deployment) -> admin_pb2.Deployment:
    return admin_pb2.Deployment(
        spec=spec_to_wire(deployment.spec),
        phase=_DEPLOYMENT_PHASES[deployment.phase],
        epoch=deployment.epoch,
        placement=placement_to_wire(deployment.placement),
        failure=to_failure(deployment.failure) if deployment.failure else None,
        stages=[stage_status_to_wire(stage) for stage in deployment.stages],
        active_requests=deployment.active_requests,
    )


def deployment_from_wire(message: admin_pb2.Deployment) -> Deployment:
    return Deployment(
        spec=spec_from_wire(message.spec),
        phase=_DEPLOYMENT_PHASES_BACK[message.phase],
        epoch=Epoch(message.epoch),
        placement=placement_from_wire(message.placement),
        failure=from_failure(message.failure) if message.HasField("failure") else None,
        stages=tuple(stage_status_from_wire(stage) for stage in message.stages),
        active_requests=message.active_requests,
    )
