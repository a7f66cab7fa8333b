from edgeshard.proto.v1 import common_pb2 as _common_pb2
from edgeshard.proto.v1 import profile_pb2 as _profile_pb2
from edgeshard.proto.v1 import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplanReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLAN_REASON_UNSPECIFIED: _ClassVar[ReplanReason]
    REPLAN_REASON_MOVED: _ClassVar[ReplanReason]
    REPLAN_REASON_WOULD_MOVE: _ClassVar[ReplanReason]
    REPLAN_REASON_SAME_LAYERS: _ClassVar[ReplanReason]
    REPLAN_REASON_SMALL_GAIN: _ClassVar[ReplanReason]
    REPLAN_REASON_NOT_WEIGHED: _ClassVar[ReplanReason]
    REPLAN_REASON_NOTHING_NEW: _ClassVar[ReplanReason]

class DeploymentPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPLOYMENT_PHASE_UNSPECIFIED: _ClassVar[DeploymentPhase]
    DEPLOYMENT_PHASE_LOADING: _ClassVar[DeploymentPhase]
    DEPLOYMENT_PHASE_ACTIVATING: _ClassVar[DeploymentPhase]
    DEPLOYMENT_PHASE_READY: _ClassVar[DeploymentPhase]
    DEPLOYMENT_PHASE_WAITING: _ClassVar[DeploymentPhase]
    DEPLOYMENT_PHASE_FAILED: _ClassVar[DeploymentPhase]
    DEPLOYMENT_PHASE_DELETING: _ClassVar[DeploymentPhase]
REPLAN_REASON_UNSPECIFIED: ReplanReason
REPLAN_REASON_MOVED: ReplanReason
REPLAN_REASON_WOULD_MOVE: ReplanReason
REPLAN_REASON_SAME_LAYERS: ReplanReason
REPLAN_REASON_SMALL_GAIN: ReplanReason
REPLAN_REASON_NOT_WEIGHED: ReplanReason
REPLAN_REASON_NOTHING_NEW: ReplanReason
DEPLOYMENT_PHASE_UNSPECIFIED: DeploymentPhase
DEPLOYMENT_PHASE_LOADING: DeploymentPhase
DEPLOYMENT_PHASE_ACTIVATING: DeploymentPhase
DEPLOYMENT_PHASE_READY: DeploymentPhase
DEPLOYMENT_PHASE_WAITING: DeploymentPhase
DEPLOYMENT_PHASE_FAILED: DeploymentPhase
DEPLOYMENT_PHASE_DELETING: DeploymentPhase

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[_common_pb2.Node, _Mapping]]] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class LabelNodeRequest(_message.Message):
    __slots__ = ("node", "labels", "removed")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    node: str
    labels: _containers.ScalarMap[str, str]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class LabelNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.Node
    def __init__(self, node: _Optional[_Union[_common_pb2.Node, _Mapping]] = ...) -> None: ...

class GetNodeResponse(_message.Message):
    __slots__ = ("node", "profiles", "links", "unknown")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.Node
    profiles: _containers.RepeatedCompositeFieldContainer[StoredProfile]
    links: _containers.RepeatedCompositeFieldContainer[_profile_pb2.MeasuredLink]
    unknown: UnknownFigures
    def __init__(self, node: _Optional[_Union[_common_pb2.Node, _Mapping]] = ..., profiles: _Optional[_Iterable[_Union[StoredProfile, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[_profile_pb2.MeasuredLink, _Mapping]]] = ..., unknown: _Optional[_Union[UnknownFigures, _Mapping]] = ...) -> None: ...

class UnknownFigures(_message.Message):
    __slots__ = ("profiles", "links")
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    profiles: _containers.RepeatedCompositeFieldContainer[UnknownProfile]
    links: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, profiles: _Optional[_Iterable[_Union[UnknownProfile, _Mapping]]] = ..., links: _Optional[_Iterable[str]] = ...) -> None: ...

class UnknownProfile(_message.Message):
    __slots__ = ("models", "dtype", "quantisation")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    dtype: _common_pb2.DataType
    quantisation: str
    def __init__(self, models: _Optional[_Iterable[str]] = ..., dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., quantisation: _Optional[str] = ...) -> None: ...

