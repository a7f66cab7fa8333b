"""Specs, placements, deployments and their traffic: message <-> value."""

from __future__ import annotations

from typing import Any

from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase, DeploymentSpec, SuspectHop, parse_spec
from edgeshard.domain.deployments.loss import Loss, Pause
from edgeshard.domain.deployments.placement import ExplicitStage, LengthsFrom, PlacedStage, Placement, Prediction
from edgeshard.domain.deployments.replan import Replan, ReplanCall, ReplanReason
from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.domain.deployments.traffic import Lengths, Outlook, Traffic
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import Epoch, NodeName
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.wire.common import (
    dtype_from_wire,
    dtype_to_wire,
    kv_format_from_wire,
    kv_format_to_wire,
    layers_from_wire,
    layers_to_wire,
    message_of,
    plain_value,
    stage_status_from_wire,
    stage_status_to_wire,
    value_of,
)
from edgeshard.wire.status import from_failure, to_failure

_DEPLOYMENT_PHASES = {phase: getattr(admin_pb2, f"DEPLOYMENT_PHASE_{phase.name}") for phase in DeploymentPhase}
_DEPLOYMENT_PHASES_BACK = {number: phase for phase, number in _DEPLOYMENT_PHASES.items()}
_REPLAN_REASONS = {reason: getattr(admin_pb2, f"REPLAN_REASON_{reason.name}") for reason in ReplanReason}
_REPLAN_REASONS_BACK = {number: reason for reason, number in _REPLAN_REASONS.items()}


def placement_to_wire(placement: Placement) -> pb.Placement:
    stages = [message_of(stage, pb.PlacedStage, layers=layers_to_wire(stage.layers)) for stage in placement.stages]
    return message_of(
        placement,
        pb.Placement,
        stages=stages,
        predicted=_prediction_to_wire(placement.predicted) if placement.predicted is not None else None,
        costs=[message_of(cost, pb.StageCost) for cost in placement.costs],
    )


def _cost_from_wire(message: pb.StageCost) -> StageCost:
    if not len(message.rows) == len(message.decode_s) == len(message.prefill_s) > 0:
        raise InvalidArgumentError("costs: rows and their seconds differ in number", field="costs")
    return value_of(
        message,
        StageCost,
        rows=tuple(message.rows),
        decode_s=tuple(message.decode_s),
        prefill_s=tuple(message.prefill_s),
    )


def _prediction_to_wire(prediction: Prediction) -> pb.Prediction:
    return message_of(prediction, pb.Prediction, lengths=prediction.lengths.value)


def placement_from_wire(message: pb.Placement) -> Placement:
    stages = tuple(value_of(stage, PlacedStage, layers=layers_from_wire(stage.layers)) for stage in message.stages)
    return value_of(
        message,
        Placement,
        stages=stages,
        predicted=_prediction_from_wire(message.predicted) if message.HasField("predicted") else None,
        costs=tuple(_cost_from_wire(cost) for cost in message.costs),
        sweep=max(1, message.sweep),
    )


def _prediction_from_wire(message: pb.Prediction) -> Prediction:
    return value_of(
        message,
        Prediction,
        gap=message.gap if message.HasField("gap") else None,
        lengths=LengthsFrom(message.lengths) if message.lengths in list(LengthsFrom) else LengthsFrom.DEFAULT,
        joules_per_token=message.joules_per_token if message.HasField("joules_per_token") else None,
    )


def traffic_to_wire(traffic: Traffic) -> pb.Traffic:
    return pb.Traffic(
        requests=traffic.requests,
        prompts=pb.Lengths(mean=traffic.prompts.mean, counts=traffic.prompts.counts),
        answers=pb.Lengths(mean=traffic.answers.mean, counts=traffic.answers.counts),
        at_once=traffic.at_once,
    )


def traffic_from_wire(message: pb.Traffic) -> Traffic:
    return Traffic(
        requests=message.requests,
        prompts=Lengths(message.prompts.mean, tuple(message.prompts.counts)),
        answers=Lengths(message.answers.mean, tuple(message.answers.counts)),
        at_once=message.at_once,
    )


def _outlook_to_wire(outlook: Outlook) -> admin_pb2.Outlook:
    return message_of(
        outlook,
        admin_pb2.Outlook,
        expected=_prediction_to_wire(outlook.expected) if outlook.expected is not None else None,
        better=_prediction_to_wire(outlook.better) if outlook.better is not None else None,
        layers=[_explicit_to_wire(stage) for stage in outlook.layers],
        losses=[_loss_to_wire(loss) for loss in outlook.losses],
    )


