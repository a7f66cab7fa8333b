"""A conversation with a model: the request, its prompt, and the answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from edgeshard.domain.requests.generation import FinishReason, Sampling, Started


class ToolFormat(StrEnum):
    """How a model writes a call of a tool, as its chat template shows it."""

    NONE = "none"
    """The template knows no tools."""
    TAGGED = "tagged"
    """Two tags around one or several calls, `<tool_call>` and `</tool_call>` in most templates. The
    text between them may be JSON, the calls' parts in tags of their own, or a call in the form of
    some language."""
    LISTED = "listed"
    """`[TOOL_CALLS]`, then a list of calls in JSON, or a name and its arguments for each."""
    CHANNELS = "channels"
    """Messages on channels, some of them to a function: https://github.com/openai/harmony."""
    BARE = "bare"
    """Nothing but the call in JSON; it is one where the answer begins with it."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A token that marks a part of an answer and that its text leaves out, with what it would
    read."""

    token: int
    text: str


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to read a model's answer.

    Text between `reasoning_begin` and `reasoning_end` is reasoning; both are "" if the template
    marks none. `in_reasoning` is whether the prompt has begun it already. `call_begin` and
    `call_end` are the tags of a format that has them; if they are empty, the tags are `<tool_call>`
    and its end.
    """

    tools: ToolFormat = ToolFormat.NONE
    reasoning_begin: str = ""
    reasoning_end: str = ""
    in_reasoning: bool = False
    markers: tuple[Marker, ...] = ()
    call_begin: str = ""
    call_end: str = ""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The recommendations of a model's generation_config.json; None if it has none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        """Those it recommends, by the names of `Sampling`."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def validate(self) -> None:
        """Raise InvalidArgumentError naming the first that no request may set."""
        Sampling(**self.given()).validate()


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template. Everything but `generation_prompt` is JSON text.

    `messages` is a list of messages in the format of OpenAI's chat completions. `tools` is a list
    of tools ("" for none). `variables` is an object of further variables of the template ("" for
    none), such as `{"enable_thinking": false}`. `generation_prompt` is whether the prompt ends
    where the assistant's answer begins.
    """

    messages: str
    tools: str = ""
    variables: str = ""
    generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A text to convert to token ids, by a served model; `special` adds those around a text."""

    model: str
    text: str
    special: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as tokens, how to read the answer to it, and what the model recommends for
    generating it.

    `room` is the most tokens that the answer may have, by the deployment's limits; 0 if that is
    unknown, and negative if the prompt exceeds them.
    """

    tokens: tuple[int, ...]
    format: AnswerFormat = AnswerFormat()
    defaults: GenerationDefaults = GenerationDefaults()
    room: int = 0


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next piece of the answer itself; never part of a marker."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a tool, the `index`-th of the answer. `arguments` is JSON text as the model
    wrote it.

    A model may write what no tool takes: check the arguments before you act on them.
    """

    index: int
    id: str
    name: str
    arguments: str


class ChatReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ChatFinished:
    """The end of an answer, and the numbers of tokens of prompt and answer."""

    reason: ChatReason
    prompt_tokens: int
    completion_tokens: int


def chat_reason(reason: FinishReason, called: bool) -> ChatReason:
    """Why a chat's answer ended that has `called` a tool or not."""
    return (
        ChatReason.TOOL_CALLS
        if called and reason is FinishReason.STOP
        else ChatReason(reason.value)
    )


AnswerDelta = ContentDelta | ReasoningDelta | ToolCall
ChatEvent = Started | ContentDelta | ReasoningDelta | ToolCall | ChatFinished
