"""The whole answer to a conversation, collected from its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgeshard.chat.parsing import Gathered
from edgeshard.client.completion import shortened
from edgeshard.domain.errors import InternalError
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.conversation import ChatEvent, ChatFinished, ChatReason, ToolCall
from edgeshard.domain.requests.generation import Started


@dataclass(frozen=True, slots=True, repr=False)
class ChatCompletion:
    """Everything an answer brought back; `str` of it is its content.

    `reasoning` is the model's reasoning before its answer, "" if its template marks none. `ttft_s`
    is seconds from the call to the first piece of the answer, `total_s` to its end.
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
        """The answer as a message of the conversation, to be sent again with the next one."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message

    def __str__(self) -> str:
        return self.content

    def __repr__(self) -> str:
        calls = f", tool_calls={[call.name for call in self.tool_calls]}" if self.tool_calls else ""
        return (
            f"ChatCompletion(request_id={self.request_id!r}, deployment={self.deployment!r}, "
            "tokens="
            f"{self.completion_tokens}, reason={self.reason.value!r}, "
            f"content={shortened(self.content)!r}{calls})"
        )


class ChatBuilder:
    """Collects events as they arrive; the times are passed in as values (monotonic seconds)."""

    def __init__(self, called_at_s: float) -> None:
        self._called_at_s = called_at_s
        self._started: Started | None = None
        self._answer = Gathered()
        self._first_at_s: float | None = None
        self._finished: ChatFinished | None = None

    @property
    def text(self) -> str:
        """The content so far."""
        return self._answer.content

    def add(self, event: ChatEvent, now_s: float) -> None:
        match event:
            case Started():
                self._started = event
                return
            case ChatFinished():
                self._finished = event
            case _:
                self._answer.add(event)
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
            content=self._answer.content,
            reasoning=self._answer.reasoning,
            tool_calls=tuple(self._answer.calls),
            reason=finished.reason,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            ttft_s=(self._first_at_s or now_s) - self._called_at_s,
            total_s=now_s - self._called_at_s,
        )
