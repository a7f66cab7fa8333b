"""Requests in the shapes that applications send, from JSON files: each gets an answer of the shape
that they read.

Those of Open WebUI were recorded. The others were written after the applications' public source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import Answer, Http
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timing]

CLIENTS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "clients").glob("*.json"))
}
REQUESTS = {
    f"{client}: {request['what']}": (recorded["headers"], request)
    for client, recorded in CLIENTS.items()
    for request in recorded["requests"]
}


async def test_every_application_has_its_file() -> None:
    assert CLIENTS.keys() == {"cline", "codex", "continue", "home_assistant", "n8n", "open_webui"}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_gets_the_answer_that_its_client_reads(
    site: Site, http: Http, name: str
) -> None:
    headers, request = REQUESTS[name]
    if request["answer"] == "left":
        async with http.opened("POST", request["path"], request["body"], headers) as stream:
            assert stream.status == 200
            await anext(stream.parts())
        await site.kv_gone()
        return
    answer = await http.send(request["method"], request["path"], request.get("body"), headers)
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-ignored-tools", "") == request.get("ignored_tools", "")
    CHECKS[request["answer"]](answer, request.get("body"))


def check_models(answer: Answer, body: Any) -> None:
    assert {"tales", "handy"} <= {model["id"] for model in answer.json["data"]}
    assert all(model["object"] == "model" and model["owned_by"] for model in answer.json["data"])


def check_tags(answer: Answer, body: Any) -> None:
    assert {"tales", "handy"} <= {model["name"] for model in answer.json["models"]}


def check_whole(answer: Answer, body: Any) -> None:
    assert "content-encoding" not in answer.headers
    assert isinstance(answer.json["choices"][0]["message"]["content"], str)
    assert answer.json["usage"]["total_tokens"] > 0


def check_stream(answer: Answer, body: Any) -> None:
    choices = streamed(answer, body)
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[-1]["finish_reason"] in ("stop", "length")
    assert all("content" in choice["delta"] for choice in choices[:-1])


def check_call(answer: Answer, body: Any) -> None:
    choices = streamed(answer, body)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == body["tool_choice"]["function"]["name"]
    assert calls[0]["id"] and calls[0]["index"] == 0
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {}
    assert choices[-1]["finish_reason"] == "tool_calls"


def check_text(answer: Answer, body: Any) -> None:
    choices = [choice for event in events_of(answer) for choice in event["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length")
    text = "".join(choice["text"] for choice in choices)
    assert not any(stop in text for stop in body["stop"])


def check_responses(answer: Answer, body: Any) -> None:
    events = [
        json.loads(line[6:])
        for line in answer.body.decode().split("\n")
        if line.startswith("data: ")
    ]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    response = events[-1]["response"]
    assert response["output"][0]["type"] == "message" and response["usage"]["output_tokens"] > 0
    if "schema" in body["text"].get("format", {}):
        assert json.loads(response["output"][0]["content"][0]["text"]).keys() == {"is_king"}


def check_lines(answer: Answer, body: Any) -> None:
    lines = [json.loads(line) for line in answer.body.decode().splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert {line["model"] for line in lines} == {body["model"]}
    pieces = [
        line["message"]["content"] if "message" in line else line["response"] for line in lines
    ]
    assert lines[-1]["done_reason"] in ("stop", "length") and lines[-1]["eval_count"] > 0
    if "format" in body:
        assert json.loads("".join(pieces)).keys() == {"is_on"}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    lines = [line for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines]


def streamed(answer: Answer, body: Any) -> list[dict[str, Any]]:
    """The choices of a stream, which all are of one answer."""
    events = events_of(answer)
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert len({event["id"] for event in events}) == 1
    if body.get("stream_options"):
        assert events[-1]["usage"]["completion_tokens"] > 0
    return [choice for event in events for choice in event["choices"]]


CHECKS = {
    "models": check_models,
    "tags": check_tags,
    "whole": check_whole,
    "stream": check_stream,
    "call": check_call,
    "text": check_text,
    "responses": check_responses,
    "lines": check_lines,
}
"""The check of an answer, by its kind in the files."""
