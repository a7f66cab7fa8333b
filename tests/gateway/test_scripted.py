"""The gateway in this process, with a backend whose output the test sets: output that no small
model gives by itself.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import h11
import pytest
import pytest_asyncio

from edgeshard.domain.errors import (
    Code,
    DeniedError,
    InvalidArgumentError,
    UnavailableError,
)
from edgeshard.domain.requests.conversation import (
    AnswerFormat,
    GenerationDefaults,
    Marker,
    ToolFormat,
)
from edgeshard.domain.requests.generation import Generation
from edgeshard.gateway.access import bodies
from edgeshard.gateway.access.bodies import BodyLimits
from edgeshard.gateway.access.cors import parse_origins
from edgeshard.gateway.access.middleware import OPEN
from edgeshard.gateway.answers import answers
from edgeshard.gateway.app import make_app
from edgeshard.gateway.connections import accepting, connection
from edgeshard.gateway.connections.connection_limits import Crowd
from edgeshard.gateway.connections.listen import HttpListen
from edgeshard.gateway.connections.server import GatewayServer
from edgeshard.gateway.errors import STATUSES
from edgeshard.gateway.routes.responses import messages_of
from edgeshard.identity.authority import Authority, now
from edgeshard.rpc.tls_files import issue_files
from tests.support.clients import CLIENTS, needs_clients, run
from tests.support.forms import in_form
from tests.support.http import Answer, Http, Stream
from tests.support.scripted_gateway import KEY, Keyed, Said

pytestmark = pytest.mark.timing

CHAT = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
ASKED: dict[str, Any] = {"model": "m", "messages": CHAT}


@pytest_asyncio.fixture
async def said() -> Said:
    return Said()


@pytest_asyncio.fixture
async def http(said: Said) -> AsyncIterator[Http]:
    server = GatewayServer(make_app(said, Keyed()), HttpListen("127.0.0.1:0"))
    await server.start()
    yield Http(server.url, KEY)
    await server.stop()


async def until_nothing_runs(said: Said) -> None:
    async with asyncio.timeout(30):
        await said.idle.wait()


async def test_calls_and_reasoning_come_apart(said: Said, http: Http) -> None:
    said.format = AnswerFormat(
        ToolFormat.TAGGED, "<think>", "</think>", False, (Marker(100, "<think>"),)
    )
    said.texts = [
        "",
        "I mu",
        "se</th",
        "ink>",
        "Well. <tool",
        '_call>{"name": "find", "arg',
        'uments": {"a": 1}}</tool_call>',
    ]
    (whole,) = (await http.post("/v1/chat/completions", {**ASKED, "tools": [TOOL]})).json["choices"]
    message = whole["message"]
    assert (message["content"].strip(), message["reasoning_content"]) == ("Well.", "I muse")
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "find" and json.loads(call["function"]["arguments"]) == {
        "a": 1
    }
    assert whole["finish_reason"] == "tool_calls"
    events = await http.events("/v1/chat/completions", {**ASKED, "tools": [TOOL], "stream": True})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I muse"
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Well."
    assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["find"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    asked = {"model": "m", "input": "x", "tools": [{"type": "function", **TOOL["function"]}]}  # type: ignore[dict-item]
    output = (await http.post("/v1/responses", asked)).json["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    streamed = (await http.post("/v1/responses", {**asked, "stream": True})).body.decode()
    last = json.loads(streamed.strip().rsplit("data: ", 1)[1])
    assert last["type"] == "response.completed"
    assert [item["type"] for item in last["response"]["output"]] == [
        "reasoning",
        "message",
        "function_call",
    ]
    talk = (await http.post("/api/chat", {**ASKED, "tools": [TOOL], "stream": False})).json[
        "message"
    ]
    assert talk["thinking"] == "I muse" and talk["tool_calls"][0]["function"] == {
        "name": "find",
        "arguments": {"a": 1},
    }


async def test_an_answer_without_a_text_has_an_empty_message(said: Said, http: Http) -> None:
    said.texts = [""]
    asked = {"model": "m", "input": "x"}
    (item,) = (await http.post("/v1/responses", asked)).json["output"]
    assert (item["type"], item["status"], item["content"][0]["text"]) == (
        "message",
        "completed",
        "",
    )
    streamed = (await http.post("/v1/responses", {**asked, "stream": True})).body.decode()
    last = json.loads(streamed.strip().rsplit("data: ", 1)[1])
    assert last["type"] == "response.completed"
    assert [item["content"][0]["text"] for item in last["response"]["output"]] == [""]
    kinds = [line[7:] for line in streamed.split("\n") if line.startswith("event: ")]
    assert kinds[2:-1] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


async def test_one_call_is_enough_where_calls_must_not_be_parallel(said: Said, http: Http) -> None:
    said.format = AnswerFormat(ToolFormat.TAGGED)
    said.texts = ['<tool_call>{"name": "find", "arguments": {}}</tool_call>'] * 2
    for parallel, calls in ((None, 2), (True, 2), (False, 1)):
        asked = {**ASKED, "tools": [TOOL], "parallel_tool_calls": parallel}
        (choice,) = (await http.post("/v1/chat/completions", asked)).json["choices"]
        assert len(choice["message"]["tool_calls"]) == calls


async def test_what_is_not_given_is_the_models_recommendation(said: Said, http: Http) -> None:
    said.defaults = GenerationDefaults(temperature=0.6, top_p=0.95)
    await http.post("/v1/chat/completions", {**ASKED, "top_p": 0.5, "seed": -1})
    sampling = said.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.6, 0.5, 2**64 - 1)
    assert said.asked[0].max_new_tokens == 50
    await http.post(
        "/v1/chat/completions",
        {**ASKED, "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}},
    )
    assert json.loads(said.conversations[-1].variables) == {"a": 1, "reasoning_effort": "low"}


async def test_a_limit_is_made_to_fit(said: Said, http: Http) -> None:
    for asked, most in (({}, 16), ({"max_tokens": 1 << 20}, 1 << 20)):
        answer = await http.post("/v1/completions", {"model": "m", "prompt": "x", **asked})
        assert answer.status == 200
        assert (said.asked[-1].max_new_tokens, said.asked[-1].clip_new_tokens) == (most, True)


async def test_tools_that_must_not_be_called_are_not_mentioned(said: Said, http: Http) -> None:
    await http.post("/v1/chat/completions", {**ASKED, "tools": [TOOL], "tool_choice": "none"})
    assert said.conversations[-1].tools == ""


async def test_tools_whose_definitions_have_the_same_name_keep_their_own(
    said: Said, http: Http
) -> None:
    def tool(name: str, color: str) -> dict[str, Any]:
        color_of = {
            "$defs": {"color": {"const": color}},
            "properties": {"color": {"$ref": "#/$defs/color"}},
        }
        return {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", **color_of}},
        }

    tools = [tool("lamp", "red"), tool("door", "black")]
    await http.post("/v1/chat/completions", {**ASKED, "tools": tools, "tool_choice": "required"})
    guide = said.asked[-1].guide
    assert guide is not None
    schema = json.loads(guide.text)

    def resolved(value: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = schema
        for step in value["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return found

    colors = {}
    for call in schema["anyOf"]:
        arguments = resolved(call["properties"]["arguments"])
        colors[call["properties"]["name"]["const"]] = resolved(arguments["properties"]["color"])[
            "const"
        ]
    assert colors == {"lamp": "red", "door": "black"}


async def test_objects_are_closed_wherever_a_schema_is_given_unless_it_is_asked_otherwise(
    said: Said, http: Http
) -> None:
    open_schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed_schema = {**open_schema, "additionalProperties": False}
    formed = {"type": "json_schema", "json_schema": {"name": "n", "schema": open_schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": open_schema}}]
    said.texts = ["{}"]

    async def asked(path: str, **body: Any) -> Any:
        answer = await http.post(path, {"model": "m", "stream": False, **body})
        assert answer.status == 200, answer.body
        guide = said.asked[-1].guide
        assert guide is not None
        return json.loads(guide.text)

    for asked_otherwise, schema in (({}, closed_schema), ({"open_objects": True}, open_schema)):
        chat = {"messages": ASKED["messages"], **asked_otherwise}
        assert await asked("/v1/chat/completions", **chat, response_format=formed) == schema
        assert (
            await asked("/v1/completions", prompt="x", response_format=formed, **asked_otherwise)
            == schema
        )
        text = {"format": {"type": "json_schema", "name": "n", "schema": open_schema}}
        assert await asked("/v1/responses", input="x", text=text, **asked_otherwise) == schema
        forced = await asked("/v1/chat/completions", **chat, tools=tools, tool_choice="required")
        assert forced["$defs"]["tool0"] == schema
        ollama = {"messages": ASKED["messages"], "options": asked_otherwise}
        assert await asked("/api/chat", **ollama, format=open_schema) == schema
        assert await asked("/v1/chat/completions", **chat, guided_json=open_schema) == open_schema


async def test_an_error_in_the_midst_of_a_stream_is_said_in_it(said: Said, http: Http) -> None:
    said.texts, said.error = ["a", "b"], UnavailableError("it broke", reason="NOT_RECOVERED")
    events = await http.events("/v1/chat/completions", {**ASKED, "stream": True})
    assert events[-1]["error"]["code"] == "not_recovered"
    whole = await http.post("/v1/chat/completions", ASKED)
    assert (whole.status, whole.error["message"]) == (503, "it broke")
    lines = (await http.post("/api/chat", ASKED)).body.decode().splitlines()
    assert json.loads(lines[-1]) == {"error": "it broke"}
    response = (
        await http.post("/v1/responses", {"model": "m", "input": "x", "stream": True})
    ).body.decode()
    assert json.loads(response.strip().rsplit("data: ", 1)[1])["response"]["status"] == "failed"
    said.error = ZeroDivisionError("Rumpelstiltskin")
    bug = await http.post("/v1/chat/completions", ASKED)
    assert bug.status == 500 and "Rumpelstiltskin" not in bug.body.decode()


async def test_a_request_that_ends_leaves_nothing_running(said: Said, http: Http) -> None:
    said.texts = ["a"] * 100_000
    many = {**ASKED, "n": 4, "stream": True}
    async with http.opened("POST", "/v1/chat/completions", many) as stream:
        assert stream.status == 200 and said.running == 4
    await until_nothing_runs(said)


async def test_a_client_that_takes_nothing_is_given_up(
    said: Said, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.2)
    said.texts = ["word " * 200] * 100_000
    async with http.opened("POST", "/v1/chat/completions", {**ASKED, "stream": True}) as stream:
        await until_nothing_runs(said)
        await is_hung_up_on(stream)


async def test_a_client_that_takes_no_whole_answer_is_given_up(
    said: Said, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.2)
    said.texts = ["word " * 1_000_000] * 4
    async with http.opened("POST", "/v1/chat/completions", ASKED) as stream:
        await until_nothing_runs(said)
        await is_hung_up_on(stream)


async def is_hung_up_on(stream: Stream) -> None:
    """Once it is, for the client must take nothing before."""
    async with asyncio.timeout(60):
        while True:
            if stream.is_reset:
                return
            await asyncio.sleep(0.05)


async def test_who_does_not_say_what_it_wants_is_hung_up_on(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "HEAD_LIMIT_S", 0.2)
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for before, then in ((b"", b""), (b"", b"GET /hea"), (asked, b"GET /hea")):
        reader, writer = await asyncio.open_connection(*address_of(http))
        async with asyncio.timeout(60):
            writer.write(before)
            if before:
                await reader.readuntil(b'{"status":"ok"}')
            writer.write(then)
            with pytest.raises(ConnectionError):
                await reader.read()
        writer.close()


async def test_connections_are_not_without_number(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "Crowd", lambda: Crowd(most=3))
    said.texts = ["a"] * 100_000
    server = GatewayServer(make_app(said, Keyed()), HttpListen("127.0.0.1:0"))
    await server.start()
    http = Http(server.url, KEY)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(
                http.opened("POST", "/v1/chat/completions", {**ASKED, "stream": True})
            )
        with pytest.raises((ConnectionError, h11.RemoteProtocolError)):
            await http.get("/health")
    await until_nothing_runs(said)
    async with asyncio.timeout(60):
        while True:
            with suppress(ConnectionError, h11.RemoteProtocolError):
                assert (await http.get("/health")).status == 200
                break
            await asyncio.sleep(0.05)
    await server.stop()


def address_of(http: Http) -> tuple[str, int]:
    host, port = http.url.removeprefix("http://").split(":")
    return host, int(port)


BAD_BODIES = {
    "faults": b'{"model": "m", "messages": [' + b"1," * 250_000 + b"1]}",
    "fields": b"{" + b",".join(b'"f%d":0' % number for number in range(30_000)) + b"}",
    "objects": b'{"model": "m", "messages": [' + b"{}," * 300_000 + b"{}]}",
    "numbers": b'{"model": "m", "prompt": [' + b"1," * 1_100_000 + b"1]}",
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_body_that_would_take_long_to_refuse_is_refused_quickly(
    http: Http, name: str
) -> None:
    """The faults of a body are counted, and so are its parts."""
    too_many = (
        "the body has too many parts: at most 32768 lists, objects and fields, and 262144 "
        "items; send less at once"
    )
    answer = await http.post("/v1/chat/completions", BAD_BODIES[name])
    expected = {
        "faults": (400, "messages[0]: input should be an object"),
        "fields": (400, "the body has 30002 faults"),
        "objects": (400, too_many),
        "numbers": (400, too_many),
    }[name]
    assert (answer.status, answer.error["message"]) == expected


async def test_a_body_that_does_not_come_is_not_waited_for(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "KEYED", BodyLimits(1 << 20, 0.2))
    reader, writer = await asyncio.open_connection(*address_of(http))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    )
    writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    async with asyncio.timeout(60):
        answered = await reader.readuntil(b"\r\n")
    assert b" 504 " in answered
    writer.close()


async def test_slow_readers_hold_up_nobody(said: Said, http: Http) -> None:
    said.texts = ["word " * 20] * 50_000
    streams = [
        http.opened("POST", "/v1/chat/completions", {**ASKED, "stream": True}) for _ in range(40)
    ]
    for stream in streams:
        await stream.__aenter__()
    said.texts = ["word"] * 20
    for _ in range(5):
        assert (await http.post("/v1/chat/completions", ASKED)).status == 200
    assert said.running == 40, "they wait for their readers"
    for stream in streams:
        await stream.__aexit__(None, None, None)


async def test_every_route_but_the_named_ones_asks_for_a_key(said: Said, http: Http) -> None:
    document = (await http.get("/openapi.json")).json
    routes = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    routes |= {("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/"), ("GET", "/docs")}
    nobody = Http(http.url)
    for method, path in routes:
        path = path.replace("{model}", "m")
        expected = 200 if (method, path) in OPEN else 401
        answer = await nobody.send(method, path, {} if method == "POST" else None)
        assert answer.status == expected, (method, path)
        if method == "GET":
            head = await nobody.send("HEAD", path, None)
            assert (head.status, head.body) == (expected, b""), path
    unlocked = {
        (m.upper(), p)
        for p, ms in document["paths"].items()
        for m, op in ms.items()
        if op.get("security") == []
    }
    assert unlocked == OPEN - {("GET", "/")}


def test_every_typed_error_has_a_status() -> None:
    assert STATUSES.keys() == set(Code)
    assert all(400 <= status < 600 for status, _ in STATUSES.values())


def test_items_of_an_input_become_messages() -> None:
    items: Sequence[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ]
    user, calls, result = messages_of(items)
    assert user == {"role": "user", "content": "ab"}
    assert [call["function"]["name"] for call in calls["tool_calls"]] == ["f", "g"]
    assert calls["reasoning_content"] == "hm"
    assert result == {"role": "tool", "tool_call_id": "1", "content": "done"}


def test_what_another_server_wrote_is_skipped_or_becomes_text() -> None:
    items: Sequence[dict[str, Any]] = [
        {"type": None, "role": "user", "content": "a"},
        {"type": "computer_call"},
        {"type": "item_reference", "id": "x"},
        {"type": "web_search_call", "id": "w", "action": {"query": "x"}},
        {"type": 7},
        {"type": "reasoning", "content": None, "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "+ x"},
        {"type": "local_shell_call", "call_id": "2", "action": {"command": ["ls"]}},
        {"type": "custom_tool_call_output", "call_id": "1", "output": None},
        {
            "role": "assistant",
            "content": [{"type": "output_audio"}, {"type": "refusal", "refusal": "no"}],
        },
    ]
    user, called, result, answer = messages_of(items)
    assert (user["content"], result["content"], answer["content"]) == ("a", "", "no")
    assert called["reasoning_content"] == "hm"
    assert [call["function"] for call in called["tool_calls"]] == [
        {"name": "patch", "arguments": {"input": "+ x"}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
    ]
    with pytest.raises(InvalidArgumentError, match=r"input\[0\]\.content\[0\]"):
        messages_of([{"role": "user", "content": [{"type": "input_image"}]}])


async def test_plain_http_is_for_loopback_alone(said: Said, tmp_path: Path) -> None:
    with pytest.raises(DeniedError, match="http-tls-cert"):
        HttpListen("0.0.0.0:0").check()
    files = issue_files(Authority.create("here", now()), _principal(), tmp_path / "pki")
    server = GatewayServer(
        make_app(said, Keyed()), HttpListen("127.0.0.1:0", files.cert, files.key)
    )
    await server.start()
    try:
        assert server.url.startswith("https://")
        said_by_curl = await run("curl", "-sk", f"{server.url}/health")
        assert json.loads(said_by_curl) == {"status": "ok"}
        checked = await run(
            "curl", "-s", "--cacert", files.ca, "--resolve", _name(server.url), _by_name(server.url)
        )
        assert json.loads(checked) == {"status": "ok"}
    finally:
        await server.stop()
    files.key.chmod(0o644)
    with pytest.raises(DeniedError, match="chmod 600"):
        HttpListen("127.0.0.1:0", files.cert, files.key).check()
    with pytest.raises(InvalidArgumentError, match="http-tls-key"):
        HttpListen("127.0.0.1:0", files.cert).check()


async def test_a_certificate_that_was_renewed_is_shown_without_a_restart(
    said: Said, tmp_path: Path
) -> None:
    old, new = (
        issue_files(Authority.create("here", now()), _principal(), tmp_path / name)
        for name in ("old", "new")
    )
    server = GatewayServer(make_app(said, Keyed()), HttpListen("127.0.0.1:0", old.cert, old.key))
    await server.start()
    ours, theirs = (ssl.PEM_cert_to_DER_cert(files.cert.read_text()) for files in (old, new))
    try:
        assert await _shown(server.url) == ours
        new.cert.replace(old.cert)
        assert await _shown(server.url) == ours, "its key is not there yet"
        old.key.unlink()
        assert await _shown(server.url) == ours
        new.key.replace(old.key)
        assert await _shown(server.url) == theirs
        old.key.chmod(0o644)
        old.cert.touch()
        assert await _shown(server.url) == theirs
    finally:
        await server.stop()


async def _shown(url: str) -> bytes:
    """The certificate that the gateway shows to a new connection, over which it answers."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(url.rpartition(":")[2]), ssl=context
    )
    async with asyncio.timeout(60):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b'{"status":"ok"}')
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


