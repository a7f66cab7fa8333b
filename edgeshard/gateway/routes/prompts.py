"""A conversation becoming what the engine is asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edgeshard.chat.parsing import AnswerParser
from edgeshard.domain.control.site import ServedModel
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.chat import AnswerDelta, AnswerFormat, Conversation
from edgeshard.domain.requests.generation import Generation
from edgeshard.gateway.backend import Backend
from edgeshard.gateway.routes.fields import GuidedFields
from edgeshard.gateway.routes.tools import PLAIN, ForcedCall, ToolChoice, forced_call, tools_for


class Parser(Protocol):
    """`AnswerParser`, or what stands in its place."""

    calls: int

    def feed(self, text: str, token: int | None = None) -> list[AnswerDelta]: ...

    def finish(self) -> list[AnswerDelta]: ...


class ChatRequestModel(GuidedFields):
    """What of a request decides how its answers are generated."""

    def choices(self) -> int:
        """Answers that are wanted."""
        return 1

    def scores(self) -> tuple[bool, int]:
        """Whether tokens' log-probabilities are wanted, and those of how many others."""
        return False, 0

    @abstractmethod
    def new_tokens(self) -> int | None:
        """Most of one answer; None where the request does not say."""


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """What to generate, one for each answer, and how to read each."""

    generations: tuple[Generation, ...]
    parser: Callable[[], Parser]


async def chat_answers(
    backend: Backend,
    served: ServedModel,
    asked: ChatRequestModel,
    conversation: Callable[[Sequence[Any]], Conversation],
    tools: Sequence[Any] | None,
    choice: ToolChoice | None,
    identity: str,
) -> ChatAnswers:
    """`identity` is who asks. Raises what `Backend.prompt` raises, and InvalidArgumentError for fields that contradict
    each other."""
    offered, guide = tools_for(tools, choice), asked.guide()
    forced = forced_call(offered, choice, asked.open_objects)
    if forced is not None and guide is not None:
        raise InvalidArgumentError("tool_choice: the answer has a form already", field="tool_choice")
    prompt = await backend.prompt(served.deployment, conversation(offered), identity)
    first = Generation(
        prompt.tokens,
        asked.new_tokens() or max(1, prompt.room),
        stop_tokens=tuple(asked.stop_token_ids or ()),
        stop_strings=asked.stop_strings(),
        ignore_eos=bool(asked.ignore_eos),
        priority=asked.priority or 0,
        guide=forced or guide,
    )
    seed, (logprobs, top_logprobs) = asked.first_seed(), asked.scores()
    generations = tuple(
        replace(
            first,
            sampling=asked.sampling(number, seed, prompt.defaults, logprobs=logprobs, top_logprobs=top_logprobs),
        )
        for number in range(asked.choices())
    )
    generations[0].validate()
    answer_format: AnswerFormat = PLAIN if guide is not None else prompt.format

    def parser() -> Parser:
        return ForcedCall() if forced is not None else AnswerParser(answer_format, offered)

    return ChatAnswers(generations, parser)
