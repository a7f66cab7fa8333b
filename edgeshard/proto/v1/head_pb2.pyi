from edgeshard.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class AttachRequest(_message.Message):
    __slots__ = ("hello", "accepted", "token", "finished", "failed", "tokens", "prompt_logprobs", "admitted", "beacon")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    BEACON_FIELD_NUMBER: _ClassVar[int]
    hello: HeadHello
    accepted: HeadAccepted
    token: HeadToken
    finished: HeadFinished
    failed: HeadFailed
    tokens: HeadTokens
    prompt_logprobs: HeadPromptLogprobs
    admitted: HeadAdmitted
    beacon: HeadBeacon
    def __init__(self, hello: _Optional[_Union[HeadHello, _Mapping]] = ..., accepted: _Optional[_Union[HeadAccepted, _Mapping]] = ..., token: _Optional[_Union[HeadToken, _Mapping]] = ..., finished: _Optional[_Union[HeadFinished, _Mapping]] = ..., failed: _Optional[_Union[HeadFailed, _Mapping]] = ..., tokens: _Optional[_Union[HeadTokens, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[HeadPromptLogprobs, _Mapping]] = ..., admitted: _Optional[_Union[HeadAdmitted, _Mapping]] = ..., beacon: _Optional[_Union[HeadBeacon, _Mapping]] = ...) -> None: ...

class HeadHello(_message.Message):
    __slots__ = ("node_id", "deployment", "epoch", "held", "beacons", "head_for_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BEACONS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FOR_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    deployment: str
    epoch: int
    held: _containers.RepeatedCompositeFieldContainer[HeldRequest]
    beacons: bool
    head_for_s: float
    def __init__(self, node_id: _Optional[str] = ..., deployment: _Optional[str] = ..., epoch: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldRequest, _Mapping]]] = ..., beacons: _Optional[bool] = ..., head_for_s: _Optional[float] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("request_id", "instance", "client", "digest", "tokens", "scored", "over")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    instance: str
    client: str
    digest: bytes
    tokens: int
    scored: int
    over: bool
    def __init__(self, request_id: _Optional[str] = ..., instance: _Optional[str] = ..., client: _Optional[str] = ..., digest: _Optional[bytes] = ..., tokens: _Optional[int] = ..., scored: _Optional[int] = ..., over: _Optional[bool] = ...) -> None: ...

class HeadAccepted(_message.Message):
    __slots__ = ("request_id", "epoch", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class HeadPromptLogprobs(_message.Message):
    __slots__ = ("request_id", "epoch", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prompt_logprobs: _common_pb2.PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class HeadToken(_message.Message):
    __slots__ = ("request_id", "epoch", "position", "token", "logprob", "top", "text", "timings", "finish_reason", "final_text", "guesses", "at_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FINAL_TEXT_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    position: int
    token: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    text: str
    timings: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTiming]
    finish_reason: FinishReason
    final_text: str
    guesses: _common_pb2.GuessCounts
    at_s: float
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., text: _Optional[str] = ..., timings: _Optional[_Iterable[_Union[_common_pb2.StageTiming, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., final_text: _Optional[str] = ..., guesses: _Optional[_Union[_common_pb2.GuessCounts, _Mapping]] = ..., at_s: _Optional[float] = ...) -> None: ...

class HeadTokens(_message.Message):
    __slots__ = ("tokens", "timings", "at_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[HeadToken]
    timings: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTiming]
    at_s: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[HeadToken, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[_common_pb2.StageTiming, _Mapping]]] = ..., at_s: _Optional[float] = ...) -> None: ...

class HeadAdmitted(_message.Message):
    __slots__ = ("request_id", "epoch", "read")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    read: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., read: _Optional[int] = ...) -> None: ...

class HeadFinished(_message.Message):
    __slots__ = ("request_id", "epoch", "reason", "text", "guesses")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reason: FinishReason
    text: str
    guesses: _common_pb2.GuessCounts
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ..., guesses: _Optional[_Union[_common_pb2.GuessCounts, _Mapping]] = ...) -> None: ...

class HeadFailed(_message.Message):
    __slots__ = ("request_id", "epoch", "failure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    failure: _common_pb2.Failure
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("start", "cancel", "forget", "beacon")
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    BEACON_FIELD_NUMBER: _ClassVar[int]
    start: StartRequest
    cancel: CancelRequest
    forget: ForgetRequest
    beacon: HeadBeacon
    def __init__(self, start: _Optional[_Union[StartRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., forget: _Optional[_Union[ForgetRequest, _Mapping]] = ..., beacon: _Optional[_Union[HeadBeacon, _Mapping]] = ...) -> None: ...

class HeadBeacon(_message.Message):
    __slots__ = ("follows",)
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    follows: bool
    def __init__(self, follows: _Optional[bool] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("request_id", "generation", "emitted_tokens", "client", "resumed", "instance", "scored", "digest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: Generation
    emitted_tokens: _containers.RepeatedScalarFieldContainer[int]
    client: str
    resumed: bool
    instance: str
    scored: int
    digest: bytes
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ..., emitted_tokens: _Optional[_Iterable[int]] = ..., client: _Optional[str] = ..., resumed: _Optional[bool] = ..., instance: _Optional[str] = ..., scored: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("prompt", "prompt_tokens", "sampling", "max_new_tokens", "stop_tokens", "stop_strings", "ignore_eos", "priority", "prompt_logprobs", "guide", "clip_new_tokens")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUIDE_FIELD_NUMBER: _ClassVar[int]
    CLIP_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    max_new_tokens: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    priority: int
    prompt_logprobs: bool
    guide: _common_pb2.Guide
    clip_new_tokens: bool
    def __init__(self, prompt: _Optional[str] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., priority: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., guide: _Optional[_Union[_common_pb2.Guide, _Mapping]] = ..., clip_new_tokens: _Optional[bool] = ...) -> None: ...
