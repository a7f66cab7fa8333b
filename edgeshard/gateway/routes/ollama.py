"""Ollama's API, for tools that speak no other: its chat, generate and lists. Options about models'
files and memory are taken and not used: the site decides those."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from edgeshard.chat.parsing import Gathered
from edgeshard.domain.control.site import ServedModel, StoredModel
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
from edgeshard.gateway.answers.response_writer import LINES, ResponseWriter
from edgeshard.gateway.errors import Refused, json_response, renamed
from edgeshard.gateway.json_text import json_text
from edgeshard.gateway.request_metrics import TokenUsage
from edgeshard.gateway.routes.body_fields import (
    ChoiceFields,
    Items,
    RequestModel,
    Taken,
    Tools,
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

NAMES = {
    "max_new_tokens": "options.num_predict",
    "stop_strings": "options.stop",
    "guide": "format",
    "temperature": "options.temperature",
    "variables": "think",
}
Placed = Annotated[
    Any,
    Treatment.IGNORED,
    Field(default=None, description="the site decides where and how a model runs"),
]
"""An option about a model's memory."""
LATEST = ":latest"
"""The tag that Ollama's clients append to a name without one."""
FOREVER = "9999-12-31T23:59:59Z"
"""The time at which a model leaves memory, as Ollama writes it for one that stays."""


class Options(ChoiceFields):
    repeat_penalty: float | None = bounded("repetition_penalty")
    num_predict: Annotated[int | None, Treatment.CLAMPED] = bounded(
        "max_new_tokens", low=-(2**31), description="0 and less: as much as there is room for"
    )
    num_ctx: Annotated[int | None, Treatment.CLAMPED] = Field(
        default=None,
        ge=0,
        description="tokens of prompt and answer; the deployment's context if that is smaller",
    )
    repeat_last_n: int | None = Field(
        default=None,
        ge=-1,
        description="0: no penalties; other values than -1 need a repeat_penalty of 1",
    )
    open_objects: bool | None = Field(
        default=None, description="whether objects may have keys that `format` does not name"
    )
    mirostat: only(int, 0) = None  # type: ignore[valid-type]
    mirostat_tau: ignored("there is no mirostat") = None  # type: ignore[valid-type]
    mirostat_eta: ignored("there is no mirostat") = None  # type: ignore[valid-type]
    typical_p: only(float, 1) = None  # type: ignore[valid-type]
    tfs_z: only(float, 1) = None  # type: ignore[valid-type]
    penalize_newline: ignored("a new line counts as any token") = None  # type: ignore[valid-type]
    embedding_only: only(bool, False) = None  # type: ignore[valid-type]
    vocab_only: only(bool, False) = None  # type: ignore[valid-type]
    num_gpu: Placed = None
    main_gpu: Placed = None
    num_thread: Placed = None
    num_batch: Placed = None
    num_keep: Placed = None
    num_gqa: Placed = None
    numa: Placed = None
    use_mmap: Placed = None
    use_mlock: Placed = None
    low_vram: Placed = None
    f16_kv: Placed = None
    logits_all: Placed = None

    @model_validator(mode="after")
    def _check(self) -> Options:
        is_off = self.repeat_penalty in (None, 1)
        if self.repeat_last_n not in (None, -1, 0) and not is_off:
            raise Refused(
                "is not supported here with a repeat_penalty: it counts all tokens, give -1",
                field="repeat_last_n",
            )
        return self


_SAME = Options.model_fields.keys() & ChatRequestModel.model_fields.keys()
"""The options that this engine has by the same name, such as `temperature`."""


class OllamaFields(RequestModel):
    model: str
    stream: bool | None = Field(default=None, description="true by default")
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        default=None, description="json, or a JSON schema"
    )
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: only(bool, False) = None  # type: ignore[valid-type]
    top_logprobs: only(int, 0) = None  # type: ignore[valid-type]
    keep_alive: ignored("a served model stays") = None  # type: ignore[valid-type]
    truncate: ignored("no prompt is shortened") = None  # type: ignore[valid-type]
    shift: ignored("an answer ends at the end of the context") = None  # type: ignore[valid-type]

    def sampled(self) -> _Sampled:
        """The same in this engine's words."""
        options = self.options or Options()
        same = {name: getattr(options, name) for name in _SAME}
        penalty = options.repeat_penalty
        if options.repeat_last_n == 0:
            penalty = 1.0
            same |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        return _Sampled(
            **same,
            repetition_penalty=penalty,
            most=options.num_predict,
            context=options.num_ctx,
            schema_=self.format if isinstance(self.format, dict) else None,
            is_json=self.format == "json",
        )

    def variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **effort}


class ChatBody(OllamaFields):
    messages: Items
    tools: Tools | None = None

    def conversation(self, tools: Sequence[Any]) -> Conversation:
        messages = [_message(message, place) for place, message in enumerate(self.messages)]
        return conversation_of(messages, tools, self.variables())


