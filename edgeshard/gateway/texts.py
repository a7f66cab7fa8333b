"""Text to token ids and back, by a model's own tokenizer."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from edgeshard.domain.chat import Conversation
from edgeshard.gateway.answers import unless_left
from edgeshard.gateway.backend import Backend
from edgeshard.gateway.entrance import caller_of
from edgeshard.gateway.errors import Refused, json_response
from edgeshard.gateway.fields import Asked, FirstFault, Items, TokenId, read_body


class TokenizeRequest(Asked):
    """A text, or a conversation by the model's chat template."""

    model: str
    prompt: str | None = None
    add_special_tokens: bool | None = Field(default=None, description="those around a text; true where it is left out")
    messages: Items | None = Field(default=None, min_length=1)
    tools: Items | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise Refused("give either prompt or messages", "INVALID_VALUE")
        return self

    def conversation(self) -> Conversation:
        variables = self.chat_template_kwargs
        return Conversation(
            json.dumps(self.messages),
            json.dumps(self.tools) if self.tools else "",
            json.dumps(variables) if variables else "",
            self.add_generation_prompt is not False,
        )


class DetokenizeRequest(Asked):
    model: str
    tokens: Annotated[list[TokenId], FirstFault] = Field(min_length=1)


class Texts:
    """The two routes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def tokenize(self, request: Request) -> Response:
        asked = await read_body(request, TokenizeRequest)
        served = caller_of(request).find(self._backend, asked.model)
        if asked.prompt is not None:
            special = asked.add_special_tokens is not False
            tokens = await unless_left(request, self._backend.tokenize(served.deployment, asked.prompt, special))
        else:
            prompt = await unless_left(request, self._backend.prompt(served.deployment, asked.conversation()))
            tokens = prompt.tokens
        return json_response({"count": len(tokens), "max_model_len": served.max_context, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        asked = await read_body(request, DetokenizeRequest)
        served = caller_of(request).find(self._backend, asked.model)
        text = await unless_left(request, self._backend.detokenize(served.deployment, asked.tokens))
        return json_response({"prompt": text})
