"""OpenAI's responses: conversations as in chat completions, in other forms. Nothing is kept between two requests."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.requests.chat import AnswerDelta, ContentDelta, Conversation, ReasoningDelta, ToolCall
from edgeshard.domain.requests.generation import Finished, GenerationEvent, Guide, GuideKind, Started
from edgeshard.gateway.access.auth import caller_of
from edgeshard.gateway.access.bodies import read_body
from edgeshard.gateway.answers.keepalive import StreamForm
from edgeshard.gateway.answers.response_writer import EVENT_STREAM, ResponseWriter, sse
from edgeshard.gateway.errors import body_of, renamed
from edgeshard.gateway.routes.fields import FirstFault, Items, RequestModel, Taken, bounded, never, only, schema_guide
from edgeshard.gateway.routes.prompts import AnswerRoutes, ChatAnswers, ChatRequestModel, conversation_of
from edgeshard.gateway.routes.reading import Reading
from edgeshard.gateway.routes.tools import NamedFunction, NamedTool, ToolChoice
from edgeshard.gateway.usage import Usage

NAMES = {
    "max_new_tokens": "max_output_tokens",
    "stop_strings": "stop",
    "stop_tokens": "stop_token_ids",
    "prompt": "input",
    "messages": "input",
    "guide": "text.format",
}


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


class FunctionChoice(RequestModel):
    type: Literal["function"]
    name: str


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: Taken = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: only(str, "medium") = None  # type: ignore[valid-type]


class ReasoningOptions(RequestModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: only(str, "auto") = None  # type: ignore[valid-type]
    generate_summary: never(str) = None  # type: ignore[valid-type]


class ResponsesStreamOptions(RequestModel):
    include_obfuscation: only(bool, False) = None  # type: ignore[valid-type]


class ResponsesRequest(ChatRequestModel):
    model: str
    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = bounded("max_new_tokens", low=1)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[list[FunctionTool], FirstFault] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    background: only(bool, False) = None  # type: ignore[valid-type]
    conversation: never(Any) = None  # type: ignore[valid-type]
    include: only(list[str], [], ["reasoning.encrypted_content"]) = None  # type: ignore[valid-type]
    max_tool_calls: never(int) = None  # type: ignore[valid-type]
    previous_response_id: never(str) = None  # type: ignore[valid-type]
    prompt: never(Any) = None  # type: ignore[valid-type]
    top_logprobs: only(int, 0) = None  # type: ignore[valid-type]
    truncation: only(str, "disabled") = None  # type: ignore[valid-type]
    service_tier: only(str, "auto", "default") = None  # type: ignore[valid-type]
    store: Taken = None
    safety_identifier: Taken = None
    prompt_cache_key: Taken = None

    def new_tokens(self) -> int | None:
        return self.max_output_tokens

    def form(self) -> tuple[str, Guide | None]:
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type == "text":
            return "text.format", None
        if asked.type == "json_object":
            return "text.format", Guide(GuideKind.JSON_OBJECT)
        if asked.schema_ is None:
            raise InvalidArgumentError("text.format.schema is required", field="text.format.schema")
        return "text.format", schema_guide(asked.schema_, self.open_objects)

    def chat_tools(self) -> list[dict[str, Any]]:
        return [tool.for_chat() for tool in self.tools or ()]

    def chat_choice(self) -> ToolChoice | None:
        if isinstance(self.tool_choice, FunctionChoice):
            return NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))
        return self.tool_choice

    def to_conversation(self, tools: Sequence[Any]) -> Conversation:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += messages_of(self.input)
        effort = None if self.reasoning is None else self.reasoning.effort
        return conversation_of(messages, tools, None if effort is None else {"reasoning_effort": effort})


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input as messages of a chat. Raises InvalidArgumentError naming an item that is none."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = _joined(item.get("content") or [], f"input[{place}].content")
        elif kind == "message":
            role = item.get("role")
            message = {"role": role, "content": _text(item.get("content"), f"input[{place}].content")}
            if reasoning and role == "assistant":
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
            if reasoning:
                messages[-1]["reasoning_content"], reasoning = reasoning, ""
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"input[{place}].output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise InvalidArgumentError(
                f"input[{place}].type is not supported here", field=f"input[{place}].type", reason="UNSUPPORTED_VALUE"
            )
    return messages


_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


def _text(content: Any, field: str) -> str:
    return content if isinstance(content, str) else _joined(content, field)


def _joined(parts: Any, field: str) -> str:
    if not isinstance(parts, list):
        raise InvalidArgumentError(f"{field} is neither a text nor a list of parts", field=field)
    for place, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidArgumentError(
                f"{field}[{place}] is no part of text, and no other is supported here",
                field=f"{field}[{place}]",
                reason="UNSUPPORTED_VALUE",
            )
    return "".join(part["text"] for part in parts)


class Responses(AnswerRoutes):
    """The route of responses."""

    async def answer(self, request: Request) -> Response:
        asked = await read_body(request, ResponsesRequest, self._backend.check_place)
        if asked.stream:
            request.state.stream_form = StreamForm(EVENT_STREAM, _failed_early)
        served = caller_of(request).find(self._backend, asked.model)
        try:
            tools, choice = asked.chat_tools(), asked.chat_choice()
            made = await self._chat_answers(request, served, asked, asked.to_conversation, tools, choice)
            run = ResponsesRun(asked, served.deployment, made)
            return await self._respond(request, served, made.generations, run, bool(asked.stream))
        except EdgeShardError as error:
            raise renamed(error, NAMES, served.max_context) from None


def _failed_early(error: EdgeShardError) -> str:
    """The event of an error before the response began."""
    detail = body_of(error)["error"]
    record = {"type": "error", **{name: detail[name] for name in ("code", "message", "param")}, "sequence_number": 0}
    return f"event: error\n{sse(record)}"


class _Item:
    """One item of the output: a message, reasoning, or a call."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{ {'message': 'msg', 'reasoning': 'rs', 'function_call': 'fc'}[kind] }_{uuid.uuid4().hex}"
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
        """The item as it stands in the output, without its contents where it has just begun."""
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

    def __init__(self, asked: ResponsesRequest, model: str, made: ChatAnswers) -> None:
        super().__init__(Usage())
        self._asked = asked
        self._model = model
        self._sampling = made.generations[0].sampling
        self._reading = Reading(made.parser(), one_call=asked.parallel_tool_calls is False)
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
            return self._say("response.created", response=record) + self._say("response.in_progress", response=record)
        if isinstance(event, Finished):
            self.usage.finished(event)
        return "".join(self._added(delta) for delta in self._reading.take(event))

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
        asked, choice, is_over = self._asked, self._asked.tool_choice, self._reading.finish_reason is not None
        cut = self._reading.finish_reason == "length"
        status = "failed" if self._error else "incomplete" if cut else "completed" if is_over else "in_progress"
        items = [item for item in self._items if item is not self._open or is_over]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": self._error and {"code": "server_error", "message": self._error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": [item.record("incomplete" if cut and item is self._items[-1] else "completed") for item in items],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
            "tools": [{**tool.model_dump(), "strict": tool.strict is not False} for tool in asked.tools or ()],
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": asked.user,
        }

    def _format(self) -> dict[str, Any]:
        asked = None if self._asked.text is None else self._asked.text.format
        if asked is None or asked.type != "json_schema":
            return {"type": "text" if asked is None else asked.type}
        return {**asked.model_dump(by_alias=True), "name": asked.name or "", "description": None}

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
        opening = "" if self._open is not None and self._open.kind == kind else self._close() + self._begin_text(kind)
        assert self._open is not None
        self._open.texts.append(text)
        self._sequence += 1
        return f'{opening}{self._begin}{json.dumps(text)},"sequence_number":{self._sequence - 1}}}\n\n'

    def _begin_text(self, kind: str) -> str:
        item = self._open = self._new(kind)
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        logprobs = ',"logprobs":[]' if kind == "message" else ""
        self._begin = (
            f'event: {name}\ndata: {{"type":"{name}","item_id":"{item.id}","output_index":{item.index},'
            f'"content_index":0{logprobs},"delta":'
        )
        added = self._say("response.output_item.added", output_index=item.index, item=item.record("in_progress"))
        return added + self._say("response.content_part.added", **self._place(item), part=item.part(""))

    def _called(self, call: ToolCall) -> str:
        closing, item = self._close(), self._new("function_call")
        item.call = call
        place = {"item_id": item.id, "output_index": item.index}
        return closing + "".join(
            (
                self._say("response.output_item.added", output_index=item.index, item=item.record("in_progress")),
                self._say("response.function_call_arguments.delta", **place, delta=call.arguments),
                self._say("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
                self._say("response.output_item.done", output_index=item.index, item=item.record("completed")),
            )
        )

    def _close(self) -> str:
        """End the item that is being written."""
        item, self._open = self._open, None
        if item is None:
            return ""
        name = "response.output_text.done" if item.kind == "message" else "response.reasoning_text.done"
        more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
        status = "incomplete" if self._reading.finish_reason == "length" else "completed"
        return "".join(
            (
                self._say(name, **self._place(item), text=item.text, **more),
                self._say("response.content_part.done", **self._place(item), part=item.part(item.text)),
                self._say("response.output_item.done", output_index=item.index, item=item.record(status)),
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
        return f"event: {kind}\ndata: {json.dumps(record, separators=(',', ':'))}\n\n"
