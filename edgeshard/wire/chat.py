"""Conversations and the prompts made of them: message <-> value."""

from __future__ import annotations

from edgeshard.domain.requests.chat import ChatPrompt, Conversation, TokenizeCall
from edgeshard.proto.v1 import inference_pb2 as pb
from edgeshard.wire.codec import pair

conversation_to_wire, conversation_from_wire = pair(Conversation, pb.Conversation)
chat_prompt_to_wire, chat_prompt_from_wire = pair(ChatPrompt, pb.ChatPrompt)
tokenize_request_to_wire, tokenize_request_from_wire = pair(TokenizeCall, pb.TokenizeRequest)
