from edgeshard.proto.v1 import common_pb2 as _common_pb2
from edgeshard.proto.v1 import identity_pb2 as _identity_pb2
from edgeshard.proto.v1 import profile_pb2 as _profile_pb2
from edgeshard.proto.v1 import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("node_id", "name", "address", "wire_version", "facts", "incarnation", "starting", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    name: str
    address: str
    wire_version: int
    facts: _common_pb2.DeviceFacts
    incarnation: str
    starting: bool
    labels: _containers.ScalarMap[str, str]
    def __init__(self, node_id: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., wire_version: _Optional[int] = ..., facts: _Optional[_Union[_common_pb2.DeviceFacts, _Mapping]] = ..., incarnation: _Optional[str] = ..., starting: _Optional[bool] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("wire_version", "heartbeat_interval_s", "site", "term")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    heartbeat_interval_s: float
    site: str
    term: int
    def __init__(self, wire_version: _Optional[int] = ..., heartbeat_interval_s: _Optional[float] = ..., site: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("hello", "result", "progress", "dump", "suspected", "heartbeat", "heartbeat_change", "condition")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DUMP_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_CHANGE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    hello: ControlHello
    result: CommandResult
    progress: CommandProgress
    dump: DumpPart
    suspected: LinkSuspected
    heartbeat: HeartbeatRequest
    heartbeat_change: HeartbeatChange
    condition: _common_pb2.Condition
    def __init__(self, hello: _Optional[_Union[ControlHello, _Mapping]] = ..., result: _Optional[_Union[CommandResult, _Mapping]] = ..., progress: _Optional[_Union[CommandProgress, _Mapping]] = ..., dump: _Optional[_Union[DumpPart, _Mapping]] = ..., suspected: _Optional[_Union[LinkSuspected, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatRequest, _Mapping]] = ..., heartbeat_change: _Optional[_Union[HeartbeatChange, _Mapping]] = ..., condition: _Optional[_Union[_common_pb2.Condition, _Mapping]] = ...) -> None: ...

class ControlHello(_message.Message):
    __slots__ = ("node_id", "incarnation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("operation_id", "failure", "stage", "trace", "packed")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    failure: _common_pb2.Failure
    stage: _common_pb2.StageStatus
    trace: _trace_pb2.StageTrace
    packed: _containers.RepeatedCompositeFieldContainer[_common_pb2.PackedUnit]
    def __init__(self, operation_id: _Optional[str] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., stage: _Optional[_Union[_common_pb2.StageStatus, _Mapping]] = ..., trace: _Optional[_Union[_trace_pb2.StageTrace, _Mapping]] = ..., packed: _Optional[_Iterable[_Union[_common_pb2.PackedUnit, _Mapping]]] = ...) -> None: ...

class CommandProgress(_message.Message):
    __slots__ = ("operation_id", "done", "total", "what")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    done: int
    total: int
    what: str
    def __init__(self, operation_id: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., what: _Optional[str] = ...) -> None: ...

class DumpPart(_message.Message):
    __slots__ = ("operation_id", "part", "last")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    part: bytes
    last: bool
    def __init__(self, operation_id: _Optional[str] = ..., part: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class LinkSuspected(_message.Message):
    __slots__ = ("deployment", "epoch", "from_stage", "to_stage", "recovered", "why")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_STAGE_FIELD_NUMBER: _ClassVar[int]
    TO_STAGE_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    epoch: int
    from_stage: int
    to_stage: int
    recovered: bool
    why: str
    def __init__(self, deployment: _Optional[str] = ..., epoch: _Optional[int] = ..., from_stage: _Optional[int] = ..., to_stage: _Optional[int] = ..., recovered: _Optional[bool] = ..., why: _Optional[str] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("operation_id", "prepare", "activate", "release", "measure", "probe", "trace", "dump", "standby", "denials", "list_packed", "drop_packed")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    DUMP_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    DENIALS_FIELD_NUMBER: _ClassVar[int]
    LIST_PACKED_FIELD_NUMBER: _ClassVar[int]
    DROP_PACKED_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    prepare: PrepareStage
    activate: ActivateHead
    release: ReleaseStage
    measure: MeasureCompute
    probe: ProbeLinks
    trace: TraceSteps
    dump: TakeDump
    standby: KeepStandby
    denials: _identity_pb2.Denials
    list_packed: ListPacked
    drop_packed: DropPacked
    def __init__(self, operation_id: _Optional[str] = ..., prepare: _Optional[_Union[PrepareStage, _Mapping]] = ..., activate: _Optional[_Union[ActivateHead, _Mapping]] = ..., release: _Optional[_Union[ReleaseStage, _Mapping]] = ..., measure: _Optional[_Union[MeasureCompute, _Mapping]] = ..., probe: _Optional[_Union[ProbeLinks, _Mapping]] = ..., trace: _Optional[_Union[TraceSteps, _Mapping]] = ..., dump: _Optional[_Union[TakeDump, _Mapping]] = ..., standby: _Optional[_Union[KeepStandby, _Mapping]] = ..., denials: _Optional[_Union[_identity_pb2.Denials, _Mapping]] = ..., list_packed: _Optional[_Union[ListPacked, _Mapping]] = ..., drop_packed: _Optional[_Union[DropPacked, _Mapping]] = ...) -> None: ...

class PrepareStage(_message.Message):
    __slots__ = ("spec", "placement", "stage", "epoch", "manifest_digest")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.DeploymentSpec
    placement: _common_pb2.Placement
    stage: int
    epoch: int
    manifest_digest: str
    def __init__(self, spec: _Optional[_Union[_common_pb2.DeploymentSpec, _Mapping]] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., stage: _Optional[int] = ..., epoch: _Optional[int] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class ActivateHead(_message.Message):
    __slots__ = ("deployment", "epoch")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    epoch: int
    def __init__(self, deployment: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseStage(_message.Message):
    __slots__ = ("deployment", "epoch")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    epoch: int
    def __init__(self, deployment: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class KeepStandby(_message.Message):
    __slots__ = ("spec", "epoch", "manifest_digest", "node", "layers")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.DeploymentSpec
    epoch: int
    manifest_digest: str
    node: str
    layers: _common_pb2.LayerRange
    def __init__(self, spec: _Optional[_Union[_common_pb2.DeploymentSpec, _Mapping]] = ..., epoch: _Optional[int] = ..., manifest_digest: _Optional[str] = ..., node: _Optional[str] = ..., layers: _Optional[_Union[_common_pb2.LayerRange, _Mapping]] = ...) -> None: ...

class MeasureCompute(_message.Message):
    __slots__ = ("config_json", "dtype", "effort", "again", "quantisation")
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EFFORT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    config_json: bytes
    dtype: _common_pb2.DataType
    effort: _profile_pb2.Effort
    again: bool
    quantisation: str
    def __init__(self, config_json: _Optional[bytes] = ..., dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., effort: _Optional[_Union[_profile_pb2.Effort, str]] = ..., again: _Optional[bool] = ..., quantisation: _Optional[str] = ...) -> None: ...

class ProbeLinks(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("node_id", "name", "address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    name: str
    address: str
    def __init__(self, node_id: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class TraceSteps(_message.Message):
    __slots__ = ("deployment", "epoch", "seconds")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    epoch: int
    seconds: float
    def __init__(self, deployment: _Optional[str] = ..., epoch: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class TakeDump(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPacked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropPacked(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "stages", "memory_available_bytes", "huge_pages", "others_share", "packed")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_SHARE_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    stages: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageStatus]
    memory_available_bytes: int
    huge_pages: _common_pb2.HugePages
    others_share: float
    packed: _common_pb2.PackedIds
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[_common_pb2.StageStatus, _Mapping]]] = ..., memory_available_bytes: _Optional[int] = ..., huge_pages: _Optional[_Union[_common_pb2.HugePages, _Mapping]] = ..., others_share: _Optional[float] = ..., packed: _Optional[_Union[_common_pb2.PackedIds, _Mapping]] = ...) -> None: ...

class HeartbeatChange(_message.Message):
    __slots__ = ("stages", "removed", "memory_available_bytes", "huge_pages", "others_share", "urgent", "packed")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_SHARE_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageStatus]
    removed: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageKey]
    memory_available_bytes: int
    huge_pages: _common_pb2.HugePages
    others_share: float
    urgent: bool
    packed: _common_pb2.PackedIds
    def __init__(self, stages: _Optional[_Iterable[_Union[_common_pb2.StageStatus, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[_common_pb2.StageKey, _Mapping]]] = ..., memory_available_bytes: _Optional[int] = ..., huge_pages: _Optional[_Union[_common_pb2.HugePages, _Mapping]] = ..., others_share: _Optional[float] = ..., urgent: _Optional[bool] = ..., packed: _Optional[_Union[_common_pb2.PackedIds, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class ReportProfileRequest(_message.Message):
    __slots__ = ("node_id", "facts", "compute", "links")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    facts: _common_pb2.DeviceFacts
    compute: _containers.RepeatedCompositeFieldContainer[_profile_pb2.ComputeProfile]
    links: _containers.RepeatedCompositeFieldContainer[_profile_pb2.MeasuredLink]
    def __init__(self, node_id: _Optional[str] = ..., facts: _Optional[_Union[_common_pb2.DeviceFacts, _Mapping]] = ..., compute: _Optional[_Iterable[_Union[_profile_pb2.ComputeProfile, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[_profile_pb2.MeasuredLink, _Mapping]]] = ...) -> None: ...

class ReportProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
