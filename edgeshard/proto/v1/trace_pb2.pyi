from edgeshard.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageTrace(_message.Message):
    __slots__ = ("stage", "node", "layers", "records", "reads")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    node: str
    layers: _common_pb2.LayerRange
    records: _containers.RepeatedCompositeFieldContainer[StepRecord]
    reads: _containers.RepeatedCompositeFieldContainer[ReadRecord]
    def __init__(self, stage: _Optional[int] = ..., node: _Optional[str] = ..., layers: _Optional[_Union[_common_pb2.LayerRange, _Mapping]] = ..., records: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ..., reads: _Optional[_Iterable[_Union[ReadRecord, _Mapping]]] = ...) -> None: ...

class ReadRecord(_message.Message):
    __slots__ = ("layer", "size_bytes", "began_s", "ended_s", "expert")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    layer: int
    size_bytes: int
    began_s: float
    ended_s: float
    expert: int
    def __init__(self, layer: _Optional[int] = ..., size_bytes: _Optional[int] = ..., began_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., expert: _Optional[int] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step", "tokens", "prompt_tokens", "arrived_s", "began_s", "ended_s", "sent_s", "returned_s", "guesses", "right_guesses", "came_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    RETURNED_S_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    RIGHT_GUESSES_FIELD_NUMBER: _ClassVar[int]
    CAME_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: int
    prompt_tokens: int
    arrived_s: float
    began_s: float
    ended_s: float
    sent_s: float
    returned_s: float
    guesses: int
    right_guesses: int
    came_s: float
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., arrived_s: _Optional[float] = ..., began_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., sent_s: _Optional[float] = ..., returned_s: _Optional[float] = ..., guesses: _Optional[int] = ..., right_guesses: _Optional[int] = ..., came_s: _Optional[float] = ...) -> None: ...
