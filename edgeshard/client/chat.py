"""Conversations over a client: the prompt that the coordinator makes, the answer as it comes, and the whole of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, Unpack, cast

from edgeshard.chat.parsing import AnswerParser
from edgeshard.client.completion import shortened
from edgeshard.client.options import generation_of
from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import DeadlineError, InternalError, UnavailableError
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.chat import (
    ChatEvent,
    ChatFinished,
    ChatPrompt,
    ChatReason,
    ContentDelta,
    Conversation,
    ReasoningDelta,
    ToolCall,
    chat_reason,
)
from edgeshard.domain.requests.generation import Finished, GenerateOptions, GenerationEvent, Started, Token

DEFAULT_NEW_TOKENS = 1024
"""Of an answer whose caller names no limit, where the deployment and the context have room for it."""


@dataclass(frozen=True, slots=True, repr=False)
class ChatCompletion:
    """Everything an answer brought back; `str` of it is its content.

    `reasoning` is what the model thought before its answer, "" where its template marks none. `ttft_s` is seconds from
    the call to the first piece of the answer, `total_s` to its end.
    """

    request_id: RequestId
    deployment: DeploymentName
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    reason: ChatReason
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, to be said again with what comes next."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message

    def __str__(self) -> str:
        return self.content

    def __repr__(self) -> str:
        calls = f", tool_calls={[call.name for call in self.tool_calls]}" if self.tool_calls else ""
        return (
            f"ChatCompletion(request_id={self.request_id!r}, deployment={self.deployment!r}, tokens="
            f"{self.completion_tokens}, reason={self.reason.value!r}, content={shortened(self.content)!r}{calls})"
        )


class Speaker(Protocol):
    """The part of a client that a conversation needs."""

    async def render_chat(
        self, model: str, conversation: Conversation, timeout_s: float | None = None
    ) -> ChatPrompt: ...

    def generate(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationEvent, None]: ...


async def chat_events(
    client: Speaker,
    clock: Clock,
    model: str,
    conversation: Conversation,
    tools: Sequence[Any],
    options: GenerateOptions,
) -> AsyncGenerator[ChatEvent, None]:
    """The events of one answer. Deadline and options are those of `generate`; what the model recommends stands in for
    options that are not given."""
    generation_of((0,), options)  # so that a wrong one is named before anything is sent
    timeout_s = options.get("timeout_s")
    ends_at = None if timeout_s is None else clock.now() + timeout_s
    try:
        prompt = await client.render_chat(model, conversation, timeout_s)
    except (DeadlineError, UnavailableError):
        # A connection takes a moment: a site that has not answered within less than that is not known to be away.
        if ends_at is None or clock.now() < ends_at:
            raise
        raise _late(timeout_s) from None
    wanted = cast("GenerateOptions", {**prompt.defaults.given(), **options})
    if prompt.room and not {"max_new_tokens", "max_tokens"} & options.keys():
        wanted["max_new_tokens"] = max(1, min(DEFAULT_NEW_TOKENS, prompt.room))
    if ends_at is not None:
        wanted["timeout_s"] = left_s = ends_at - clock.now()
        if left_s <= 0:
            raise _late(timeout_s)
    parser = AnswerParser(prompt.format, tools)
    async with aclosing(client.generate(model, prompt.tokens, **wanted)) as events:
        async for event in events:
            match event:
                case Started():
                    yield event
                case Token():
                    for delta in parser.feed(event.text, event.token):
                        yield delta
                case Finished():
                    for delta in (*parser.feed(event.text), *parser.finish()):
                        yield delta
                    reason = chat_reason(event.reason, parser.calls > 0)
                    yield ChatFinished(reason, event.prompt_token_count, event.new_token_count)


def _late(timeout_s: float | None) -> DeadlineError:
    return DeadlineError(
        f"not finished within {timeout_s:g} s; allow more time, or ask for fewer tokens", field="timeout_s"
    )


class ChatBuilder:
    """Collects events as they arrive; the times come in as values (monotonic seconds)."""

    def __init__(self, called_at_s: float) -> None:
        self._called_at_s = called_at_s
        self._started: Started | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._first_at_s: float | None = None
        self._finished: ChatFinished | None = None

    @property
    def content(self) -> str:
        """So far."""
        return "".join(self._content)

    def add(self, event: ChatEvent, now_s: float) -> None:
        match event:
            case Started():
                self._started = event
                return
            case ContentDelta():
                self._content.append(event.text)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCall():
                self._calls.append(event)
            case ChatFinished():
                self._finished = event
        if self._first_at_s is None:
            self._first_at_s = now_s

    def build(self, now_s: float) -> ChatCompletion:
        """Raises InternalError when the stream ended without its last event."""
        started, finished = self._started, self._finished
        if started is None or finished is None:
            raise InternalError("the coordinator ended the stream before the answer was finished")
        return ChatCompletion(
            request_id=started.request_id,
            deployment=started.deployment,
            content=self.content,
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
            reason=finished.reason,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            ttft_s=(self._first_at_s or now_s) - self._called_at_s,
            total_s=now_s - self._called_at_s,
        )
