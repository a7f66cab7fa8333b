"""OpenAI's responses: conversations as in chat completions, in other forms. Nothing is kept between
two requests."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.requests.conversation import (
    AnswerDelta,
    ContentDelta,
    Conversation,
    ReasoningDelta,
    ToolCall,
)
from edgeshard.domain.requests.generation import (
    Finished,
    GenerationEvent,
    Guide,
    GuideKind,
    Started,
)
from edgeshard.gateway.access.auth import caller_of
from edgeshard.gateway.access.bodies import read_body
from edgeshard.gateway.answers.keepalive import StreamForm
from edgeshard.gateway.answers.response_writer import EVENT_STREAM, ResponseWriter, sse
from edgeshard.gateway.errors import Refused, body_of, renamed
from edgeshard.gateway.json_text import json_text
from edgeshard.gateway.request_metrics import TokenUsage
from edgeshard.gateway.routes.body_fields import (
    MAX_TOOLS,
    FirstFault,
    Items,
    RequestModel,
    Taken,
    Treatment,
    bounded,
    ignored,
    never,
    only,
    schema_guide,
)
from edgeshard.gateway.routes.prompts import (
    AnswerRoutes,
    ChatAnswers,
    ChatRequestModel,
    conversation_of,
)
from edgeshard.gateway.routes.reading import AnswerReader
from edgeshard.gateway.routes.tools import ToolChoice

NAMES = {
    "max_new_tokens": "max_output_tokens",
    "stop_strings": "stop",
    "stop_tokens": "stop_token_ids",
    "prompt": "input",
    "messages": "input",
    "guide": "text.format",
}


def _check_other(kind: str) -> str:
    if kind == "function":
        raise Refused("is a function's")
    return kind


class FunctionTool(RequestModel):
    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        function_fields = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {
            "type": "function",
            "function": {
                name: value for name, value in function_fields.items() if value is not None
            },
        }


class OtherTool(RequestModel):
    """A tool that a server would have to run, such as web_search."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    type: Annotated[str, AfterValidator(_check_other)]


def _check_include(parts: list[str] | None) -> list[str] | None:
    if parts is not None and "message.output_text.logprobs" in parts:
        raise Refused("has message.output_text.logprobs, which is not supported here: leave it out")
    return parts


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: Taken = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="a variable of the chat template"
    )


class ReasoningOptions(RequestModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None, description="a variable of the chat template"
    )
    summary: ignored("reasoning is in the answer as it is") = None  # type: ignore[valid-type]
    generate_summary: ignored("the older name of summary") = None  # type: ignore[valid-type]


class ResponsesStreamOptions(RequestModel):
    include_obfuscation: Taken = None


