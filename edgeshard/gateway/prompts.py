"""A conversation becoming what the engine is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import Field

from edgeshard.chat.parsing import AnswerParser
from edgeshard.domain.chat import AnswerDelta, AnswerFormat, Conversation
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.generation import Generation
from edgeshard.domain.site import ServedModel
from edgeshard.gateway.backend import Backend
from edgeshard.gateway.fields import MOST_CHOICES, GuidedFields
from edgeshard.gateway.tools import PLAIN, ForcedCall, ToolChoice, forced_call, tools_for


class Parser(Protocol):
    """`AnswerParser`, or what stands in its place."""

    calls: int

    def feed(self, text: str, token: int | None = None) -> list[AnswerDelta]: ...

    def finish(self) -> list[AnswerDelta]: ...


class AskedChat(GuidedFields):
    """What of a request decides how its answers are generated."""

    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def new_tokens(self) -> int | None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """What to generate, one for each answer, and how to read each."""

    generations: tuple[Generation, ...]
    parser: Callable[[], Parser]


async def chat_answers(
    backend: Backend,
    served: ServedModel,
    asked: AskedChat,
    conversation: Callable[[Sequence[Any]], Conversation],
    tools: Sequence[Any] | None,
    choice: ToolChoice | None,
) -> ChatAnswers:
    """Raises what `Backend.prompt` raises, and InvalidArgumentError for fields that contradict each other."""
    offered, guide = tools_for(tools, choice), asked.guide()
    forced = forced_call(offered, choice)
    if forced is not None and guide is not None:
        raise InvalidArgumentError("tool_choice: the answer has a form already", field="tool_choice")
    prompt = await backend.prompt(served.deployment, conversation(offered))
    first = Generation(
        prompt.tokens,
        asked.new_tokens or _room(served, len(prompt.tokens)),
        stop_tokens=tuple(asked.stop_token_ids or ()),
        stop_strings=asked.stop_strings(),
        ignore_eos=bool(asked.ignore_eos),
        priority=asked.priority or 0,
        guide=forced or guide,
    )
    seed = asked.first_seed()
    generations = tuple(
        replace(
            first,
            sampling=asked.sampling(
                number, seed, prompt.defaults, logprobs=bool(asked.logprobs), top_logprobs=asked.top_logprobs or 0
            ),
        )
        for number in range(asked.n or 1)
    )
    generations[0].validate()
    answer_format: AnswerFormat = PLAIN if guide is not None else prompt.format

    def parser() -> Parser:
        return ForcedCall() if forced is not None else AnswerParser(answer_format, offered)

    return ChatAnswers(generations, parser)


def _room(served: ServedModel, prompt_tokens: int) -> int:
    """Tokens for an answer that was given no limit: all that the deployment allows and its context has room for."""
    return max(1, min(served.max_new_tokens or 1024, served.max_context - prompt_tokens))