def _principal() -> Any:
    from edgeshard.domain.identity import coordinator_of

    return coordinator_of("here")


def _name(url: str) -> str:
    return f"coordinator.coordinator.here:{url.rpartition(':')[2]}:127.0.0.1"


def _by_name(url: str) -> str:
    return f"https://coordinator.coordinator.here:{url.rpartition(':')[2]}/health"


PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@asynccontextmanager
async def for_pages(said: Said, *origins: str, local_only: bool = False) -> AsyncIterator[Http]:
    app = make_app(said, Keyed(), local_only=local_only, origins=parse_origins(origins))
    server = GatewayServer(app, HttpListen("127.0.0.1:0"))
    await server.start()
    try:
        yield Http(server.url, KEY)
    finally:
        await server.stop()


def cors(answer: Answer) -> dict[str, str]:
    return {
        name: value for name, value in answer.headers.items() if name.startswith("access-control-")
    }


@pytest.mark.parametrize("local_only", [False, True])
async def test_a_page_that_is_allowed_asks_from_its_browser(said: Said, local_only: bool) -> None:
    async with for_pages(said, "http://localhost:3000", PAGE, local_only=local_only) as http:
        browser = Http(http.url)  # which sends no key with its question
        leave = await browser.send("OPTIONS", "/v1/chat/completions", None, PREFLIGHT)
        assert (leave.status, leave.headers["access-control-allow-origin"], leave.body) == (
            204,
            PAGE,
            b"",
        )
        assert (
            leave.headers["access-control-allow-headers"]
            == "authorization, content-type, x-stainless-os"
        )
        assert (
            "POST" in leave.headers["access-control-allow-methods"]
            and leave.headers["vary"] == "Origin"
        )
        said.texts = ["a"]
        for path, body in (
            ("/v1/chat/completions", ASKED),
            ("/v1/chat/completions", {**ASKED, "stream": True}),
        ):
            answer = await http.post(path, body, {"origin": PAGE})
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await browser.get("/v1/models", {"origin": PAGE})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE), (
            "so the page sees why"
        )
        assert (await http.get("/v1/models", {"origin": PAGE, "host": "chat.example"})).status == (
            403 if local_only else 200
        )
        stranger = {"origin": "https://evil.example"}
        assert not cors(
            await browser.send("OPTIONS", "/v1/models", None, {**PREFLIGHT, **stranger})
        )
        other = await http.get("/v1/models", stranger)
        assert not cors(other) and other.headers["vary"] == "Origin"
        assert other.status == (403 if local_only else 200)


