"""One answer of a conversation as it is read: its content, reasoning and calls, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence

from edgeshard.domain.requests.chat import AnswerDelta, ContentDelta, ReasoningDelta, ToolCall
from edgeshard.domain.requests.generation import Finished, FinishReason, GenerationEvent, Token
from edgeshard.gateway.answers.response_writer import finish_reason
from edgeshard.gateway.routes.prompts import Parser


class Reading:
    """Takes an answer's events. With `one_call`, what comes behind its first call is dropped."""

    def __init__(self, parser: Parser, *, one_call: bool = False) -> None:
        self._parser = parser
        self._one_call = one_call
        self._closed = False
        self.finish_reason: str | None = None
        """In OpenAI's words, once it is over."""

    def take(self, event: GenerationEvent) -> Sequence[AnswerDelta]:
        """What an event adds. Raises CancelledRequestError for an answer that an operator ended."""
        match event:
            case Token():
                deltas: Sequence[AnswerDelta] = self._parser.feed(event.text, event.token)
            case Finished():
                deltas = [*self._parser.feed(event.text), *self._parser.finish()]
                self.finish_reason = finish_reason(event.reason)
                if self._parser.calls and event.reason is FinishReason.STOP:
                    self.finish_reason = "tool_calls"
            case _:
                return ()
        return self._until_call(deltas) if self._one_call else deltas

    def _until_call(self, deltas: Sequence[AnswerDelta]) -> list[AnswerDelta]:
        kept: list[AnswerDelta] = []
        for delta in deltas:
            if not self._closed:
                kept.append(delta)
            self._closed = self._closed or isinstance(delta, ToolCall)
        return kept


class Gathered:
    """The parts of one answer, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    def add(self, deltas: Sequence[AnswerDelta]) -> None:
        for delta in deltas:
            match delta:
                case ContentDelta():
                    self._content.append(delta.text)
                case ReasoningDelta():
                    self._reasoning.append(delta.text)
                case ToolCall():
                    self.calls.append(delta)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)
