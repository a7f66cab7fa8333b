"""Conversations through the SDK, against a scripted site."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from edgeshard.client import ChatFinished, Client, ContentDelta, Started, SyncClient, ToolCall
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.requests.conversation import ChatReason
from edgeshard.domain.requests.generation import Finished, FinishReason, Token
from edgeshard.proto.v1 import inference_pb2

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def test_the_events_of_an_answer(site: Any) -> None:
    with SyncClient(site.address) as client:
        events = list(client.chat("tales", "Hello"))
    assert isinstance(events[0], Started)
    assert [event.text for event in events if isinstance(event, ContentDelta)] == [
        "Once",
        " upon",
        " a",
        " time",
        " é",
        "!",
    ]
    assert events[-1] == ChatFinished(ChatReason.LENGTH, 3, 5)


async def test_calls_of_tools_come_whole_and_go_back_as_a_message(site: Any) -> None:
    said = ["Yes", "<tool", '_call>{"name": "find", ', '"arguments": {"a": 1}}', "</tool_call>"]
    started = site.script[0]
    tokens = [Token(3 + n, 10 + n, text) for n, text in enumerate(said)]
    site.script = [started, *tokens, Finished(FinishReason.STOP, "", 3, 5)]
    async with Client(site.address) as client:
        events = [event async for event in client.chat("tales", "Hello", tools=TOOLS)]
        answer = await client.complete_chat("tales", "Hello", tools=TOOLS)
    assert [event.text for event in events if isinstance(event, ContentDelta)] == ["Yes"]
    (call,) = [event for event in events if isinstance(event, ToolCall)]
    assert (call.index, call.name, call.arguments) == (0, "find", '{"a": 1}')
    assert (
        answer.reason is ChatReason.TOOL_CALLS
        and answer.content == "Yes"
        and "find" in repr(answer)
    )
    function = {"name": "find", "arguments": '{"a": 1}'}
    assert answer.message() == {
        "role": "assistant",
        "content": "Yes",
        "tool_calls": [{"id": answer.tool_calls[0].id, "type": "function", "function": function}],
    }


async def test_leaving_the_loop_cancels_at_the_server(site: Any) -> None:
    site.hold_after(2)
    async with Client(site.address) as client:
        async with aclosing(client.chat("tales", "Hello")) as events:
            async for event in events:
                if isinstance(event, ContentDelta):
                    break
        assert site.cancelled.wait(60)


async def test_an_answer_that_breaks_off_has_the_text_until_then(site: Any) -> None:
    site.failures["GenerateEnd"] = UnavailableError("no node is left", reason="NOT_RECOVERED")
    site.script = site.script[:-1]
    async with Client(site.address) as client:
        with pytest.raises(UnavailableError) as failed:
            await client.complete_chat("tales", "Hello")
    assert failed.value.partial_text.startswith("Once upon")


async def test_what_the_model_recommends_stands_in_for_what_is_not_given(site: Any) -> None:
    async with Client(site.address) as client:
        await client.complete_chat("tales", "Hello")
        await client.complete_chat("tales", "Hello", temperature=0.0, max_new_tokens=7)
    first, second = (request.generation for request in site.sent(inference_pb2.GenerateRequest))
    assert (first.sampling.temperature, first.max_new_tokens) == (0.5, 100)
    assert (second.sampling.temperature, second.max_new_tokens) == (0.0, 7)
    assert tuple(first.prompt_tokens) == (5, 6, 7)


async def test_a_prompt_is_asked_for_again_where_the_coordinator_was_away(site: Any) -> None:
    """By the channel, as every call that changes nothing."""
    site.failures["RenderChat"] = UnavailableError("away")
    async with Client(site.address) as client:
        with pytest.raises(UnavailableError):
            await client.complete_chat("tales", "Hello")
        assert len(site.sent(inference_pb2.RenderChatRequest)) == 4
        del site.failures["RenderChat"]
        assert (await client.complete_chat("tales", "Hello")).content == "Once upon a time é!"
