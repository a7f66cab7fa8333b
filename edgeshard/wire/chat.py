"""Conversations and the prompts made of them: message <-> value."""

from __future__ import annotations

from typing import Any

from edgeshard.domain.requests.chat import (
    AnswerFormat,
    ChatPrompt,
    Conversation,
    GenerationDefaults,
    Marker,
    TokenizeRequest,
    ToolFormat,
)
from edgeshard.proto.v1 import inference_pb2 as pb
from edgeshard.wire.common import message_of, value_of

_FORMATS = {
    ToolFormat.NONE: pb.TOOL_FORMAT_UNSPECIFIED,
    ToolFormat.TAGGED: pb.TOOL_FORMAT_TAGGED,
    ToolFormat.LISTED: pb.TOOL_FORMAT_LISTED,
    ToolFormat.CHANNELS: pb.TOOL_FORMAT_CHANNELS,
    ToolFormat.BARE: pb.TOOL_FORMAT_BARE,
}
_FORMATS_BACK = {number: tool_format for tool_format, number in _FORMATS.items()}
_DEFAULTS = ("temperature", "top_k", "top_p", "repetition_penalty")


def conversation_to_wire(conversation: Conversation) -> pb.Conversation:
    return message_of(conversation, pb.Conversation)


def conversation_from_wire(message: pb.Conversation) -> Conversation:
    begins = message.generation_prompt if message.HasField("generation_prompt") else True
    return Conversation(message.messages, message.tools, message.variables, begins)


def chat_prompt_to_wire(prompt: ChatPrompt) -> pb.ChatPrompt:
    return pb.ChatPrompt(
        tokens=prompt.tokens,
        format=answer_format_to_wire(prompt.format),
        defaults=generation_defaults_to_wire(prompt.defaults),
        room=prompt.room,
    )


def chat_prompt_from_wire(message: pb.ChatPrompt) -> ChatPrompt:
    return ChatPrompt(
        tuple(message.tokens),
        answer_format_from_wire(message.format),
        generation_defaults_from_wire(message.defaults),
        message.room,
    )


def answer_format_to_wire(answer_format: AnswerFormat) -> pb.AnswerFormat:
    return message_of(
        answer_format,
        pb.AnswerFormat,
        tools=_FORMATS[answer_format.tools],
        markers=[message_of(marker, pb.Marker) for marker in answer_format.markers],
    )


def answer_format_from_wire(message: pb.AnswerFormat) -> AnswerFormat:
    """A format of a later version is none: its calls stay text."""
    return value_of(
        message,
        AnswerFormat,
        tools=_FORMATS_BACK.get(message.tools, ToolFormat.NONE),
        markers=tuple(Marker(marker.token, marker.text) for marker in message.markers),
    )


def generation_defaults_to_wire(defaults: GenerationDefaults) -> pb.GenerationDefaults:
    return pb.GenerationDefaults(**defaults.given())


def generation_defaults_from_wire(message: pb.GenerationDefaults) -> GenerationDefaults:
    values: dict[str, Any] = {name: getattr(message, name) for name in _DEFAULTS if message.HasField(name)}
    return GenerationDefaults(**values)


def tokenize_request_to_wire(request: TokenizeRequest) -> pb.TokenizeRequest:
    return pb.TokenizeRequest(model=request.model, text=request.text, special=request.special)


def tokenize_request_from_wire(message: pb.TokenizeRequest) -> TokenizeRequest:
    return TokenizeRequest(message.model, message.text, message.special if message.HasField("special") else True)