class ResponsesRequest(ChatRequestModel):
    model: str
    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Treatment.CLAMPED] = bounded("max_new_tokens", low=1)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool | OtherTool, Field(union_mode="left_to_right")]],
            Field(max_length=MAX_TOOLS),
            FirstFault,
        ]
        | None
    ) = Field(
        default=None,
        description="functions; a header of the answer names the types of others, which do not run",
    )
    tool_choice: ToolChoice | None = Field(
        default=None, description="a word, a function, or allowed_tools"
    )
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    background: only(bool, False) = None  # type: ignore[valid-type]
    conversation: never("nothing is stored") = None  # type: ignore[valid-type]
    previous_response_id: never("nothing is stored") = None  # type: ignore[valid-type]
    prompt: never("nothing is stored") = None  # type: ignore[valid-type]
    include: Annotated[Annotated[list[str], FirstFault] | None, AfterValidator(_check_include)] = (
        Field(
            default=None,
            description="anything but message.output_text.logprobs; parts that no answer has have "
            "no effect",
        )
    )
    top_logprobs: only(int, 0) = None  # type: ignore[valid-type]
    truncation: Annotated[Literal["auto", "disabled"] | None, Treatment.IGNORED] = Field(
        default=None, description="no prompt is shortened"
    )
    context_management: ignored("no prompt is shortened") = None  # type: ignore[valid-type]
    max_tool_calls: ignored("the server runs no tools") = None  # type: ignore[valid-type]
    service_tier: ignored("there is one tier") = None  # type: ignore[valid-type]
    store: ignored("nothing is stored") = None  # type: ignore[valid-type]
    safety_identifier: Taken = None
    prompt_cache_key: Taken = None
    prompt_cache_retention: Taken = None
    client_metadata: Taken = None

    def new_tokens(self) -> int | None:
        return self.max_output_tokens

    def form(self) -> tuple[str, Guide | None]:
        text_format = None if self.text is None else self.text.format
        if text_format is None or text_format.type == "text":
            return "text.format", None
        if text_format.type == "json_object":
            return "text.format", Guide(GuideKind.JSON_OBJECT)
        if text_format.schema_ is None:
            raise InvalidArgumentError("text.format.schema is required", field="text.format.schema")
        return "text.format", schema_guide(text_format.schema_, self.open_objects, "text.format")

    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools in the form of chat completions."""
        tools = self.tools or ()
        return [
            tool.for_chat() if isinstance(tool, FunctionTool) else tool.model_dump()
            for tool in tools
        ]

    def to_conversation(self, tools: Sequence[Any]) -> Conversation:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += messages_of(self.input)
        hints = {
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "verbosity": None if self.text is None else self.text.verbosity,
        }
        return conversation_of(
            messages, tools, {name: hint for name, hint in hints.items() if hint is not None}
        )


ITEMS: Mapping[str, str] = {
    "message": "a message of a role; the type may be absent",
    "reasoning": "the reasoning of the assistant message or call that follows",
    "function_call": "a call",
    "function_call_output": "its result",
    "..._call": "with a call_id a call, such as that of a custom tool; skipped without one",
    "..._call_output": "its result",
}
"""The items of an input that become messages; others are skipped."""


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input as messages of a chat.

    Items of unknown types are skipped: another server's tools wrote them. Raises
    InvalidArgumentError naming a part of new input that no model here reads, such as a picture.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for place, item in enumerate(items):
        kind = item.get("type") or "message"
        if not isinstance(kind, str):
            continue
        where = f"input[{place}]"
        if kind == "reasoning":
            reasoning = _past_text(item.get("content")) or _past_text(item.get("summary"))
        elif kind == "message":
            role = item.get("role")
            is_past = role == "assistant"
            content = item.get("content")
            text = _past_text(content) if is_past else _text(content, f"{where}.content")
            message = {"role": role, "content": text}
            if reasoning and is_past:
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind.endswith("_call_output"):
            output = _text(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        elif kind in _OWN_CALLS or (kind.endswith("_call") and item.get("call_id")):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_past_call(kind, item))
            if reasoning:
                messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages


def _past_call(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """A call in the form of chat completions. The arguments of a function are as the model wrote
    them."""
    arguments = item.get("arguments")
    if kind == "custom_tool_call":
        arguments = {"input": item.get("input")}
    elif kind != "function_call" and arguments is None:
        arguments = item.get("action")
    name = item.get("name") or kind.removesuffix("_call")
    return {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


_OWN_CALLS = ("function_call", "custom_tool_call")
"""Types of calls that the client runs."""
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


def _part_text(part: Any) -> str | None:
    """The text of a part; None if it is no text."""
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        return None
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else None


def _past_text(content: Any) -> str:
    """The text of what a model wrote; parts that are no text are skipped."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(_part_text(part) or "" for part in parts)


