"""HTTP as clients and proxies speak it: methods, targets, encodings, keys, and the page of
routes."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import h11
import pytest
import pytest_asyncio

from edgeshard.gateway.access import bodies
from edgeshard.gateway.access.bodies import BodyLimits
from edgeshard.gateway.connections import connection
from tests.support.http import Http
from tests.support.scripted_gateway import KEY, Said, serving

pytestmark = pytest.mark.timing

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
BODY = json.dumps(ASKED).encode()
FUNCTION = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
SEARCH = {"type": "web_search"}
CUSTOM = {"type": "custom", "custom": {"name": "patch"}}


@pytest_asyncio.fixture
async def said() -> Said:
    said = Said()
    said.texts = ["a"]
    return said


@pytest_asyncio.fixture
async def http(said: Said) -> AsyncIterator[Http]:
    async with serving(said, local_only=True) as http:
        yield http


async def raw(http: Http, request: bytes) -> bytes:
    """The answer to a request as it is on the wire."""
    host, port = http.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "path", ["/", "/health", "/version", "/v1/models", "/api/tags", "/api/ps", "/metrics"]
)
async def test_head_has_the_headers_of_get_and_no_body(http: Http, path: str) -> None:
    get, head = await http.get(path), await http.send("HEAD", path, None)
    assert (head.status, head.body) == (get.status, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    wrong = await http.send("HEAD", CHAT, None)
    assert (wrong.status, wrong.body) == (405, b"")


async def test_a_slash_at_the_end_is_served_and_nothing_is_redirected(http: Http) -> None:
    for path in (f"{CHAT}/", "/v1//chat/completions", "/v1/chat/completions//"):
        assert (await http.post(path, ASKED)).status == 200, path
    for path in ("/v1/models/", "/health/", "/api/tags/"):
        assert (await http.get(path)).status == 200, path
    assert (await http.get("/dashboard/")).status == 404
    assert (await Http(http.url).get("/v1/models/")).status == 401, (
        "the rights are those of the route"
    )


async def test_an_absolute_target_leads_to_its_route_if_its_host_is_this_one(http: Http) -> None:
    assert (await http.post(f"{http.url}{CHAT}", ASKED)).status == 200
    other = await http.get("http://evil.example/v1/models")
    assert (other.status, other.error["code"]) == (403, "foreign_host")
    assert (await http.get(f"{http.url}/v1/models", {"host": "evil.example"})).status == 200, (
        "Host does not count"
    )
    assert (await http.get("http://a@127.0.0.1/v1/models")).status == 400


async def test_a_request_without_host_is_served(http: Http) -> None:
    head = (
        f"POST {CHAT} HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\nContent-Length: "
        f"{len(BODY)}\r\n\r\n"
    )
    assert (await raw(http, head.encode() + BODY)).startswith(b"HTTP/1.1 200 ")
    assert b" 403 " in (await raw(http, b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n"))
    assert b"Host is missing" in (await raw(http, b"GET /health HTTP/1.1\r\n\r\n"))
    assert b"several headers Host" in (
        await raw(http, b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
    )
    assert b"Host names no machine" in (await raw(http, b"GET /health HTTP/1.0\r\nHost:\r\n\r\n"))


@pytest.mark.parametrize("name", ["gzip", "x-gzip", "GZIP"])
async def test_a_compressed_body_is_read(http: Http, said: Said, name: str) -> None:
    answer = await http.post(CHAT, gzip.compress(BODY), {"content-encoding": name})
    assert answer.status == 200 and "x" in said.conversations[0].messages
    assert (await http.post(CHAT, BODY, {"content-encoding": "identity"})).status == 200


async def test_a_compressed_body_is_bounded_by_its_decoded_bytes(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "KEYED", BodyLimits(1 << 20, bodies.BODY_LIMIT_S))
    encoded = {"content-encoding": "gzip"}
    fits = gzip.compress(BODY + b" " * ((1 << 20) - len(BODY)))
    assert (await http.post(CHAT, fits, encoded)).status == 200
    bomb = await http.post(CHAT, gzip.compress(BODY + b" " * (64 << 20)), encoded)
    assert (bomb.status, bomb.error["code"]) == (413, "body_too_large")


BAD_ENCODINGS = {
    "cut off": ("gzip", gzip.compress(BODY)[:-4]),
    "not gzip": ("gzip", BODY),
    "deflate named gzip": ("gzip", zlib.compress(BODY)),
    "more behind": ("gzip", gzip.compress(BODY) + gzip.compress(b"")),
    "empty": ("gzip", b""),
}


@pytest.mark.parametrize("name", BAD_ENCODINGS)
async def test_a_body_that_is_not_as_its_header_says_is_refused(http: Http, name: str) -> None:
    encoding, body = BAD_ENCODINGS[name]
    answer = await http.post(CHAT, body, {"content-encoding": encoding})
    assert (answer.status, answer.error["param"]) == (400, "content-encoding")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize"])
async def test_another_encoding_is_refused_by_name(http: Http, path: str) -> None:
    for encoding in ("br", "deflate", "gzip, gzip"):
        answer = await http.post(path, BODY, {"content-encoding": encoding})
        assert answer.status == 415 and "Content-Encoding" in answer.error["message"]
    ollama = await http.post("/api/chat", BODY, {"content-encoding": "zstd"})
    assert ollama.status == 415 and "Content-Encoding" in ollama.json["error"]


async def test_a_key_may_come_in_another_header(http: Http) -> None:
    nobody = Http(http.url)
    assert (await nobody.get("/v1/models", {"x-api-key": KEY})).status == 200
    assert (await nobody.get("/v1/models", {"x-api-key": "wrong"})).status == 401
    both = {"x-api-key": "wrong", "authorization": f"bearer {KEY}"}
    assert (await nobody.get("/v1/models", both)).status == 200, "Authorization goes before it"
    assert (
        await nobody.get("/v1/models", {"authorization": "Basic x", "x-api-key": KEY})
    ).status == 200


async def test_a_wrong_base_url_hears_of_the_right_one(http: Http) -> None:
    near = {
        "/chat/completions": CHAT, "/completions": "/v1/completions", "/models/m": "/v1/models/m",
        "/v1/v1/chat/completions": CHAT, "/openai/v1/responses": "/v1/responses",
    }  # fmt: skip
    for path, right in near.items():
        answer = await http.post(path, ASKED)
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")
        assert answer.error["message"].endswith(f": call {right}")
    assert (await http.post("/chat", ASKED)).error["message"].endswith(": call /api/chat")
    for path in ("/nothing", "/v1/nothing", "/" + "x/" * 150):
        assert ": call" not in (await http.post(path, ASKED)).error["message"]


async def test_the_page_of_routes_is_open_on_loopback_and_loads_nothing(
    said: Said, http: Http
) -> None:
    nobody = Http(http.url)
    page = await nobody.get("/docs")
    text = page.body.decode()
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "//" not in text and "<script" not in text and "src=" not in text
    assert CHAT in text and "max_completion_tokens" in text
    document = (await nobody.get("/openapi.json")).json
    assert (
        document["paths"][CHAT]
        and {"ChatCompletion", "Completion"} <= document["components"]["schemas"].keys()
    )
    foreign = await nobody.get("/openapi.json", {"origin": "https://evil.example"})
    assert foreign.status == 403
    async with serving(said) as beyond:
        for path in ("/docs", "/openapi.json"):
            assert (await Http(beyond.url).get(path)).status == 401


async def test_tools_that_no_server_runs_here_are_named_and_left_out(
    http: Http, said: Said
) -> None:
    answer = await http.post(
        CHAT, {**ASKED, "tools": [SEARCH, FUNCTION, CUSTOM, SEARCH, {"type": "a b"}]}
    )
    assert (answer.status, answer.headers["x-ignored-tools"]) == (
        200,
        "web_search, custom, unknown",
    )
    assert json.loads(said.conversations[-1].tools) == [FUNCTION]
    streamed = {**ASKED, "stream": True, "web_search_options": {}}
    async with http.opened("POST", CHAT, streamed) as stream:
        assert (stream.status, stream.headers["x-ignored-tools"]) == (200, "web_search")
    responses = {
        "model": "m",
        "input": "x",
        "tools": [{"type": "function", "name": "find", "later": 1}, SEARCH],
    }
    answer = await http.post("/v1/responses", responses)
    assert (answer.status, answer.headers["x-ignored-tools"]) == (200, "web_search")
    assert [tool["name"] for tool in answer.json["tools"]] == ["find"]
    counted = {"model": "m", "messages": ASKED["messages"], "tools": [SEARCH]}
    assert (await http.post("/tokenize", counted)).headers["x-ignored-tools"] == "web_search"
    assert "x-ignored-tools" not in (await http.post(CHAT, {**ASKED, "tools": [FUNCTION]})).headers


async def test_only_a_forced_choice_of_such_a_tool_is_refused(http: Http, said: Said) -> None:
    tools = {"tools": [FUNCTION, CUSTOM]}
    named = {"type": "function", "function": {"name": "find"}}
    other = {"type": "custom", "custom": {"name": "patch"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named, other]}}
    choices: tuple[Any, ...] = ("auto", "required", named, allowed, None)
    for choice in choices:
        assert (await http.post(CHAT, {**ASKED, **tools, "tool_choice": choice})).status == 200, (
            choice
        )
    none = {"type": "allowed_tools", "mode": "auto", "tools": []}
    assert (await http.post(CHAT, {**ASKED, **tools, "tool_choice": none})).status == 200
    assert not said.conversations[-1].tools
    forced = {"type": "allowed_tools", "mode": "required", "tools": [other]}
    choices = (
        other,
        {"type": "web_search"},
        {"type": "mcp", "server_label": "x"},
        forced,
        {"type": "function"},
    )
    for choice in choices:
        refused = await http.post(CHAT, {**ASKED, **tools, "tool_choice": choice})
        assert (refused.status, refused.error["param"]) == (400, "tool_choice"), choice
    only = {**ASKED, "tools": [CUSTOM], "tool_choice": "required"}
    assert (await http.post(CHAT, only)).error["param"] == "tool_choice"


NULLS: dict[str, dict[str, Any]] = {
    CHAT: {
        **ASKED,
        "stream_options": {"include_usage": None},
        "stream": True,
        "response_format": None,
    },
    "/v1/completions": {"model": "m", "prompt": "x"},
    "/v1/responses": {
        "model": "m",
        "input": "x",
        "text": {"format": None},
        "reasoning": {"effort": None},
    },
    "/api/chat": {
        "model": "m",
        "messages": ASKED["messages"],
        "options": {"num_ctx": None},
        "stream": False,
    },
    "/api/generate": {"model": "m", "prompt": "x", "options": None, "stream": False},
    "/tokenize": {"model": "m", "prompt": "x", "messages": None},
}


@pytest.mark.parametrize("path", NULLS)
async def test_a_null_is_an_absent_field(http: Http, path: str) -> None:
    extra = dict.fromkeys(
        ("context_management", "of_another_server", "user", "temperature", "open_objects")
    )
    answer = await http.post(path, {**NULLS[path], **extra})
    assert answer.status == 200, answer.body
    assert (await http.post(path, {**NULLS[path], "of_another_server": 0})).status == 400
    required = await http.post(path, {**NULLS[path], "model": None})
    assert required.status == 400 and "model is required" in required.body.decode()


REFUSED_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "best_of": ("/v1/completions", {"best_of": 3}),
    "max_tokens": ("/v1/completions", {"max_tokens": 0}),
    "stream_options": (CHAT, {"stream_options": {"include_usage": True}}),
    "top_logprobs": (CHAT, {"top_logprobs": 3}),
    "max_completion_tokens": (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}),
    "audio": (CHAT, {"audio": {"voice": "x"}}),
    "include": ("/v1/responses", {"include": ["message.output_text.logprobs"]}),
    "prompt": ("/tokenize", {"prompt": None}),
}


@pytest.mark.parametrize("field", REFUSED_FIELDS)
async def test_an_error_names_its_field(http: Http, field: str) -> None:
    path, more = REFUSED_FIELDS[field]
    body = {
        "model": "m",
        **({"messages": ASKED["messages"]} if path == CHAT else {"prompt": "x"}),
        **more,
    }
    if path == "/v1/responses":
        body = {"model": "m", "input": "x", **more}
    answer = await http.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, field), answer.body


async def test_options_of_ollama_without_effect_are_taken(http: Http, said: Said) -> None:
    options = {
        "num_ctx": 8192.0, "num_predict": 4.0, "use_mlock": True, "low_vram": False, "num_gqa": 8,
        "typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0, "penalize_newline": True,
        "repeat_last_n": 64, "repeat_penalty": 1.0,
    }  # fmt: skip
    empty = {"images": [], "context": [], "suffix": "", "template": ""}
    generate = {"model": "m", "prompt": "x", "stream": False, "options": options}
    assert (await http.post("/api/generate", {**generate, **empty})).status == 200
    assert said.asked[-1].max_new_tokens == 4
    effective = {
        "typical_p": 0.5,
        "mirostat": 1,
        "rope_frequency_base": 1e4,
        "num_ctx": -1,
        "num_predict": 4.5,
    }
    for name, value in {**effective, "repeat_last_n": 64}.items():
        more = {**options, "repeat_penalty": 1.5, "repeat_last_n": -1, name: value}
        refused = await http.post("/api/generate", {**generate, "options": more})
        assert refused.status == 400 and f"options.{name}" in refused.json["error"]
    for name, given in {"images": ["x"], "context": [1], "suffix": "x", "template": "x"}.items():
        refused = await http.post("/api/generate", {**generate, name: given})
        assert refused.status == 400 and name in refused.json["error"]


async def test_the_context_of_ollamas_client_bounds_its_answer(http: Http, said: Said) -> None:
    chat = {"model": "m", "messages": ASKED["messages"], "stream": False}
    for num_ctx, expected in ((8192, 50), (13, 10), (3, 50), (0, 50)):
        await http.post("/api/chat", {**chat, "options": {"num_ctx": num_ctx}})
        assert said.asked[-1].max_new_tokens == expected, num_ctx
    off = {"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1.0}
    await http.post("/api/chat", {**chat, "options": off})
    sampling = said.asked[-1].sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.0, 0.0)


async def test_schemas_have_no_nulls(http: Http, said: Said) -> None:
    properties = {
        "a": {"type": "string", "description": None, "enum": ["x", None]},
        "b": {"const": None},
    }
    schema = {
        "type": "object",
        "title": None,
        "properties": properties,
        "required": ["a"],
        "$defs": None,
    }
    form = {
        "type": "json_schema",
        "json_schema": {"name": "n", "description": None, "schema": schema},
    }
    assert (await http.post(CHAT, {**ASKED, "response_format": form})).status == 200
    guide = said.asked[-1].guide
    assert guide is not None and json.loads(guide.text) == {
        "type": "object",
        "properties": {"a": {"type": "string", "enum": ["x", None]}, "b": {"const": None}},
        "required": ["a"],
        "additionalProperties": False,
    }


async def test_hints_reach_the_template(http: Http, said: Said) -> None:
    await http.post(
        CHAT, {**ASKED, "verbosity": "low", "reasoning_effort": "high", "service_tier": "flex"}
    )
    assert json.loads(said.conversations[-1].variables) == {
        "verbosity": "low",
        "reasoning_effort": "high",
    }
    hints = {"text": {"verbosity": "high"}, "reasoning": {"effort": "low", "summary": "detailed"}}
    await http.post("/v1/responses", {"model": "m", "input": "x", **hints, "truncation": "auto"})
    assert json.loads(said.conversations[-1].variables) == {
        "verbosity": "high",
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/responses", "/api/chat"])
async def test_a_fields_range_is_that_of_the_interface(http: Http, said: Said, path: str) -> None:
    body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, ASKED)
    options = {
        "top_p": 0,
        "top_k": 0,
        "temperature": 0,
        "frequency_penalty": -2,
        "seed": -1,
        "stop": [],
    }
    more = {"options": options, "stream": False} if path == "/api/chat" else options
    assert (await http.post(path, {"model": "m", **body, **more})).status == 200
    assert said.asked[-1].sampling.top_p == 0


async def test_a_compressed_body_is_bounded_by_the_bytes_that_are_received(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty blocks decode to nothing, so the decoded bytes do not bound them."""
    monkeypatch.setattr(bodies, "KEYED", BodyLimits(1 << 20, bodies.BODY_LIMIT_S))
    stream = zlib.compressobj(wbits=31)
    begun = stream.compress(BODY) + stream.flush(zlib.Z_FULL_FLUSH)
    empty = b"\x00\x00\x00\xff\xff"
    fits = begun + empty * 1000 + stream.flush()
    assert (await http.post(CHAT, fits, {"content-encoding": "gzip"})).status == 200
    # barely too long: a client that still sends reads no refusal
    chunk = begun + empty * ((1 << 20) // len(empty))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{KEY}\r\nContent-Encoding: gzip\r\n"
    )
    sent = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
        len(chunk),
        chunk,
    )
    assert b"413 " in await raw(http, sent)


