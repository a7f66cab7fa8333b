"""No stream is silent for long: in the queue, during the prompt, and while a call of a tool is held
back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import h11
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import InvalidArgumentError, UnavailableError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.conversation import (
    AnswerFormat,
    ChatPrompt,
    Conversation,
    ToolFormat,
)
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    Generation,
    GenerationEvent,
    Started,
    Token,
)
from edgeshard.gateway.answers import keepalive
from edgeshard.gateway.app import make_app
from edgeshard.gateway.connections.listen import HttpListen
from edgeshard.gateway.connections.server import GatewayServer
from tests.support.clockwork import SERVED, Clockwork, Open
from tests.support.forms import LONG
from tests.support.http import Http
from tests.support.idle_proxy import IdleProxy

pytestmark = pytest.mark.timing

SILENCE_S, PROMISED_S, IDLE_S, WAIT_S = (14.0, 15.0, 30.0, 120.0) if LONG else (0.3, 0.8, 1.0, 2.4)
"""The longest silence as set and as promised, a proxy's limit of it, and how long a stream
waits."""
CALL = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CHAT = (
    "/v1/chat/completions",
    {"model": "m", "messages": MESSAGES, "tools": [TOOL], "stream": True},
)
RESPONSES = ("/v1/responses", {"model": "m", "input": "x", "stream": True})
TEXT = ("/v1/completions", {"model": "m", "prompt": "x", "stream": True})
STREAMS = (
    CHAT,
    RESPONSES,
    TEXT,
    ("/api/chat", {"model": "m", "messages": MESSAGES}),
    ("/api/generate", {"model": "m", "prompt": "x"}),
)
PHASES = ("rendering", "queue", "prompt", "call")


class Slow(Clockwork):
    """Waits `wait_s` in one phase of a request, and then answers with a call of a tool, or fails
    with `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.wait_s = 0.0
        self.phase = "queue"
        self.error: Exception | None = None
        self.running = 0
        self.idle = asyncio.Event()

    async def _reach(self, phase: str) -> None:
        if phase == self.phase:
            await asyncio.sleep(self.wait_s)
            if self.error is not None:
                raise self.error

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        await self._reach("rendering")
        return ChatPrompt((1, 2, 3), AnswerFormat(ToolFormat.TAGGED), room=50)

    async def generate(
        self, model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.running += 1
        try:
            await self._reach("queue")
            yield Started(RequestId("r"), SERVED.deployment, (1, 2, 3), Placement((), 16, 1, 1, 1))
            await self._reach("prompt")
            yield Token(3, 17, CALL[:20])
            await self._reach("call")
            yield Token(4, 17, CALL[20:])
            yield Finished(FinishReason.STOP, "", 3, 2)
        finally:
            self.running -= 1
            self.idle.set()


@asynccontextmanager
async def serving(slow: Slow) -> AsyncIterator[str]:
    """The URL of a gateway before a backend."""
    server = GatewayServer(make_app(slow, Open()), HttpListen("127.0.0.1:0"))
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    monkeypatch.setattr(keepalive, "MAX_SILENCE_S", SILENCE_S)
    return Slow()


async def read(http: Http, path: str, body: dict[str, Any]) -> tuple[bytes, float]:
    """All of a stream, and its longest silence in seconds, from the request on."""
    parts: list[bytes] = []
    last, longest = time.monotonic(), 0.0
    async with http.opened("POST", path, body) as stream:
        assert stream.status == 200
        async for part in stream.parts():
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            parts.append(part)
    return b"".join(parts), longest


async def test_streams_that_wait_pass_a_proxy_with_an_idle_limit(slow: Slow) -> None:
    """All routes wait in all phases at the same time."""

    async def check(phase: str, path: str, body: dict[str, Any]) -> None:
        waiting = Slow()
        waiting.phase, waiting.wait_s = phase, WAIT_S
        async with serving(waiting) as url:
            proxy = IdleProxy(urlsplit(url).port or 0, IDLE_S)
            async with proxy.running() as through:
                data, longest_s = await read(Http(through), path, body)
        assert proxy.closed == 0
        assert longest_s < PROMISED_S
        CHECKS[path](data.decode())

    cases = [(phase, *stream) for phase in PHASES for stream in STREAMS]
    cases.remove(("rendering", *TEXT))  # it has no template
    await asyncio.gather(*(check(*case) for case in cases))


def check_events(text: str) -> None:
    """A call of a tool, or a text, and comments between."""
    *events, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert ":" in events
    choices = [
        json.loads(event.removeprefix("data: "))["choices"] for event in events if event != ":"
    ]
    said = json.dumps(choices)
    assert '"finish_reason": "tool_calls"' in said or '<tool_call>{\\"name\\":' in said


def check_responses(text: str) -> None:
    """The event of a whole response at the end, and comments between."""
    *events, last, rest = text.split("\n\n")
    assert last.startswith("event: response.completed\n") and not rest
    assert ":" in events


def check_lines(text: str) -> None:
    """Objects that have all keys of a piece; at least five of them are fillers, and the last one
    ends the answer."""
    *lines, last = [json.loads(line) for line in text.splitlines()]
    assert last["done"] and not any(line["done"] for line in lines)
    said = [line["message"] if "message" in line else line["response"] for line in lines]
    empty = [piece for piece in said if piece in ("", {"role": "assistant", "content": ""})]
    assert len(empty) >= 5


CHECKS = {
    "/v1/chat/completions": check_events,
    "/v1/completions": check_events,
    "/v1/responses": check_responses,
    "/api/chat": check_lines,
    "/api/generate": check_lines,
}


async def test_without_fillers_the_proxy_closes_the_connection(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepalive, "MAX_SILENCE_S", 60.0)
    slow.wait_s = 60.0
    async with serving(slow) as url:
        proxy = IdleProxy(urlsplit(url).port or 0, 0.2)
        async with proxy.running() as through:
            with pytest.raises(h11.RemoteProtocolError):
                await read(Http(through), *CHAT)
    assert proxy.closed == 1


@pytest.mark.parametrize(
    ("phase", "path", "body"), [("queue", *stream) for stream in STREAMS] + [("rendering", *CHAT)]
)
async def test_a_refusal_in_time_keeps_its_status(
    slow: Slow, monkeypatch: pytest.MonkeyPatch, phase: str, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(keepalive, "MAX_SILENCE_S", 30.0)
    slow.wait_s, slow.phase = 0.1, phase
    slow.error = UnavailableError("no head", reason="NO_HEAD", retry_after_s=5.0)
    async with serving(slow) as url:
        answer = await Http(url).post(path, body)
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_late_refusal_is_a_part_of_the_stream(
    slow: Slow, path: str, body: dict[str, Any]
) -> None:
    slow.wait_s = 2.5 * SILENCE_S
    slow.error = InvalidArgumentError("stop: too many", field="stop", reason="INVALID")
    async with serving(slow) as url:
        data, _ = await read(Http(url), path, body)
    if path.startswith("/api"):
        assert json.loads(data.splitlines()[-1])["error"].endswith("stop: too many")
        return
    events = [event for event in data.decode().split("\n\n") if event and event != ":"]
    assert "stop: too many" in events[0] and '"param":"stop"' in events[0]
    assert events[1:] == ([] if path == "/v1/responses" else ["data: [DONE]"])


@pytest.mark.parametrize("phase", ["queue", "call"])
async def test_a_client_that_leaves_a_stream_without_events_ends_its_request(
    slow: Slow, phase: str
) -> None:
    slow.wait_s, slow.phase = 60.0, phase
    async with serving(slow) as url:
        async with Http(url).opened("POST", *CHAT) as stream:
            parts = stream.parts()
            async with asyncio.timeout(30):
                while await anext(parts) != keepalive.COMMENT.encode():
                    pass
            assert slow.running == 1
        async with asyncio.timeout(30):
            await slow.idle.wait()


class Parts:
    """A stream of one part, and whether its generator began and was closed."""

    def __init__(self) -> None:
        self.began = False
        self.closed = False
        self.parts = self._made()

    async def _made(self) -> AsyncGenerator[bytes, None]:
        self.began = True
        try:
            yield b"first"
            yield b"part"
        finally:
            self.closed = True

    async def begun(self) -> keepalive.StreamedResponse:
        """As routes return it: its first event has been read, so that the request runs."""
        await anext(self.parts)
        return keepalive.StreamedResponse(self.parts, FORM)


FORM = keepalive.StreamForm("text/event-stream", str)
LEFT = {"type": "http.disconnect"}


@pytest.mark.parametrize("sent", range(4))
@pytest.mark.parametrize("answered", range(4))
async def test_a_client_that_leaves_around_the_first_part_ends_its_request(
    monkeypatch: pytest.MonkeyPatch, answered: int, sent: int
) -> None:
    """The answer is ready after some turns of the event loop, and the client leaves after
    others."""
    monkeypatch.setattr(keepalive, "MAX_SILENCE_S", 0.0)
    parts = Parts()
    gone = asyncio.Event()

    async def route(request: Request) -> Response:
        request.state.stream_form = FORM
        for _ in range(answered):
            await asyncio.sleep(0)
        return await parts.begun()

    async def receive() -> Message:
        await gone.wait()
        return LEFT

    async def send(message: Message) -> None:
        for _ in range(sent):
            await asyncio.sleep(0)
        gone.set()
        await asyncio.sleep(0.01)

    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {}}
    response = await keepalive.in_time(route)(Request(scope))
    await response(scope, receive, send)
    assert parts.closed == parts.began


async def test_a_late_answer_that_is_not_there_is_cancelled() -> None:
    response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    await keepalive._Late(response, FORM).end()
    assert response.cancelled()


async def test_a_late_answer_that_is_there_and_was_not_read_is_closed() -> None:
    response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    late, parts = keepalive._Late(response, FORM), Parts()
    response.set_result(await parts.begun())
    await late.end()
    assert parts.closed


async def test_a_client_that_left_before_an_answer_is_written_ends_its_request() -> None:
    parts = Parts()
    streamed = await parts.begun()

    async def receive() -> Message:
        return LEFT

    async def send(message: Message) -> None:
        await asyncio.sleep(60)

    await streamed({"type": "http"}, receive, send)
    assert parts.closed
