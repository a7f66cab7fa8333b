from edgeshard.proto.v1 import common_pb2 as _common_pb2
from edgeshard.proto.v1 import head_pb2 as _head_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_FORMAT_UNSPECIFIED: _ClassVar[ToolFormat]
    TOOL_FORMAT_TAGGED: _ClassVar[ToolFormat]
    TOOL_FORMAT_LISTED: _ClassVar[ToolFormat]
    TOOL_FORMAT_CHANNELS: _ClassVar[ToolFormat]
    TOOL_FORMAT_BARE: _ClassVar[ToolFormat]
TOOL_FORMAT_UNSPECIFIED: ToolFormat
TOOL_FORMAT_TAGGED: ToolFormat
TOOL_FORMAT_LISTED: ToolFormat
TOOL_FORMAT_CHANNELS: ToolFormat
TOOL_FORMAT_BARE: ToolFormat

class GenerateRequest(_message.Message):
    __slots__ = ("model", "generation", "request_id", "listener", "resume")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LISTENER_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    model: str
    generation: _head_pb2.Generation
    request_id: str
    listener: Listener
    resume: Resumption
    def __init__(self, model: _Optional[str] = ..., generation: _Optional[_Union[_head_pb2.Generation, _Mapping]] = ..., request_id: _Optional[str] = ..., listener: _Optional[_Union[Listener, _Mapping]] = ..., resume: _Optional[_Union[Resumption, _Mapping]] = ...) -> None: ...

class Resumption(_message.Message):
    __slots__ = ("tokens", "scored")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    scored: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., scored: _Optional[int] = ...) -> None: ...

class Listener(_message.Message):
    __slots__ = ("id", "number")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    id: str
    number: int
    def __init__(self, id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "token", "finished", "prompt_logprobs", "listened")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LISTENED_FIELD_NUMBER: _ClassVar[int]
    started: GenerationStarted
    token: GeneratedToken
    finished: GenerationFinished
    prompt_logprobs: _common_pb2.PromptLogprobs
    listened: bool
    def __init__(self, started: _Optional[_Union[GenerationStarted, _Mapping]] = ..., token: _Optional[_Union[GeneratedToken, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., listened: _Optional[bool] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("request_id", "deployment", "prompt_tokens", "placement")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    deployment: str
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    placement: _common_pb2.Placement
    def __init__(self, request_id: _Optional[str] = ..., deployment: _Optional[str] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("position", "token", "text", "logprob", "top", "timings", "at_s")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    position: int
    token: int
    text: str
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    timings: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTiming]
    at_s: float
    def __init__(self, position: _Optional[int] = ..., token: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[_common_pb2.StageTiming, _Mapping]]] = ..., at_s: _Optional[float] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("reason", "text", "prompt_token_count", "new_token_count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: _head_pb2.FinishReason
    text: str
    prompt_token_count: int
    new_token_count: int
    def __init__(self, reason: _Optional[_Union[_head_pb2.FinishReason, str]] = ..., text: _Optional[str] = ..., prompt_token_count: _Optional[int] = ..., new_token_count: _Optional[int] = ...) -> None: ...

class ListenRequest(_message.Message):
    __slots__ = ("listener", "read")
    LISTENER_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    listener: str
    read: TokensRead
    def __init__(self, listener: _Optional[str] = ..., read: _Optional[_Union[TokensRead, _Mapping]] = ...) -> None: ...

class TokensRead(_message.Message):
    __slots__ = ("number", "count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    count: int
    def __init__(self, number: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ListenResponse(_message.Message):
    __slots__ = ("steps", "ends")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepTokens]
    ends: _containers.RepeatedCompositeFieldContainer[GenerationEnd]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepTokens, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[GenerationEnd, _Mapping]]] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("numbers", "positions", "tokens", "texts", "logprobs", "tops", "timings", "at_s")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    tops: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    timings: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTiming]
    at_s: float
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[float]] = ..., tops: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[_common_pb2.StageTiming, _Mapping]]] = ..., at_s: _Optional[float] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("top",)
    TOP_FIELD_NUMBER: _ClassVar[int]
    top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, top: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerationEnd(_message.Message):
    __slots__ = ("number", "finished", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    finished: GenerationFinished
    failure: _common_pb2.Failure
    def __init__(self, number: _Optional[int] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class InferenceServiceCancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class InferenceServiceCancelResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: _Optional[bool] = ...) -> None: ...

class InferenceServiceListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InferenceServiceListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    def __init__(self, models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("deployment", "model", "max_context", "max_new_tokens")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    model: str
    max_context: int
    max_new_tokens: int
    def __init__(self, deployment: _Optional[str] = ..., model: _Optional[str] = ..., max_context: _Optional[int] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class RenderChatRequest(_message.Message):
    __slots__ = ("model", "conversation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    conversation: Conversation
    def __init__(self, model: _Optional[str] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ...) -> None: ...

class RenderChatResponse(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: ChatPrompt
    def __init__(self, prompt: _Optional[_Union[ChatPrompt, _Mapping]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages", "tools", "variables", "generation_prompt")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    messages: str
    tools: str
    variables: str
    generation_prompt: bool
    def __init__(self, messages: _Optional[str] = ..., tools: _Optional[str] = ..., variables: _Optional[str] = ..., generation_prompt: _Optional[bool] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("tokens", "format", "defaults", "room")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    format: AnswerFormat
    defaults: GenerationDefaults
    room: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., format: _Optional[_Union[AnswerFormat, _Mapping]] = ..., defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., room: _Optional[int] = ...) -> None: ...

class AnswerFormat(_message.Message):
    __slots__ = ("tools", "reasoning_begin", "reasoning_end", "in_reasoning", "markers", "call_begin", "call_end")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_BEGIN_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    MARKERS_FIELD_NUMBER: _ClassVar[int]
    CALL_BEGIN_FIELD_NUMBER: _ClassVar[int]
    CALL_END_FIELD_NUMBER: _ClassVar[int]
    tools: ToolFormat
    reasoning_begin: str
    reasoning_end: str
    in_reasoning: bool
    markers: _containers.RepeatedCompositeFieldContainer[Marker]
    call_begin: str
    call_end: str
    def __init__(self, tools: _Optional[_Union[ToolFormat, str]] = ..., reasoning_begin: _Optional[str] = ..., reasoning_end: _Optional[str] = ..., in_reasoning: _Optional[bool] = ..., markers: _Optional[_Iterable[_Union[Marker, _Mapping]]] = ..., call_begin: _Optional[str] = ..., call_end: _Optional[str] = ...) -> None: ...

class Marker(_message.Message):
    __slots__ = ("token", "text")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token: int
    text: str
    def __init__(self, token: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "special")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    special: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., special: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