def _text(content: Any, field: str) -> str:
    """The text of new input."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidArgumentError(f"{field} is neither a text nor a list of parts", field=field)
    texts: list[str] = []
    for place, part in enumerate(content):
        text = _part_text(part)
        if text is None:
            raise InvalidArgumentError(
                f"{field}[{place}] is not a text part, and no other is supported",
                field=f"{field}[{place}]",
                reason="UNSUPPORTED_VALUE",
            )
        texts.append(text)
    return "".join(texts)


class Responses(AnswerRoutes):
    """The route of responses."""

    async def answer(self, request: Request) -> Response:
        body = await read_body(request, ResponsesRequest, self._backend.check_place)
        if body.stream:
            request.state.stream_form = StreamForm(EVENT_STREAM, _failed_early)
        served = caller_of(request).find(self._backend, body.model)
        try:
            tools, choice = body.chat_tools(), body.tool_choice
            answers = await self._chat_answers(
                request, served, body, body.to_conversation, tools, choice
            )
            run = ResponsesRun(body, served.deployment, answers)
            return await self._respond(request, served, answers.generations, run, bool(body.stream))
        except EdgeShardError as error:
            raise renamed(error, NAMES, served.max_context) from None


def _failed_early(error: EdgeShardError) -> str:
    """The event of an error before the response began."""
    detail = body_of(error)["error"]
    record = {
        "type": "error",
        **{name: detail[name] for name in ("code", "message", "param")},
        "sequence_number": 0,
    }
    return f"event: error\n{sse(record)}"


class _Item:
    """One item of the output: a message, reasoning, or a call."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
        self.id = f"{prefixes[kind]}_{uuid.uuid4().hex}"
        self.texts: list[str] = []
        self.call: ToolCall | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def record(self, status: str) -> dict[str, Any]:
        """The item as it appears in the output, without its contents if it has just begun."""
        head: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            arguments = "" if status == "in_progress" else self.call.arguments
            return {**head, "call_id": self.call.id, "name": self.call.name, "arguments": arguments}
        content = [] if status == "in_progress" else [self.part(self.text)]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class ResponsesRun(ResponseWriter):
    """The answer to one request, whole or as events."""

    def __init__(self, body: ResponsesRequest, model: str, answers: ChatAnswers) -> None:
        super().__init__(TokenUsage())
        self._asked = body
        self._model = model
        self._sampling = answers.generations[0].sampling
        self._reading = AnswerReader(answers.parser(), one_call=body.parallel_tool_calls is False)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._sequence = 0
        self._begin = ""
        self._error: EdgeShardError | None = None

    def part(self, answer: int, event: GenerationEvent) -> str:
        if isinstance(event, Started):
            self.usage.started(answer, event)
            record = self.record()
            return self._say("response.created", response=record) + self._say(
                "response.in_progress", response=record
            )
        if isinstance(event, Finished):
            self.usage.finished(event)
        added = "".join(self._added(delta) for delta in self._reading.take(event))
        # clients read the first item of any answer
        if isinstance(event, Finished) and not self._items:
            added += self._begin_text("message")
        return added

    def last_part(self) -> str:
        closing, record = self._close(), self.record()
        return closing + self._say(f"response.{record['status']}", response=record)

    def failed(self, error: EdgeShardError) -> str:
        self._error = error
        closing = self._close()
        return closing + self._say("response.failed", response=self.record())

    def gather(self, answer: int, event: GenerationEvent) -> None:
        self.part(answer, event)

    def record(self) -> dict[str, Any]:
        """The response as it is now."""
        body = self._asked
        choice = self._asked.tool_choice
        is_over = self._reading.finish_reason is not None
        cut = self._reading.finish_reason == "length"
        status = (
            "failed"
            if self._error
            else "incomplete"
            if cut
            else "completed"
            if is_over
            else "in_progress"
        )
        items = [item for item in self._items if item is not self._open or is_over]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": self._error and {"code": "server_error", "message": self._error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [
                item.record("incomplete" if cut and item is self._items[-1] else "completed")
                for item in items
            ],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": choice or "auto",
            "tools": [
                {**tool.model_dump(), "strict": tool.strict is not False}
                for tool in body.tools or ()
                if isinstance(tool, FunctionTool)
            ],
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": body.user,
        }

    def _format(self) -> dict[str, Any]:
        text_format = None if self._asked.text is None else self._asked.text.format
        if text_format is None or text_format.type != "json_schema":
            return {"type": "text" if text_format is None else text_format.type}
        return {
            **text_format.model_dump(by_alias=True),
            "name": text_format.name or "",
            "description": None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, new = self.usage.prompt_tokens, self.usage.new_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + new,
        }

    def _added(self, delta: AnswerDelta) -> str:
        match delta:
            case ContentDelta():
                return self._text_added("message", delta.text)
            case ReasoningDelta():
                return self._text_added("reasoning", delta.text)
            case ToolCall():
                return self._called(delta)

    def _text_added(self, kind: str, text: str) -> str:
        opening = (
            ""
            if self._open is not None and self._open.kind == kind
            else self._close() + self._begin_text(kind)
        )
        assert self._open is not None
        self._open.texts.append(text)
        self._sequence += 1
        return (
            f'{opening}{self._begin}{json.dumps(text)},"sequence_number":{self._sequence - 1}}}\n\n'
        )

    def _begin_text(self, kind: str) -> str:
        item = self._open = self._new(kind)
        name = (
            "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        )
        logprobs = ',"logprobs":[]' if kind == "message" else ""
        self._begin = (
            f"event: {name}\ndata: "
            f'{{"type":"{name}","item_id":"{item.id}","output_index":{item.index},'
            f'"content_index":0{logprobs},"delta":'
        )
        added = self._say(
            "response.output_item.added", output_index=item.index, item=item.record("in_progress")
        )
        return added + self._say(
            "response.content_part.added", **self._place(item), part=item.part("")
        )

    def _called(self, call: ToolCall) -> str:
        closing, item = self._close(), self._new("function_call")
        item.call = call
        place = {"item_id": item.id, "output_index": item.index}
        return closing + "".join(
            (
                self._say(
                    "response.output_item.added",
                    output_index=item.index,
                    item=item.record("in_progress"),
                ),
                self._say("response.function_call_arguments.delta", **place, delta=call.arguments),
                self._say(
                    "response.function_call_arguments.done",
                    **place,
                    name=call.name,
                    arguments=call.arguments,
                ),
                self._say(
                    "response.output_item.done",
                    output_index=item.index,
                    item=item.record("completed"),
                ),
            )
        )

    def _close(self) -> str:
        """End the item that is being written."""
        item, self._open = self._open, None
        if item is None:
            return ""
        name = (
            "response.output_text.done"
            if item.kind == "message"
            else "response.reasoning_text.done"
        )
        more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
        status = "incomplete" if self._reading.finish_reason == "length" else "completed"
        return "".join(
            (
                self._say(name, **self._place(item), text=item.text, **more),
                self._say(
                    "response.content_part.done", **self._place(item), part=item.part(item.text)
                ),
                self._say(
                    "response.output_item.done", output_index=item.index, item=item.record(status)
                ),
            )
        )

    def _new(self, kind: str) -> _Item:
        item = _Item(kind, len(self._items))
        self._items.append(item)
        return item

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}

    def _say(self, kind: str, /, **values: Any) -> str:
        record = {"type": kind, **values, "sequence_number": self._sequence}
        self._sequence += 1
        return f"event: {kind}\ndata: {json_text(record)}\n\n"