class StoredProfile(_message.Message):
    __slots__ = ("node_id", "profile", "models", "age_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    profile: _profile_pb2.ComputeProfile
    models: _containers.RepeatedScalarFieldContainer[str]
    age_s: float
    def __init__(self, node_id: _Optional[str] = ..., profile: _Optional[_Union[_profile_pb2.ComputeProfile, _Mapping]] = ..., models: _Optional[_Iterable[str]] = ..., age_s: _Optional[float] = ...) -> None: ...

class GetSiteRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetSiteResponse(_message.Message):
    __slots__ = ("nodes", "links", "profiles", "config_json", "traffic", "coordinator", "manifest_digest", "packed")
    NODES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Node]
    links: _containers.RepeatedCompositeFieldContainer[_profile_pb2.MeasuredLink]
    profiles: _containers.RepeatedCompositeFieldContainer[StoredProfile]
    config_json: bytes
    traffic: _common_pb2.Traffic
    coordinator: _common_pb2.Condition
    manifest_digest: str
    packed: _containers.RepeatedCompositeFieldContainer[PackedOnNode]
    def __init__(self, nodes: _Optional[_Iterable[_Union[_common_pb2.Node, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[_profile_pb2.MeasuredLink, _Mapping]]] = ..., profiles: _Optional[_Iterable[_Union[StoredProfile, _Mapping]]] = ..., config_json: _Optional[bytes] = ..., traffic: _Optional[_Union[_common_pb2.Traffic, _Mapping]] = ..., coordinator: _Optional[_Union[_common_pb2.Condition, _Mapping]] = ..., manifest_digest: _Optional[str] = ..., packed: _Optional[_Iterable[_Union[PackedOnNode, _Mapping]]] = ...) -> None: ...

class PackedOnNode(_message.Message):
    __slots__ = ("node_id", "units")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    units: _common_pb2.PackedIds
    def __init__(self, node_id: _Optional[str] = ..., units: _Optional[_Union[_common_pb2.PackedIds, _Mapping]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("operation_id", "model", "dtype", "nodes", "quick", "again", "quantisation")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    QUICK_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    model: str
    dtype: _common_pb2.DataType
    nodes: _containers.RepeatedScalarFieldContainer[str]
    quick: bool
    again: bool
    quantisation: str
    def __init__(self, operation_id: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., nodes: _Optional[_Iterable[str]] = ..., quick: _Optional[bool] = ..., again: _Optional[bool] = ..., quantisation: _Optional[str] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("node", "done", "total", "what", "finished", "failure", "missed_nodes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MISSED_NODES_FIELD_NUMBER: _ClassVar[int]
    node: str
    done: int
    total: int
    what: str
    finished: bool
    failure: _common_pb2.Failure
    missed_nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., what: _Optional[str] = ..., finished: _Optional[bool] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., missed_nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class ListPackedRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ListPackedResponse(_message.Message):
    __slots__ = ("units",)
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[_common_pb2.PackedUnit]
    def __init__(self, units: _Optional[_Iterable[_Union[_common_pb2.PackedUnit, _Mapping]]] = ...) -> None: ...

class DropPackedRequest(_message.Message):
    __slots__ = ("operation_id", "node", "ids")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    node: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, operation_id: _Optional[str] = ..., node: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DropPackedResponse(_message.Message):
    __slots__ = ("units",)
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[_common_pb2.PackedUnit]
    def __init__(self, units: _Optional[_Iterable[_Union[_common_pb2.PackedUnit, _Mapping]]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[StoredModel]
    def __init__(self, models: _Optional[_Iterable[_Union[StoredModel, _Mapping]]] = ...) -> None: ...

class StoredModel(_message.Message):
    __slots__ = ("name", "manifest_digest", "architecture", "layer_count", "parameter_count", "stored_bytes", "dtype", "max_context", "further", "weights_files")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FILES_FIELD_NUMBER: _ClassVar[int]
    name: str
    manifest_digest: str
    architecture: str
    layer_count: int
    parameter_count: int
    stored_bytes: int
    dtype: _common_pb2.DataType
    max_context: int
    further: _common_pb2.FurtherBlocks
    weights_files: _containers.RepeatedCompositeFieldContainer[WeightsFile]
    def __init__(self, name: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., architecture: _Optional[str] = ..., layer_count: _Optional[int] = ..., parameter_count: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., max_context: _Optional[int] = ..., further: _Optional[_Union[_common_pb2.FurtherBlocks, _Mapping]] = ..., weights_files: _Optional[_Iterable[_Union[WeightsFile, _Mapping]]] = ...) -> None: ...

class WeightsFile(_message.Message):
    __slots__ = ("path", "size_bytes", "in_place", "changed")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    in_place: bool
    changed: bool
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., in_place: _Optional[bool] = ..., changed: _Optional[bool] = ...) -> None: ...

class DeleteModelRequest(_message.Message):
    __slots__ = ("operation_id", "name")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    name: str
    def __init__(self, operation_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DeleteModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.DeploymentSpec
    def __init__(self, spec: _Optional[_Union[_common_pb2.DeploymentSpec, _Mapping]] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("placement", "further")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    placement: _common_pb2.Placement
    further: _containers.RepeatedCompositeFieldContainer[_common_pb2.Placement]
    def __init__(self, placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., further: _Optional[_Iterable[_Union[_common_pb2.Placement, _Mapping]]] = ...) -> None: ...

class DeployRequest(_message.Message):
    __slots__ = ("operation_id", "spec", "measure_s")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MEASURE_S_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    spec: _common_pb2.DeploymentSpec
    measure_s: float
    def __init__(self, operation_id: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.DeploymentSpec, _Mapping]] = ..., measure_s: _Optional[float] = ...) -> None: ...

class DeployResponse(_message.Message):
    __slots__ = ("deployment",)
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    deployment: Deployment
    def __init__(self, deployment: _Optional[_Union[Deployment, _Mapping]] = ...) -> None: ...

class ListDeploymentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDeploymentsResponse(_message.Message):
    __slots__ = ("deployments",)
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    deployments: _containers.RepeatedCompositeFieldContainer[Deployment]
    def __init__(self, deployments: _Optional[_Iterable[_Union[Deployment, _Mapping]]] = ...) -> None: ...

class GetDeploymentRequest(_message.Message):
    __slots__ = ("name", "outlook")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OUTLOOK_FIELD_NUMBER: _ClassVar[int]
    name: str
    outlook: bool
    def __init__(self, name: _Optional[str] = ..., outlook: _Optional[bool] = ...) -> None: ...

class GetDeploymentResponse(_message.Message):
    __slots__ = ("deployment",)
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    deployment: Deployment
    def __init__(self, deployment: _Optional[_Union[Deployment, _Mapping]] = ...) -> None: ...

class DeleteDeploymentRequest(_message.Message):
    __slots__ = ("operation_id", "name", "force")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    name: str
    force: bool
    def __init__(self, operation_id: _Optional[str] = ..., name: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DeleteDeploymentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplanRequest(_message.Message):
    __slots__ = ("operation_id", "name", "dry_run", "force")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    name: str
    dry_run: bool
    force: bool
    def __init__(self, operation_id: _Optional[str] = ..., name: _Optional[str] = ..., dry_run: _Optional[bool] = ..., force: _Optional[bool] = ...) -> None: ...

class ReplanResponse(_message.Message):
    __slots__ = ("current", "found", "expected", "gain", "reason", "note")
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    current: _common_pb2.Placement
    found: _common_pb2.Placement
    expected: _common_pb2.Prediction
    gain: float
    reason: ReplanReason
    note: str
    def __init__(self, current: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., found: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., expected: _Optional[_Union[_common_pb2.Prediction, _Mapping]] = ..., gain: _Optional[float] = ..., reason: _Optional[_Union[ReplanReason, str]] = ..., note: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("deployment", "seconds")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    seconds: float
    def __init__(self, deployment: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: _trace_pb2.StageTrace
    def __init__(self, stage: _Optional[_Union[_trace_pb2.StageTrace, _Mapping]] = ...) -> None: ...

class DumpRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DumpResponse(_message.Message):
    __slots__ = ("node", "part", "failure")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    node: str
    part: bytes
    failure: _common_pb2.Failure
    def __init__(self, node: _Optional[str] = ..., part: _Optional[bytes] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("limit", "verify")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    limit: int
    verify: bool
    def __init__(self, limit: _Optional[int] = ..., verify: _Optional[bool] = ...) -> None: ...

class ListAuditResponse(_message.Message):
    __slots__ = ("entries", "checks")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    checks: AuditChecks
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ..., checks: _Optional[_Union[AuditChecks, _Mapping]] = ...) -> None: ...

class AuditChecks(_message.Message):
    __slots__ = ("checks",)
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    checks: _containers.RepeatedCompositeFieldContainer[AuditCheck]
    def __init__(self, checks: _Optional[_Iterable[_Union[AuditCheck, _Mapping]]] = ...) -> None: ...

class AuditCheck(_message.Message):
    __slots__ = ("file", "lines", "sealed", "broken_at", "why")
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    BROKEN_AT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    file: str
    lines: int
    sealed: int
    broken_at: int
    why: str
    def __init__(self, file: _Optional[str] = ..., lines: _Optional[int] = ..., sealed: _Optional[int] = ..., broken_at: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("time", "who", "what", "target", "result", "address", "suppressed")
    TIME_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_FIELD_NUMBER: _ClassVar[int]
    time: str
    who: str
    what: str
    target: str
    result: str
    address: str
    suppressed: int
    def __init__(self, time: _Optional[str] = ..., who: _Optional[str] = ..., what: _Optional[str] = ..., target: _Optional[str] = ..., result: _Optional[str] = ..., address: _Optional[str] = ..., suppressed: _Optional[int] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("limit", "follow")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    limit: int
    follow: bool
    def __init__(self, limit: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class ListEventsResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: SiteEvent
    def __init__(self, event: _Optional[_Union[SiteEvent, _Mapping]] = ...) -> None: ...

class SiteEvent(_message.Message):
    __slots__ = ("number", "time", "subject", "name", "what", "detail", "warning")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: str
    subject: str
    name: str
    what: str
    detail: str
    warning: bool
    def __init__(self, number: _Optional[int] = ..., time: _Optional[str] = ..., subject: _Optional[str] = ..., name: _Optional[str] = ..., what: _Optional[str] = ..., detail: _Optional[str] = ..., warning: _Optional[bool] = ...) -> None: ...

class Deployment(_message.Message):
    __slots__ = ("spec", "phase", "epoch", "placement", "failure", "stages", "active_requests", "traffic", "outlook", "suspects")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    OUTLOOK_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.DeploymentSpec
    phase: DeploymentPhase
    epoch: int
    placement: _common_pb2.Placement
    failure: _common_pb2.Failure
    stages: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageStatus]
    active_requests: int
    traffic: _common_pb2.Traffic
    outlook: Outlook
    suspects: _containers.RepeatedCompositeFieldContainer[SuspectHop]
    def __init__(self, spec: _Optional[_Union[_common_pb2.DeploymentSpec, _Mapping]] = ..., phase: _Optional[_Union[DeploymentPhase, str]] = ..., epoch: _Optional[int] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[_common_pb2.StageStatus, _Mapping]]] = ..., active_requests: _Optional[int] = ..., traffic: _Optional[_Union[_common_pb2.Traffic, _Mapping]] = ..., outlook: _Optional[_Union[Outlook, _Mapping]] = ..., suspects: _Optional[_Iterable[_Union[SuspectHop, _Mapping]]] = ...) -> None: ...

class SuspectHop(_message.Message):
    __slots__ = ("from_stage", "to_stage", "why")
    FROM_STAGE_FIELD_NUMBER: _ClassVar[int]
    TO_STAGE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    from_stage: int
    to_stage: int
    why: str
    def __init__(self, from_stage: _Optional[int] = ..., to_stage: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Outlook(_message.Message):
    __slots__ = ("expected", "better", "layers", "gain", "note", "losses")
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    BETTER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    expected: _common_pb2.Prediction
    better: _common_pb2.Prediction
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.ExplicitStage]
    gain: float
    note: str
    losses: _containers.RepeatedCompositeFieldContainer[Loss]
    def __init__(self, expected: _Optional[_Union[_common_pb2.Prediction, _Mapping]] = ..., better: _Optional[_Union[_common_pb2.Prediction, _Mapping]] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.ExplicitStage, _Mapping]]] = ..., gain: _Optional[float] = ..., note: _Optional[str] = ..., losses: _Optional[_Iterable[_Union[Loss, _Mapping]]] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("node", "pause", "taken_by", "warm", "note")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BY_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    node: str
    pause: Pause
    taken_by: _containers.RepeatedCompositeFieldContainer[_common_pb2.ExplicitStage]
    warm: bool
    note: str
    def __init__(self, node: _Optional[str] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., taken_by: _Optional[_Iterable[_Union[_common_pb2.ExplicitStage, _Mapping]]] = ..., warm: _Optional[bool] = ..., note: _Optional[str] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("detect_s", "plan_s", "load_s", "rebuild_s")
    DETECT_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    REBUILD_S_FIELD_NUMBER: _ClassVar[int]
    detect_s: float
    plan_s: float
    load_s: float
    rebuild_s: float
    def __init__(self, detect_s: _Optional[float] = ..., plan_s: _Optional[float] = ..., load_s: _Optional[float] = ..., rebuild_s: _Optional[float] = ...) -> None: ...