class GenerateBody(OllamaFields):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(
        default=None, description="the prompt as it is, without the model's template"
    )
    suffix: never("text after the answer") = None  # type: ignore[valid-type]
    images: never("models here read text") = None  # type: ignore[valid-type]
    template: never("another chat template") = None  # type: ignore[valid-type]
    context: never("tokens of a conversation before") = None  # type: ignore[valid-type]

    def conversation(self, tools: Sequence[Any]) -> Conversation:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return conversation_of(
            [*messages, {"role": "user", "content": self.prompt}], None, self.variables()
        )


class ShowBody(RequestModel):
    model: str | None = None
    name: str | None = None
    verbose: Taken = None


class _Sampled(ChatRequestModel):
    most: int | None = None
    context: int | None = None
    schema_: dict[str, Any] | None = None
    is_json: bool = False

    def new_tokens(self) -> int | None:
        return self.most if self.most is not None and self.most > 0 else None

    def within_context(self, prompt_tokens: int, new_tokens: int) -> int:
        """A prompt that is longer than the client's context is answered all the same: nothing is
        cut from it."""
        if self.context is None or self.context <= prompt_tokens:
            return new_tokens
        return min(new_tokens, self.context - prompt_tokens)

    def form(self) -> tuple[str, Guide | None]:
        if self.schema_ is not None:
            return "format", schema_guide(self.schema_, self.open_objects, "format")
        return "format", Guide(GuideKind.JSON_OBJECT) if self.is_json else None


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """A message in OpenAI's form: calls have ids, and arguments that are text."""
    changed = dict(message)
    if changed.pop("images", None):
        field = f"messages[{place}].images"
        raise InvalidArgumentError(f"{field}: models here read only text", field=field)
    if (name := changed.pop("tool_name", None)) is not None:
        changed["name"] = name
    calls = changed.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [
            _called(call, f"call{place}x{number}") for number, call in enumerate(calls)
        ]
    return changed


def _called(call: Any, call_id: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json_text(arguments or {})
    return {
        "id": call.get("id") or call_id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }


class _AsItIs:
    """A reader of the answer to a prompt without a template."""

    calls = 0

    def feed(self, text: str, token: int | None = None) -> list[AnswerDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[AnswerDelta]:
        return []


class Ollama(AnswerRoutes):
    """The routes of Ollama's API."""

    async def tags(self, request: Request) -> Response:
        return self._listed(
            request,
            lambda served: {"modified_at": _time(self._backend.added_at(served.deployment))},
        )

    async def running(self, request: Request) -> Response:
        """The models in memory: all that are served, without expiry. `edgectl` shows on which nodes
        the weights are."""
        more = {"expires_at": FOREVER, "size_vram": 0}
        return self._listed(request, lambda served: {**more, "context_length": served.max_context})

    def _listed(self, request: Request, more: Callable[[ServedModel], dict[str, Any]]) -> Response:
        caller, stored = caller_of(request), self._backend.stored
        models = [
            {**_described(served, stored(served.deployment)), **more(served)}
            for served in self._backend.models()
            if caller.may_use(served)
        ]
        return json_response({"models": models})

    async def show(self, request: Request) -> Response:
        body = await read_body(request, ShowBody)
        served = self._find(request, body.model or body.name or "")
        return json_response(
            {
                "details": _details(served, self._backend.stored(served.deployment)),
                "model_info": {
                    "general.architecture": "edgeshard",
                    "edgeshard.context_length": served.max_context,
                },
                "modified_at": _time(self._backend.added_at(served.deployment)),
                "capabilities": ["completion", "tools"],
            }
        )

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatBody, self._backend.check_place)
        served = self._find(request, body.model)
        if not body.messages:
            return _loaded(body.model, {"message": {"role": "assistant", "content": ""}})
        making = self._chat_answers(
            request, served, body.sampled(), body.conversation, body.tools, None
        )
        return await self._answer(request, body, served, making, is_chat=True)

    async def generate(self, request: Request) -> Response:
        body = await read_body(request, GenerateBody, self._backend.check_place)
        served = self._find(request, body.model)
        if not body.prompt:
            return _loaded(body.model, {"response": ""})
        making = (
            self._as_it_is(body, served) if body.raw else self._by_template(request, body, served)
        )
        return await self._answer(request, body, served, making, is_chat=False)

    async def _by_template(
        self, request: Request, body: GenerateBody, served: ServedModel
    ) -> ChatAnswers:
        try:
            return await self._chat_answers(
                request, served, body.sampled(), body.conversation, None, None
            )
        except EdgeShardError as error:
            if error.reason != "NO_CHAT_TEMPLATE":
                raise
            return await self._as_it_is(body, served)

    async def _as_it_is(self, body: GenerateBody, served: ServedModel) -> ChatAnswers:
        sampled = body.sampled()
        assert body.prompt is not None
        prompt = f"{body.system}\n\n{body.prompt}" if body.system and not body.raw else body.prompt
        (sampling,) = sampled.samplings(1, logprobs=False, top_logprobs=0)
        generation = sampled.generation(
            prompt,
            sampled.new_tokens() or served.max_new_tokens or 128,
            sampling=sampling,
            guide=sampled.guide(),
        )
        generation.validate()
        return ChatAnswers((generation,), _AsItIs)

    def _find(self, request: Request, model: str) -> ServedModel:
        return caller_of(request).find(self._backend, model.removesuffix(LATEST))

    async def _answer(
        self,
        request: Request,
        body: OllamaFields,
        served: ServedModel,
        making: Coroutine[Any, Any, ChatAnswers],
        *,
        is_chat: bool,
    ) -> Response:
        stream = body.stream is not False
        if stream:
            piece = _said(is_chat)
            request.state.stream_form = StreamForm(
                LINES, _failed, lambda: _line(body.model, piece, "false}\n")
            )
        try:
            answers = await making
            run = OllamaRun(body.model, answers, is_chat=is_chat)
            return await self._respond(request, served, answers.generations, run, stream)
        except EdgeShardError as error:
            raise renamed(error, NAMES, served.max_context) from None


class OllamaRun(ResponseWriter):
    """An answer as lines of JSON, or as one object."""

    def __init__(self, model: str, answers: ChatAnswers, *, is_chat: bool) -> None:
        super().__init__(TokenUsage())
        self._model = model
        self._is_chat = is_chat
        self._reading = AnswerReader(answers.parser())
        self._gathered = Gathered()
        self._began, self._first = time.monotonic(), 0.0

    def part(self, answer: int, event: GenerationEvent) -> str:
        return "".join(
            self._line(self._delta(delta), "false}\n") for delta in self._take(answer, event)
        )

    def last_part(self) -> str:
        return self._line(self._said("", ""), f"true{self._end()}}}\n")

    def failed(self, error: EdgeShardError) -> str:
        return _failed(error)

    def gather(self, answer: int, event: GenerationEvent) -> None:
        self._gathered.add(*self._take(answer, event))

    def record(self) -> dict[str, Any]:
        answer = self._gathered
        member = self._said(answer.content, answer.reasoning, answer.calls)
        record: dict[str, Any] = json.loads(self._line(member, f"true{self._end()}}}"))
        return record

    def _take(self, answer: int, event: GenerationEvent) -> Sequence[AnswerDelta]:
        match event:
            case Started():
                self.usage.started(answer, event)
            case Finished():
                self.usage.finished(event)
            case _:
                self._first = self._first or time.monotonic()
        return self._reading.take(event)

    def _line(self, member: str, end: str) -> str:
        return _line(self._model, member, end)

    def _delta(self, delta: AnswerDelta) -> str:
        match delta:
            case ContentDelta():
                return self._said(delta.text, "")
            case ReasoningDelta():
                return self._said("", delta.text)
            case ToolCall():
                return self._said("", "", (delta,))

    def _said(self, content: str, thinking: str, calls: Sequence[ToolCall] = ()) -> str:
        return _said(self._is_chat, content, thinking, calls)

    def _end(self) -> str:
        now = time.monotonic()
        first = self._first or now
        record = {
            "done_reason": "length" if self._reading.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(now - self._began),
            "load_duration": 0,
            "prompt_eval_count": self.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._began),
            "eval_count": self.usage.new_tokens,
            "eval_duration": _nanoseconds(now - first),
        }
        return "," + json_text(record)[1:-1]


