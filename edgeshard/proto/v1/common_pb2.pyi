from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_INT4: _ClassVar[DataType]

class GuideKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUIDE_KIND_UNSPECIFIED: _ClassVar[GuideKind]
    GUIDE_KIND_JSON_OBJECT: _ClassVar[GuideKind]
    GUIDE_KIND_JSON_SCHEMA: _ClassVar[GuideKind]
    GUIDE_KIND_REGEX: _ClassVar[GuideKind]
    GUIDE_KIND_GRAMMAR: _ClassVar[GuideKind]

class FillingWork(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILLING_WORK_UNSPECIFIED: _ClassVar[FillingWork]
    FILLING_WORK_CONVERTING: _ClassVar[FillingWork]
    FILLING_WORK_PACKING: _ClassVar[FillingWork]
    FILLING_WORK_READING: _ClassVar[FillingWork]

class StagePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_PHASE_UNSPECIFIED: _ClassVar[StagePhase]
    STAGE_PHASE_LOADING: _ClassVar[StagePhase]
    STAGE_PHASE_READY: _ClassVar[StagePhase]
    STAGE_PHASE_ACTIVE: _ClassVar[StagePhase]
    STAGE_PHASE_FAILED: _ClassVar[StagePhase]
    STAGE_PHASE_STANDBY: _ClassVar[StagePhase]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_INT4: DataType
GUIDE_KIND_UNSPECIFIED: GuideKind
GUIDE_KIND_JSON_OBJECT: GuideKind
GUIDE_KIND_JSON_SCHEMA: GuideKind
GUIDE_KIND_REGEX: GuideKind
GUIDE_KIND_GRAMMAR: GuideKind
FILLING_WORK_UNSPECIFIED: FillingWork
FILLING_WORK_CONVERTING: FillingWork
FILLING_WORK_PACKING: FillingWork
FILLING_WORK_READING: FillingWork
STAGE_PHASE_UNSPECIFIED: StagePhase
STAGE_PHASE_LOADING: StagePhase
STAGE_PHASE_READY: StagePhase
STAGE_PHASE_ACTIVE: StagePhase
STAGE_PHASE_FAILED: StagePhase
STAGE_PHASE_STANDBY: StagePhase

class LayerRange(_message.Message):
    __slots__ = ("first", "end")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class FurtherBlocks(_message.Message):
    __slots__ = ("tensor_count", "size_bytes")
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    tensor_count: int
    size_bytes: int
    def __init__(self, tensor_count: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "top_logprobs", "logprobs", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int
    top_logprobs: int
    logprobs: bool
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., logprobs: _Optional[bool] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("position", "logprobs", "top_tokens", "top_logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, position: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Guide(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GuideKind
    text: str
    def __init__(self, kind: _Optional[_Union[GuideKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class StageTiming(_message.Message):
    __slots__ = ("stage", "wait_s", "compute_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    stage: int
    wait_s: float
    compute_s: float
    def __init__(self, stage: _Optional[int] = ..., wait_s: _Optional[float] = ..., compute_s: _Optional[float] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "reason", "field", "message", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    field: str
    message: str
    retry_after_s: float
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "name", "address", "wire_version", "facts", "connected", "heartbeat_age_s", "free_bytes", "stages", "huge_pages", "starting", "unknown_profiles", "unknown_links", "condition", "labels", "measuring", "profiles_beside_stages", "twin_address")
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
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_PROFILES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_LINKS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    MEASURING_FIELD_NUMBER: _ClassVar[int]
    PROFILES_BESIDE_STAGES_FIELD_NUMBER: _ClassVar[int]
    TWIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    name: str
    address: str
    wire_version: int
    facts: DeviceFacts
    connected: bool
    heartbeat_age_s: float
    free_bytes: int
    stages: _containers.RepeatedCompositeFieldContainer[StageStatus]
    huge_pages: HugePages
    starting: bool
    unknown_profiles: int
    unknown_links: int
    condition: Condition
    labels: _containers.ScalarMap[str, str]
    measuring: bool
    profiles_beside_stages: int
    twin_address: str
    def __init__(self, node_id: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., wire_version: _Optional[int] = ..., facts: _Optional[_Union[DeviceFacts, _Mapping]] = ..., connected: _Optional[bool] = ..., heartbeat_age_s: _Optional[float] = ..., free_bytes: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageStatus, _Mapping]]] = ..., huge_pages: _Optional[_Union[HugePages, _Mapping]] = ..., starting: _Optional[bool] = ..., unknown_profiles: _Optional[int] = ..., unknown_links: _Optional[int] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., measuring: _Optional[bool] = ..., profiles_beside_stages: _Optional[int] = ..., twin_address: _Optional[str] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("version", "utc_s", "cores", "cpu_quota", "memory_total_bytes", "memory_available_bytes", "swap_used_bytes", "disk_total_bytes", "disk_free_bytes", "disk_write_bps", "huge_pages", "kernels", "cuda", "certificate_ends_s", "clock_ahead_s", "certificate_due_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UTC_S_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    CPU_QUOTA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITE_BPS_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_DUE_S_FIELD_NUMBER: _ClassVar[int]
    version: str
    utc_s: float
    cores: int
    cpu_quota: float
    memory_total_bytes: int
    memory_available_bytes: int
    swap_used_bytes: int
    disk_total_bytes: int
    disk_free_bytes: int
    disk_write_bps: float
    huge_pages: str
    kernels: str
    cuda: str
    certificate_ends_s: float
    clock_ahead_s: float
    certificate_due_s: float
    def __init__(self, version: _Optional[str] = ..., utc_s: _Optional[float] = ..., cores: _Optional[int] = ..., cpu_quota: _Optional[float] = ..., memory_total_bytes: _Optional[int] = ..., memory_available_bytes: _Optional[int] = ..., swap_used_bytes: _Optional[int] = ..., disk_total_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., disk_write_bps: _Optional[float] = ..., huge_pages: _Optional[str] = ..., kernels: _Optional[str] = ..., cuda: _Optional[str] = ..., certificate_ends_s: _Optional[float] = ..., clock_ahead_s: _Optional[float] = ..., certificate_due_s: _Optional[float] = ...) -> None: ...

class HugePages(_message.Message):
    __slots__ = ("wanted_bytes", "held_bytes")
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    wanted_bytes: int
    held_bytes: int
    def __init__(self, wanted_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class DeviceFacts(_message.Message):
    __slots__ = ("kind", "model", "cores", "memory_total_bytes", "memory_budget_bytes", "unified_memory", "software", "bits_fingerprint", "takes_guesses", "keeps_states_of_guesses", "kernels")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    BITS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TAKES_GUESSES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_STATES_OF_GUESSES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    model: str
    cores: int
    memory_total_bytes: int
    memory_budget_bytes: int
    unified_memory: bool
    software: str
    bits_fingerprint: str
    takes_guesses: bool
    keeps_states_of_guesses: bool
    kernels: KernelSpeed
    def __init__(self, kind: _Optional[str] = ..., model: _Optional[str] = ..., cores: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., memory_budget_bytes: _Optional[int] = ..., unified_memory: _Optional[bool] = ..., software: _Optional[str] = ..., bits_fingerprint: _Optional[str] = ..., takes_guesses: _Optional[bool] = ..., keeps_states_of_guesses: _Optional[bool] = ..., kernels: _Optional[_Union[KernelSpeed, _Mapping]] = ...) -> None: ...

class KernelSpeed(_message.Message):
    __slots__ = ("name", "best_name", "compiler", "read_gb_per_s", "fma_gflop_per_s", "row_gb_per_s", "rows_gflop_per_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEST_NAME_FIELD_NUMBER: _ClassVar[int]
    COMPILER_FIELD_NUMBER: _ClassVar[int]
    READ_GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    FMA_GFLOP_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROW_GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_GFLOP_PER_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    best_name: str
    compiler: str
    read_gb_per_s: float
    fma_gflop_per_s: float
    row_gb_per_s: float
    rows_gflop_per_s: float
    def __init__(self, name: _Optional[str] = ..., best_name: _Optional[str] = ..., compiler: _Optional[str] = ..., read_gb_per_s: _Optional[float] = ..., fma_gflop_per_s: _Optional[float] = ..., row_gb_per_s: _Optional[float] = ..., rows_gflop_per_s: _Optional[float] = ...) -> None: ...

class PackedUnit(_message.Message):
    __slots__ = ("id", "model", "unit", "form", "size_bytes", "in_use", "model_name")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    unit: str
    form: str
    size_bytes: int
    in_use: bool
    model_name: str
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., unit: _Optional[str] = ..., form: _Optional[str] = ..., size_bytes: _Optional[int] = ..., in_use: _Optional[bool] = ..., model_name: _Optional[str] = ...) -> None: ...

class PackedIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StageStatus(_message.Message):
    __slots__ = ("deployment", "epoch", "stage", "layers", "phase", "parameter_bytes", "kv_bytes_capacity", "kv_bytes_in_use", "fetched_bytes", "total_bytes", "steps_done", "tokens_done", "busy_share", "steps_waiting", "requests_running", "requests_waiting", "micro_batches", "step_age_s", "step_cpu_s", "failure_reason", "load_s", "streaming", "filling", "experts", "swap", "guesses")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    STEPS_WAITING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_CPU_S_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    STREAMING_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    epoch: int
    stage: int
    layers: LayerRange
    phase: StagePhase
    parameter_bytes: int
    kv_bytes_capacity: int
    kv_bytes_in_use: int
    fetched_bytes: int
    total_bytes: int
    steps_done: int
    tokens_done: int
    busy_share: float
    steps_waiting: int
    requests_running: int
    requests_waiting: int
    micro_batches: int
    step_age_s: float
    step_cpu_s: float
    failure_reason: str
    load_s: float
    streaming: StageStreaming
    filling: StageFilling
    experts: StageExperts
    swap: StageSwap
    guesses: StageGuesses
    def __init__(self, deployment: _Optional[str] = ..., epoch: _Optional[int] = ..., stage: _Optional[int] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., phase: _Optional[_Union[StagePhase, str]] = ..., parameter_bytes: _Optional[int] = ..., kv_bytes_capacity: _Optional[int] = ..., kv_bytes_in_use: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., steps_done: _Optional[int] = ..., tokens_done: _Optional[int] = ..., busy_share: _Optional[float] = ..., steps_waiting: _Optional[int] = ..., requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., micro_batches: _Optional[int] = ..., step_age_s: _Optional[float] = ..., step_cpu_s: _Optional[float] = ..., failure_reason: _Optional[str] = ..., load_s: _Optional[float] = ..., streaming: _Optional[_Union[StageStreaming, _Mapping]] = ..., filling: _Optional[_Union[StageFilling, _Mapping]] = ..., experts: _Optional[_Union[StageExperts, _Mapping]] = ..., swap: _Optional[_Union[StageSwap, _Mapping]] = ..., guesses: _Optional[_Union[StageGuesses, _Mapping]] = ...) -> None: ...

class StageFilling(_message.Message):
    __slots__ = ("work", "done_bytes", "total_bytes", "left_s")
    WORK_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    work: FillingWork
    done_bytes: int
    total_bytes: int
    left_s: float
    def __init__(self, work: _Optional[_Union[FillingWork, str]] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., left_s: _Optional[float] = ...) -> None: ...

class StageStreaming(_message.Message):
    __slots__ = ("resident_bytes", "streamed_bytes", "read_bytes", "waited_s")
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    streamed_bytes: int
    read_bytes: int
    waited_s: float
    def __init__(self, resident_bytes: _Optional[int] = ..., streamed_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class StageExperts(_message.Message):
    __slots__ = ("cached_bytes", "room_bytes", "total_bytes", "hits", "misses", "read_bytes", "waited_s")
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    cached_bytes: int
    room_bytes: int
    total_bytes: int
    hits: int
    misses: int
    read_bytes: int
    waited_s: float
    def __init__(self, cached_bytes: _Optional[int] = ..., room_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., read_bytes: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class StageSwap(_message.Message):
    __slots__ = ("capacity_bytes", "kept_bytes", "swapped_out", "swapped_in")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    kept_bytes: int
    swapped_out: int
    swapped_in: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., swapped_out: _Optional[int] = ..., swapped_in: _Optional[int] = ...) -> None: ...

class StageGuesses(_message.Message):
    __slots__ = ("guessed", "right")
    GUESSED_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    guessed: int
    right: int
    def __init__(self, guessed: _Optional[int] = ..., right: _Optional[int] = ...) -> None: ...

class StageKey(_message.Message):
    __slots__ = ("deployment", "stage", "standby")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    stage: int
    standby: bool
    def __init__(self, deployment: _Optional[str] = ..., stage: _Optional[int] = ..., standby: _Optional[bool] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("stages", "kv_block_tokens", "kv_blocks", "micro_batch", "micro_batches", "predicted", "note", "costs", "sweep", "saved_states", "speculation", "draft", "guess_slots", "guesses")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    SAVED_STATES_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    GUESS_SLOTS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[PlacedStage]
    kv_block_tokens: int
    kv_blocks: int
    micro_batch: int
    micro_batches: int
    predicted: Prediction
    note: str
    costs: _containers.RepeatedCompositeFieldContainer[StageCost]
    sweep: int
    saved_states: int
    speculation: str
    draft: PlacedDraft
    guess_slots: int
    guesses: ExpectedGuesses
    def __init__(self, stages: _Optional[_Iterable[_Union[PlacedStage, _Mapping]]] = ..., kv_block_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., micro_batch: _Optional[int] = ..., micro_batches: _Optional[int] = ..., predicted: _Optional[_Union[Prediction, _Mapping]] = ..., note: _Optional[str] = ..., costs: _Optional[_Iterable[_Union[StageCost, _Mapping]]] = ..., sweep: _Optional[int] = ..., saved_states: _Optional[int] = ..., speculation: _Optional[str] = ..., draft: _Optional[_Union[PlacedDraft, _Mapping]] = ..., guess_slots: _Optional[int] = ..., guesses: _Optional[_Union[ExpectedGuesses, _Mapping]] = ...) -> None: ...

class PlacedDraft(_message.Message):
    __slots__ = ("model", "manifest_digest", "layer_count", "requests", "kv_blocks", "parameter_bytes", "kv_bytes", "workspace_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    manifest_digest: str
    layer_count: int
    requests: int
    kv_blocks: int
    parameter_bytes: int
    kv_bytes: int
    workspace_bytes: int
    def __init__(self, model: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., layer_count: _Optional[int] = ..., requests: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., parameter_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., workspace_bytes: _Optional[int] = ...) -> None: ...

class StageCost(_message.Message):
    __slots__ = ("rows", "decode_s", "prefill_s", "decode_pair_s", "prefill_pair_s", "hop_delay_s", "hop_s", "hop_token_s", "prefill_behind_s")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    HOP_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    HOP_S_FIELD_NUMBER: _ClassVar[int]
    HOP_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BEHIND_S_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    decode_s: _containers.RepeatedScalarFieldContainer[float]
    prefill_s: _containers.RepeatedScalarFieldContainer[float]
    decode_pair_s: float
    prefill_pair_s: float
    hop_delay_s: float
    hop_s: float
    hop_token_s: float
    prefill_behind_s: float
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., decode_s: _Optional[_Iterable[float]] = ..., prefill_s: _Optional[_Iterable[float]] = ..., decode_pair_s: _Optional[float] = ..., prefill_pair_s: _Optional[float] = ..., hop_delay_s: _Optional[float] = ..., hop_s: _Optional[float] = ..., hop_token_s: _Optional[float] = ..., prefill_behind_s: _Optional[float] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("time_to_first_token_s", "time_per_token_s", "throughput_tps", "bottleneck", "gap", "objective", "requests", "prompt_tokens", "new_tokens", "lengths", "request_s", "joules_per_token", "together_tps")
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_TPS_FIELD_NUMBER: _ClassVar[int]
    BOTTLENECK_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    JOULES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_TPS_FIELD_NUMBER: _ClassVar[int]
    time_to_first_token_s: float
    time_per_token_s: float
    throughput_tps: float
    bottleneck: str
    gap: float
    objective: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    lengths: str
    request_s: float
    joules_per_token: float
    together_tps: float
    def __init__(self, time_to_first_token_s: _Optional[float] = ..., time_per_token_s: _Optional[float] = ..., throughput_tps: _Optional[float] = ..., bottleneck: _Optional[str] = ..., gap: _Optional[float] = ..., objective: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ..., lengths: _Optional[str] = ..., request_s: _Optional[float] = ..., joules_per_token: _Optional[float] = ..., together_tps: _Optional[float] = ...) -> None: ...

class Lengths(_message.Message):
    __slots__ = ("mean", "counts")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    mean: float
    counts: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, mean: _Optional[float] = ..., counts: _Optional[_Iterable[float]] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("requests", "prompts", "answers", "at_once", "guesses")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prompts: Lengths
    answers: Lengths
    at_once: float
    guesses: GuessCounts
    def __init__(self, requests: _Optional[int] = ..., prompts: _Optional[_Union[Lengths, _Mapping]] = ..., answers: _Optional[_Union[Lengths, _Mapping]] = ..., at_once: _Optional[float] = ..., guesses: _Optional[_Union[GuessCounts, _Mapping]] = ...) -> None: ...

class GuessCounts(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, steps: _Optional[_Iterable[float]] = ...) -> None: ...

class ExpectedGuesses(_message.Message):
    __slots__ = ("most", "right", "times")
    MOST_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    most: int
    right: float
    times: float
    def __init__(self, most: _Optional[int] = ..., right: _Optional[float] = ..., times: _Optional[float] = ...) -> None: ...

class PlacedStage(_message.Message):
    __slots__ = ("index", "node_id", "node_name", "address", "layers", "parameter_bytes", "kv_bytes", "workspace_bytes", "weight_budget_bytes", "streamed_bytes", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    index: int
    node_id: str
    node_name: str
    address: str
    layers: LayerRange
    parameter_bytes: int
    kv_bytes: int
    workspace_bytes: int
    weight_budget_bytes: int
    streamed_bytes: int
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    def __init__(self, index: _Optional[int] = ..., node_id: _Optional[str] = ..., node_name: _Optional[str] = ..., address: _Optional[str] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., parameter_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., workspace_bytes: _Optional[int] = ..., weight_budget_bytes: _Optional[int] = ..., streamed_bytes: _Optional[int] = ..., disk_read_bytes_per_s: _Optional[float] = ..., disk_write_bytes_per_s: _Optional[float] = ...) -> None: ...

class DeploymentSpec(_message.Message):
    __slots__ = ("name", "model", "source", "privacy", "objective", "dtype", "kv_dtype", "max_context", "max_new_tokens", "concurrency", "max_time_per_token_s", "mode", "exclude", "reserve", "quantisation", "layers", "max_inter_token_latency_s", "kv_overcommit", "prefix_cache", "micro_batches", "head_quantisation", "prompt_tokens", "new_tokens", "standby", "allow_streaming", "kv_swap_bytes", "kv_swap_on_disk", "rule", "speculation", "draft", "replicas", "replica")
    class ReserveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class QuantisationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_TIME_PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_INTER_TOKEN_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    KV_OVERCOMMIT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    HEAD_QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    ALLOW_STREAMING_FIELD_NUMBER: _ClassVar[int]
    KV_SWAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_SWAP_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    source: str
    privacy: str
    objective: str
    dtype: DataType
    kv_dtype: DataType
    max_context: int
    max_new_tokens: int
    concurrency: int
    max_time_per_token_s: float
    mode: str
    exclude: _containers.RepeatedScalarFieldContainer[str]
    reserve: _containers.ScalarMap[str, int]
    quantisation: _containers.ScalarMap[str, str]
    layers: _containers.RepeatedCompositeFieldContainer[ExplicitStage]
    max_inter_token_latency_s: float
    kv_overcommit: bool
    prefix_cache: bool
    micro_batches: int
    head_quantisation: str
    prompt_tokens: int
    new_tokens: int
    standby: _containers.RepeatedScalarFieldContainer[str]
    allow_streaming: bool
    kv_swap_bytes: int
    kv_swap_on_disk: bool
    rule: _containers.RepeatedCompositeFieldContainer[Rule]
    speculation: str
    draft: str
    replicas: int
    replica: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., source: _Optional[str] = ..., privacy: _Optional[str] = ..., objective: _Optional[str] = ..., dtype: _Optional[_Union[DataType, str]] = ..., kv_dtype: _Optional[_Union[DataType, str]] = ..., max_context: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., concurrency: _Optional[int] = ..., max_time_per_token_s: _Optional[float] = ..., mode: _Optional[str] = ..., exclude: _Optional[_Iterable[str]] = ..., reserve: _Optional[_Mapping[str, int]] = ..., quantisation: _Optional[_Mapping[str, str]] = ..., layers: _Optional[_Iterable[_Union[ExplicitStage, _Mapping]]] = ..., max_inter_token_latency_s: _Optional[float] = ..., kv_overcommit: _Optional[bool] = ..., prefix_cache: _Optional[bool] = ..., micro_batches: _Optional[int] = ..., head_quantisation: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ..., standby: _Optional[_Iterable[str]] = ..., allow_streaming: _Optional[bool] = ..., kv_swap_bytes: _Optional[int] = ..., kv_swap_on_disk: _Optional[bool] = ..., rule: _Optional[_Iterable[_Union[Rule, _Mapping]]] = ..., speculation: _Optional[str] = ..., draft: _Optional[str] = ..., replicas: _Optional[int] = ..., replica: _Optional[int] = ...) -> None: ...

class Rule(_message.Message):
    __slots__ = ("kind", "nodes", "label", "limit")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    label: str
    limit: float
    def __init__(self, kind: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ..., label: _Optional[str] = ..., limit: _Optional[float] = ...) -> None: ...

class ExplicitStage(_message.Message):
    __slots__ = ("node", "layers")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    node: str
    layers: LayerRange
    def __init__(self, node: _Optional[str] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ...) -> None: ...
