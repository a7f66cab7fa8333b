"""One answer of a conversation as it is read: its content, reasoning and calls, and the reason of
its end."""

from __future__ import annotations

from collections.abc import Sequence

from edgeshard.domain.requests.conversation import AnswerDelta, ToolCall
from edgeshard.domain.requests.generation import Finished, FinishReason, GenerationEvent, Token
from edgeshard.gateway.answers.response_writer import finish_reason
from edgeshard.gateway.routes.prompts import Parser


class AnswerReader:
    """A reader of an answer's events. With `one_call` it drops all parts after the first call."""

    def __init__(self, parser: Parser, *, one_call: bool = False) -> None:
        self._parser = parser
        self._one_call = one_call
        self._closed = False
        self.finish_reason: str | None = None
        """The reason in OpenAI's words, once the answer is over."""

    def take(self, event: GenerationEvent) -> Sequence[AnswerDelta]:
        """The parts that an event adds. Raises CancelledRequestError for an answer that an operator
        ended."""
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
        leading_deltas: list[AnswerDelta] = []
        for delta in deltas:
            if not self._closed:
                leading_deltas.append(delta)
            self._closed = self._closed or isinstance(delta, ToolCall)
        return leading_deltas
