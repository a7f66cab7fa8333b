from edgeshard.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Effort(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EFFORT_UNSPECIFIED: _ClassVar[Effort]
    EFFORT_QUICK: _ClassVar[Effort]
    EFFORT_FIRST: _ClassVar[Effort]
EFFORT_UNSPECIFIED: Effort
EFFORT_QUICK: Effort
EFFORT_FIRST: Effort

class ComputeProfile(_message.Message):
    __slots__ = ("fingerprint", "model_hash", "dtype", "device", "threads", "layers", "overhead", "memory", "effort", "processor_share", "energy", "quantisation", "others_share", "disk", "beside_stages")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    EFFORT_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SHARE_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    OTHERS_SHARE_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    BESIDE_STAGES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    model_hash: str
    dtype: _common_pb2.DataType
    device: str
    threads: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerProfile]
    overhead: StepOverhead
    memory: MemoryProfile
    effort: Effort
    processor_share: float
    energy: EnergyProfile
    quantisation: str
    others_share: float
    disk: DiskProfile
    beside_stages: bool
    def __init__(self, fingerprint: _Optional[str] = ..., model_hash: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., device: _Optional[str] = ..., threads: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerProfile, _Mapping]]] = ..., overhead: _Optional[_Union[StepOverhead, _Mapping]] = ..., memory: _Optional[_Union[MemoryProfile, _Mapping]] = ..., effort: _Optional[_Union[Effort, str]] = ..., processor_share: _Optional[float] = ..., energy: _Optional[_Union[EnergyProfile, _Mapping]] = ..., quantisation: _Optional[str] = ..., others_share: _Optional[float] = ..., disk: _Optional[_Union[DiskProfile, _Mapping]] = ..., beside_stages: _Optional[bool] = ...) -> None: ...

class LayerProfile(_message.Message):
    __slots__ = ("kind", "parameters", "layers", "window", "rotated_bytes", "prefill", "decode", "weight_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    ROTATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    parameters: int
    layers: int
    window: int
    rotated_bytes: int
    prefill: _containers.RepeatedCompositeFieldContainer[ProfileSample]
    decode: _containers.RepeatedCompositeFieldContainer[ProfileSample]
    weight_bytes: int
    def __init__(self, kind: _Optional[str] = ..., parameters: _Optional[int] = ..., layers: _Optional[int] = ..., window: _Optional[int] = ..., rotated_bytes: _Optional[int] = ..., prefill: _Optional[_Iterable[_Union[ProfileSample, _Mapping]]] = ..., decode: _Optional[_Iterable[_Union[ProfileSample, _Mapping]]] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class ProfileSample(_message.Message):
    __slots__ = ("count", "context", "seconds", "spread", "repeats")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    count: int
    context: int
    seconds: float
    spread: float
    repeats: int
    def __init__(self, count: _Optional[int] = ..., context: _Optional[int] = ..., seconds: _Optional[float] = ..., spread: _Optional[float] = ..., repeats: _Optional[int] = ...) -> None: ...

class StepOverhead(_message.Message):
    __slots__ = ("seconds", "seconds_per_byte", "spread")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    seconds_per_byte: float
    spread: float
    def __init__(self, seconds: _Optional[float] = ..., seconds_per_byte: _Optional[float] = ..., spread: _Optional[float] = ...) -> None: ...

class MemoryProfile(_message.Message):
    __slots__ = ("total_bytes", "free_bytes", "daemon_bytes", "unified")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAEMON_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    free_bytes: int
    daemon_bytes: int
    unified: bool
    def __init__(self, total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., daemon_bytes: _Optional[int] = ..., unified: _Optional[bool] = ...) -> None: ...

class EnergyProfile(_message.Message):
    __slots__ = ("idle_w", "busy_w", "source")
    IDLE_W_FIELD_NUMBER: _ClassVar[int]
    BUSY_W_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    idle_w: float
    busy_w: float
    source: str
    def __init__(self, idle_w: _Optional[float] = ..., busy_w: _Optional[float] = ..., source: _Optional[str] = ...) -> None: ...

class DiskProfile(_message.Message):
    __slots__ = ("read_bytes_per_s", "free_bytes", "write_bytes_per_s")
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    read_bytes_per_s: float
    free_bytes: int
    write_bytes_per_s: float
    def __init__(self, read_bytes_per_s: _Optional[float] = ..., free_bytes: _Optional[int] = ..., write_bytes_per_s: _Optional[float] = ...) -> None: ...

class LinkProfile(_message.Message):
    __slots__ = ("latency_s", "bandwidth_bps", "spread", "samples", "largest_bytes")
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BPS_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LARGEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    latency_s: float
    bandwidth_bps: float
    spread: float
    samples: int
    largest_bytes: int
    def __init__(self, latency_s: _Optional[float] = ..., bandwidth_bps: _Optional[float] = ..., spread: _Optional[float] = ..., samples: _Optional[int] = ..., largest_bytes: _Optional[int] = ...) -> None: ...

class MeasuredLink(_message.Message):
    __slots__ = ("sender_id", "receiver_id", "profile", "age_s")
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    sender_id: str
    receiver_id: str
    profile: LinkProfile
    age_s: float
    def __init__(self, sender_id: _Optional[str] = ..., receiver_id: _Optional[str] = ..., profile: _Optional[_Union[LinkProfile, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...