def _outlook_from_wire(message: admin_pb2.Outlook) -> Outlook:
    return Outlook(
        expected=_prediction_from_wire(message.expected) if message.HasField("expected") else None,
        better=_prediction_from_wire(message.better) if message.HasField("better") else None,
        layers=tuple(_explicit_from_wire(stage) for stage in message.layers),
        gain=message.gain,
        note=message.note,
        losses=tuple(_loss_from_wire(loss) for loss in message.losses),
    )


def _loss_to_wire(loss: Loss) -> admin_pb2.Loss:
    return message_of(
        loss,
        admin_pb2.Loss,
        pause=None if loss.pause is None else message_of(loss.pause, admin_pb2.Pause),
        taken_by=[_explicit_to_wire(stage) for stage in loss.taken_by],
    )


def _loss_from_wire(message: admin_pb2.Loss) -> Loss:
    return value_of(
        message,
        Loss,
        pause=value_of(message.pause, Pause) if message.HasField("pause") else None,
        taken_by=tuple(_explicit_from_wire(stage) for stage in message.taken_by),
    )


def _explicit_to_wire(stage: ExplicitStage) -> pb.ExplicitStage:
    return pb.ExplicitStage(node=stage.node, layers=layers_to_wire(stage.layers))


def _explicit_from_wire(message: pb.ExplicitStage) -> ExplicitStage:
    return ExplicitStage(NodeName(message.node), layers_from_wire(message.layers))


def spec_to_wire(spec: DeploymentSpec) -> pb.DeploymentSpec:
    return message_of(
        spec,
        pb.DeploymentSpec,
        dtype=dtype_to_wire(spec.dtype),
        kv_dtype=kv_format_to_wire(spec.kv_dtype) if spec.kv_dtype is not None else None,
        layers=[_explicit_to_wire(stage) for stage in spec.layers],
    )


def spec_from_wire(message: pb.DeploymentSpec) -> DeploymentSpec:
    """A spec from a message; a field that is absent takes the spec's default. Raises InvalidArgumentError."""
    values: dict[str, Any] = {"name": "", "model": ""}
    values |= {field.name: plain_value(value) for field, value in message.ListFields()}
    if "dtype" in values:
        values["dtype"] = dtype_from_wire(message.dtype)
    if "kv_dtype" in values:
        values["kv_dtype"] = kv_format_from_wire(message.kv_dtype)
    values["layers"] = tuple(_explicit_from_wire(stage) for stage in message.layers)
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
        traffic=traffic_to_wire(deployment.traffic),
        outlook=_outlook_to_wire(deployment.outlook) if deployment.outlook is not None else None,
        suspects=[suspect_hop_to_wire(hop) for hop in deployment.suspects],
    )


def suspect_hop_to_wire(hop: SuspectHop) -> admin_pb2.SuspectHop:
    return admin_pb2.SuspectHop(from_stage=hop.from_stage, to_stage=hop.to_stage, why=hop.why)


def suspect_hop_from_wire(message: admin_pb2.SuspectHop) -> SuspectHop:
    return SuspectHop(message.from_stage, message.to_stage, message.why)


def deployment_from_wire(message: admin_pb2.Deployment) -> Deployment:
    return Deployment(
        spec=spec_from_wire(message.spec),
        phase=_DEPLOYMENT_PHASES_BACK[message.phase],
        epoch=Epoch(message.epoch),
        placement=placement_from_wire(message.placement),
        failure=from_failure(message.failure) if message.HasField("failure") else None,
        stages=tuple(stage_status_from_wire(stage) for stage in message.stages),
        active_requests=message.active_requests,
        traffic=traffic_from_wire(message.traffic),
        outlook=_outlook_from_wire(message.outlook) if message.HasField("outlook") else None,
        suspects=tuple(suspect_hop_from_wire(hop) for hop in message.suspects),
    )


def replan_call_to_wire(call: ReplanCall) -> admin_pb2.ReplanRequest:
    return message_of(call, admin_pb2.ReplanRequest)


def replan_call_from_wire(message: admin_pb2.ReplanRequest) -> ReplanCall:
    return value_of(message, ReplanCall)


def replan_to_wire(replan: Replan) -> admin_pb2.ReplanResponse:
    return admin_pb2.ReplanResponse(
        current=placement_to_wire(replan.current),
        found=placement_to_wire(replan.found),
        expected=_prediction_to_wire(replan.expected) if replan.expected is not None else None,
        gain=replan.gain,
        reason=_REPLAN_REASONS[replan.reason],
        note=replan.note,
    )


def replan_from_wire(message: admin_pb2.ReplanResponse) -> Replan:
    return Replan(
        current=placement_from_wire(message.current),
        found=placement_from_wire(message.found),
        expected=_prediction_from_wire(message.expected) if message.HasField("expected") else None,
        gain=message.gain if message.HasField("gain") else None,
        reason=_REPLAN_REASONS_BACK[message.reason],
        note=message.note,
    )
