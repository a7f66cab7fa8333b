"""What Open WebUI asks a gateway for, recorded once and asked again: each request gets an answer of the shape that it
reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import Http
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timing]

RECORDED = json.loads((Path(__file__).parent / "clients" / "open_webui.json").read_text())
REQUESTS = {request["what"]: request for request in RECORDED["requests"]}


async def streamed(http: Http, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream, which all are of one answer."""
    events = await http.events(request["path"], request["body"])
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert len({event["id"] for event in events}) == 1
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize("what", REQUESTS)
async def test_each_request_gets_the_answer_that_the_client_reads(site: Site, http: Http, what: str) -> None:
    request = REQUESTS[what]
    match request["answer"]:
        case "models":
            answer = await http.get(request["path"], RECORDED["headers"])
            assert {"tales", "handy"} <= {model["id"] for model in answer.json["data"]}
            assert all(model["object"] == "model" and model["owned_by"] for model in answer.json["data"])
        case "whole":
            answer = await http.post(request["path"], request["body"], RECORDED["headers"])
            assert answer.status == 200 and "content-encoding" not in answer.headers
            assert isinstance(answer.json["choices"][0]["message"]["content"], str)
            assert answer.json["usage"]["total_tokens"] > 0
        case "stream":
            choices = await streamed(http, request)
            assert choices[0]["delta"]["role"] == "assistant"
            assert choices[-1]["finish_reason"] in ("stop", "length")
            assert all("content" in choice["delta"] for choice in choices[:-1])
        case "call":
            choices = await streamed(http, request)
            calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
            assert calls[0]["function"]["name"] == "get_current_timestamp" and calls[0]["id"] and calls[0]["index"] == 0
            assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {}
            assert choices[-1]["finish_reason"] == "tool_calls"
        case "left":
            async with http.opened("POST", request["path"], request["body"], RECORDED["headers"]) as stream:
                assert stream.status == 200
                await anext(stream.parts())
            await site.kv_gone()
        case "too_long":
            answer = await http.post(request["path"], request["body"], RECORDED["headers"])
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        case other:
            raise AssertionError(f"no such answer: {other}")
