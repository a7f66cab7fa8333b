from edgeshard.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeRequest(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: LinkMessage
    def __init__(self, message: _Optional[_Union[LinkMessage, _Mapping]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: LinkMessage
    def __init__(self, message: _Optional[_Union[LinkMessage, _Mapping]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("payload", "last")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    last: bool
    def __init__(self, payload: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class LinkMessage(_message.Message):
    __slots__ = ("hello", "welcome", "frame", "padding", "timing", "beacon")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    BEACON_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    welcome: LinkWelcome
    frame: Frame
    padding: bytes
    timing: LinkTiming
    beacon: LinkBeacon
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., welcome: _Optional[_Union[LinkWelcome, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., padding: _Optional[bytes] = ..., timing: _Optional[_Union[LinkTiming, _Mapping]] = ..., beacon: _Optional[_Union[LinkBeacon, _Mapping]] = ...) -> None: ...

class LinkBeacon(_message.Message):
    __slots__ = ("received_bytes", "next_step")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    next_step: int
    def __init__(self, received_bytes: _Optional[int] = ..., next_step: _Optional[int] = ...) -> None: ...

class LinkTiming(_message.Message):
    __slots__ = ("bytes", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("deployment", "epoch", "from_stage", "to_stage", "dialler_sends", "wire_version", "next_step")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_STAGE_FIELD_NUMBER: _ClassVar[int]
    TO_STAGE_FIELD_NUMBER: _ClassVar[int]
    DIALLER_SENDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    epoch: int
    from_stage: int
    to_stage: int
    dialler_sends: bool
    wire_version: int
    next_step: int
    def __init__(self, deployment: _Optional[str] = ..., epoch: _Optional[int] = ..., from_stage: _Optional[int] = ..., to_stage: _Optional[int] = ..., dialler_sends: _Optional[bool] = ..., wire_version: _Optional[int] = ..., next_step: _Optional[int] = ...) -> None: ...

class LinkWelcome(_message.Message):
    __slots__ = ("next_step",)
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    next_step: int
    def __init__(self, next_step: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("header", "crc32c", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    crc32c: int
    payload: bytes
    def __init__(self, header: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("pipeline", "epoch", "step", "part", "parts", "forward", "result", "guesses", "tensor")
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    pipeline: str
    epoch: int
    step: int
    part: int
    parts: int
    forward: Step
    result: StepResult
    guesses: StepGuesses
    tensor: TensorHeader
    def __init__(self, pipeline: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., forward: _Optional[_Union[Step, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., guesses: _Optional[_Union[StepGuesses, _Mapping]] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: _common_pb2.DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("frees", "grants", "spans", "timings", "following", "swap_outs", "saves", "restores")
    FREES_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUTS_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    frees: _containers.RepeatedScalarFieldContainer[int]
    grants: _containers.RepeatedCompositeFieldContainer[KvGrant]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    timings: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTiming]
    following: int
    swap_outs: _containers.RepeatedScalarFieldContainer[int]
    saves: _containers.RepeatedCompositeFieldContainer[StateCopy]
    restores: _containers.RepeatedCompositeFieldContainer[StateCopy]
    def __init__(self, frees: _Optional[_Iterable[int]] = ..., grants: _Optional[_Iterable[_Union[KvGrant, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[_common_pb2.StageTiming, _Mapping]]] = ..., following: _Optional[int] = ..., swap_outs: _Optional[_Iterable[int]] = ..., saves: _Optional[_Iterable[_Union[StateCopy, _Mapping]]] = ..., restores: _Optional[_Iterable[_Union[StateCopy, _Mapping]]] = ...) -> None: ...

class StateCopy(_message.Message):
    __slots__ = ("request", "position", "slot")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    request: int
    position: int
    slot: int
    def __init__(self, request: _Optional[int] = ..., position: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("request", "first_position", "token_count", "sample", "sampling", "targets", "guesses")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    request: int
    first_position: int
    token_count: int
    sample: bool
    sampling: SpanSampling
    targets: SpanTargets
    guesses: SpanGuesses
    def __init__(self, request: _Optional[int] = ..., first_position: _Optional[int] = ..., token_count: _Optional[int] = ..., sample: _Optional[bool] = ..., sampling: _Optional[_Union[SpanSampling, _Mapping]] = ..., targets: _Optional[_Union[SpanTargets, _Mapping]] = ..., guesses: _Optional[_Union[SpanGuesses, _Mapping]] = ...) -> None: ...

class SpanGuesses(_message.Message):
    __slots__ = ("assumed_count", "confirmed")
    ASSUMED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    assumed_count: int
    confirmed: int
    def __init__(self, assumed_count: _Optional[int] = ..., confirmed: _Optional[int] = ...) -> None: ...

class StepGuesses(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[GuessedTokens]
    def __init__(self, requests: _Optional[_Iterable[_Union[GuessedTokens, _Mapping]]] = ...) -> None: ...

class GuessedTokens(_message.Message):
    __slots__ = ("request", "tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class SpanTargets(_message.Message):
    __slots__ = ("position", "tokens")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class SpanSampling(_message.Message):
    __slots__ = ("sampling", "seen_tokens", "guide", "guided_tokens", "party")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GUIDE_FIELD_NUMBER: _ClassVar[int]
    GUIDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    sampling: _common_pb2.Sampling
    seen_tokens: _containers.RepeatedScalarFieldContainer[int]
    guide: _common_pb2.Guide
    guided_tokens: _containers.RepeatedScalarFieldContainer[int]
    party: int
    def __init__(self, sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., seen_tokens: _Optional[_Iterable[int]] = ..., guide: _Optional[_Union[_common_pb2.Guide, _Mapping]] = ..., guided_tokens: _Optional[_Iterable[int]] = ..., party: _Optional[int] = ...) -> None: ...

class KvGrant(_message.Message):
    __slots__ = ("request", "first_index", "blocks", "filled", "swapped", "slot")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    request: int
    first_index: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    filled: int
    swapped: bool
    slot: int
    def __init__(self, request: _Optional[int] = ..., first_index: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., filled: _Optional[int] = ..., swapped: _Optional[bool] = ..., slot: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("tokens", "timings", "prompt_logprobs", "guide_failures", "pending", "forced")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUIDE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    timings: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTiming]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SpanLogprobs]
    guide_failures: _containers.RepeatedCompositeFieldContainer[GuideFailure]
    pending: _containers.RepeatedScalarFieldContainer[int]
    forced: _containers.RepeatedCompositeFieldContainer[GuessedTokens]
    def __init__(self, tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[_common_pb2.StageTiming, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SpanLogprobs, _Mapping]]] = ..., guide_failures: _Optional[_Iterable[_Union[GuideFailure, _Mapping]]] = ..., pending: _Optional[_Iterable[int]] = ..., forced: _Optional[_Iterable[_Union[GuessedTokens, _Mapping]]] = ...) -> None: ...

class SpanLogprobs(_message.Message):
    __slots__ = ("request", "prompt_logprobs")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request: int
    prompt_logprobs: _common_pb2.PromptLogprobs
    def __init__(self, request: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class GuideFailure(_message.Message):
    __slots__ = ("request", "message")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request: int
    message: str
    def __init__(self, request: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("request", "position", "token", "logprob", "top")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    request: int
    position: int
    token: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, request: _Optional[int] = ..., position: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...