async def test_no_page_is_allowed_by_itself_and_no_cookies_ever(said: Said, http: Http) -> None:
    for answer in (
        await http.send("OPTIONS", "/v1/models", None, PREFLIGHT),
        await http.get("/v1/models", {"origin": PAGE}),
    ):
        assert not cors(answer) and "vary" not in answer.headers
    async with for_pages(said, "*") as any_page:
        answer = await any_page.get("/v1/models", {"origin": "null"})
        assert answer.headers["access-control-allow-origin"] == "*"
        leave = await any_page.send(
            "OPTIONS", "/v1/models", None, {**PREFLIGHT, "access-control-request-headers": "a b"}
        )
        assert leave.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "access-control-allow-credentials" not in {**answer.headers, **leave.headers}


@pytest.mark.parametrize(
    "text",
    [
        "chat.example",
        "https://chat.example/",
        "https://chat.example/chat",
        "HTTPS://x",
        "null",
        "",
        "http://x:y",
    ],
)
def test_what_no_browser_sends_as_an_origin_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--http-allow-origin"):
        parse_origins([text])


async def test_an_address_that_is_taken_is_named(said: Said) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=address):
            await GatewayServer(make_app(said, Keyed()), HttpListen(address)).start()


@pytest.mark.long
@needs_clients
async def test_answers_are_what_the_document_says(said: Said, http: Http, tmp_path: Path) -> None:
    said.texts = ["word"] * 3
    checks = (
        "not_a_server_error", "status_code_conformance", "content_type_conformance",
        "response_headers_conformance", "response_schema_conformance", "negative_data_rejection",
        "unsupported_method",
    )  # fmt: skip
    await run(
        CLIENTS / "bin" / "schemathesis", "run", f"{http.url}/openapi.json",
        "--header", f"Authorization: Bearer {KEY}",
        "--phases", "examples,coverage,fuzzing", "--max-examples", str(in_form(4, 20)),
        "--checks", ",".join(checks), "--seed", "1", "--generation-database", "none",
        "--suppress-health-check", "all", "--request-timeout", "60",
        timeout_s=600, directory=tmp_path,
    )  # fmt: skip