def chunked(path: str, chunks: list[bytes]) -> bytes:
    """A request whose body is sent in these chunks."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{KEY}\r\nTransfer-Encoding: chunked\r\n"
    )
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head.encode() + b"Connection: close\r\n\r\n" + body + b"0\r\n\r\n"


async def test_a_body_may_have_some_short_chunks_and_any_number_of_long_ones(http: Http) -> None:
    padding = b" " * connection.MIN_CHUNK_BYTES
    short = [bytes([byte]) for byte in BODY]
    answer = await raw(
        http,
        chunked(CHAT, [*short, *[b" "] * (connection.FREE_CHUNKS - len(short)), *[padding] * 4000]),
    )
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", [CHAT, "/api/chat", "/nowhere"])
async def test_a_body_of_many_short_chunks_is_refused_before_it_is_read(
    http: Http, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks end as the bound is passed, so nothing is unread."""
    monkeypatch.setattr(connection, "FREE_CHUNKS", 100)
    answer = await raw(http, chunked(path, [b" "] * 101)[: -len(b"\r\n0\r\n\r\n")])
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"too many chunks" in body
    error = json.loads(body)["error"]
    assert path == "/api/chat" or (error["param"], error["code"]) == ("body", "too_many_chunks")


async def test_short_chunks_cost_little_before_they_are_refused() -> None:
    reader = connection._Strict(1 << 16)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader.receive_data(head + b"1\r\nx\r\n" * 40_000)
    assert isinstance(reader.next_event(), h11.Request)
    began = time.thread_time()
    with pytest.raises(connection.TooManyChunksError):
        while True:
            reader.next_event()
    assert time.thread_time() - began < 0.1
