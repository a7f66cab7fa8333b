"""Text to token ids and back, by a model's own tokenizer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.conversation import Conversation
from edgeshard.gateway.access.auth import caller_of
from edgeshard.gateway.access.bodies import read_body
from edgeshard.gateway.answers.answers import unless_left
from edgeshard.gateway.backend import Backend
from edgeshard.gateway.errors import Refused, json_response, renamed
from edgeshard.gateway.routes.body_fields import FirstFault, Items, RequestModel, TokenId, Tools
from edgeshard.gateway.routes.prompts import conversation_of
from edgeshard.gateway.routes.tools import name_ignored, offer_of

NAMES = {"variables": "chat_template_kwargs"}
"""The names here of fields of the chat worker."""


class TokenizeRequest(RequestModel):
    """A text, or a conversation by the model's chat template."""

    model: str
    prompt: str | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="add the special tokens around a text; default true"
    )
    messages: Items | None = Field(default=None, min_length=1)
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise Refused("give either prompt or messages", "INVALID_VALUE", "prompt")
        return self

    def conversation(self) -> Conversation:
        tools = offer_of(self.tools, None).tools
        return conversation_of(
            self.messages, tools, self.chat_template_kwargs, self.add_generation_prompt
        )


class DetokenizeRequest(RequestModel):
    model: str
    tokens: Annotated[list[TokenId], FirstFault] = Field(min_length=1)


class Texts:
    """The routes that convert text to tokens, and tokens to text."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        caller = caller_of(request)
        served = caller.find(self._backend, body.model)
        name_ignored(request, offer_of(body.tools, None))
        try:
            tokens = await unless_left(
                request.receive, self._tokens(served.deployment, body, caller.identity)
            )
        except EdgeShardError as error:
            raise renamed(error, NAMES, served.max_context) from None
        caller.check()
        return json_response(
            {"count": len(tokens), "max_model_len": served.max_context, "tokens": tokens}
        )

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        caller = caller_of(request)
        served = caller.find(self._backend, body.model)
        detokenizing = self._backend.detokenize(served.deployment, body.tokens, caller.identity)
        text = await unless_left(request.receive, detokenizing)
        caller.check()
        return json_response({"prompt": text})

    async def _tokens(self, model: str, body: TokenizeRequest, identity: str) -> tuple[int, ...]:
        if body.prompt is None:
            return (await self._backend.count(model, body.conversation(), identity)).tokens
        return await self._backend.tokenize(
            model, body.prompt, body.add_special_tokens is not False, identity
        )