async def test_an_abandoned_generator_is_closed(said: Said) -> None:
    said.texts = ["a"] * 10
    async with aclosing(
        answers.answers([lambda: said.generate("m", Generation("x"), "")] * 3, 2)
    ) as events:
        await anext(events)
    assert said.running == 0


FORCED = {"tools": [{"type": "function", "function": {"name": "f"}}]}
DEEP: dict[str, Any] = {"items": {"allOf": [{"properties": {"a": {}}}] * 5000}}
LARGE_SCHEMAS: dict[str, tuple[str, dict[str, Any], str]] = {
    "response_format": (
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}},
        },
        "response_format",
    ),
    "guided_json": ("/v1/completions", {"prompt": "x", "guided_json": DEEP}, "guided_json"),
    "tools": (
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    "text.format": (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": DEEP}}},
        "text.format",
    ),
    "tools of a response": (
        "/v1/responses",
        {
            "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": DEEP}],
            "tool_choice": "required",
        },
        "tools",
    ),
}


@pytest.mark.parametrize("name", LARGE_SCHEMAS)
async def test_a_schema_that_is_too_large_is_refused_by_the_name_of_its_field(
    http: Http, name: str
) -> None:
    path, body, field = LARGE_SCHEMAS[name]
    answer = await http.post(path, {"model": "m", **body})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (
        400,
        field,
        "guide_invalid",
    )