def _failed(error: EdgeShardError) -> str:
    """The line of an error in the midst of a stream."""
    return json_text({"error": error.message}) + "\n"


def _line(model: str, member: str, end: str) -> str:
    """A line of a stream; `member` is a JSON key and its value, and `end` the text from the value
    of `done` on."""
    return f'{{"model":{json.dumps(model)},"created_at":"{_time()}",{member},"done":{end}'


def _said(
    is_chat: bool, content: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()
) -> str:
    """The JSON keys of a piece of an answer, and their values."""
    if not is_chat:
        more = f',"thinking":{json.dumps(thinking)}' if thinking else ""
        return f'"response":{json.dumps(content)}{more}'
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": _object(call.arguments)}}
            for call in calls
        ]
    return f'"message":{json_text(message)}'


def _loaded(model: str, members: dict[str, Any]) -> Response:
    """The response to a request without a prompt, by which Ollama's clients load a model: this one
    is there."""
    return json_response(
        {"model": model, "created_at": _time(), **members, "done": True, "done_reason": "load"}
    )


def _described(served: ServedModel, stored: StoredModel | None) -> dict[str, Any]:
    return {
        "name": served.deployment,
        "model": served.deployment,
        "size": 0 if stored is None else stored.stored_bytes,
        "digest": "" if stored is None else stored.manifest_digest,
        "details": _details(served, stored),
    }


def _details(served: ServedModel, stored: StoredModel | None) -> dict[str, Any]:
    family = served.model if stored is None else stored.architecture
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "" if stored is None else _parameters(stored.parameter_count),
        "quantization_level": "",
    }


def _parameters(count: int) -> str:
    """The number as Ollama writes it, such as 8.0B or 596.05M."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _time(at_s: float | None = None) -> str:
    """A time in seconds since 1970, by default now, as Ollama writes it."""
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