async def test_a_large_schema_of_ollama_is_refused_by_the_name_of_its_field(http: Http) -> None:
    answer = await http.post(
        "/api/chat", {"model": "m", "messages": CHAT, "format": DEEP, "stream": False}
    )
    assert answer.status == 400 and answer.json["error"].startswith(
        "format: the JSON schema has more than"
    )


BAD_CHOICES: list[Any] = [
    {"type": "allowed_tools", "tools": [1]},
    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [[]]}},
    {"type": ["allowed_tools"]},
    {"function": {"name": {}}},
]


@pytest.mark.parametrize("choice", BAD_CHOICES)
async def test_a_choice_of_another_form_is_refused(http: Http, choice: Any) -> None:
    answer = await http.post(
        "/v1/chat/completions", {"model": "m", "messages": CHAT, **FORCED, "tool_choice": choice}
    )
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("name", [[], {}, 7])
async def test_a_function_without_a_name_cannot_be_chosen(http: Http, name: Any) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "f"}}]},
    }
    answer = await http.post(
        "/v1/chat/completions",
        {"model": "m", "messages": CHAT, "tools": tools, "tool_choice": choice},
    )
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")


HUGE = b"1e400"
"""A JSON number that no float can hold."""


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
async def test_a_number_that_is_too_large_is_refused_where_it_would_be_passed_on(
    http: Http, field: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 0.125}}}
    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x", "name": 0.125}],
        "tools": [tool],
        "chat_template_kwargs": {"a": 0.125},
    }
    body = json.dumps({**ASKED, field: values[field]}).encode().replace(b"0.125", HUGE)
    answer = await http.post("/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_number_that_is_too_large_is_null_where_it_is_repeated(
    http: Http, stream: bool
) -> None:
    body = {"model": "m", "input": "x", "metadata": {"a": 0.125}, "stream": stream}
    answer = await http.post("/v1/responses", json.dumps(body).encode().replace(b"0.125", HUGE))
    assert (
        answer.status == 200
        and b'"metadata":{"a":null}' in answer.body
        and b"Infinity" not in answer.body
    )


async def test_nan_is_no_json(http: Http) -> None:
    answer = await http.post("/v1/chat/completions", b'{"model": "m", "user": NaN}')
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


async def test_the_name_of_a_field_is_cut_in_an_error(http: Http) -> None:
    answer = await http.post("/v1/chat/completions", {**ASKED, "x" * 100_000: 1})
    assert answer.status == 400 and len(answer.body) < 1000
