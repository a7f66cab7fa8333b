"""pydantic-ai against a gateway: URL and KEY are the arguments."""

# mypy: ignore-errors

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY = sys.argv[1:]
SETTINGS = {"temperature": 0.0, "max_tokens": 60}
model = OpenAIChatModel("tales", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))


class Lamp(BaseModel):
    """A lamp to set."""

    color: Literal["red", "green"]
    on: bool


def first_a_king(context):
    """The model must call something in each step; left to itself, it ends with the first."""
    return {**SETTINGS, "tool_choice": ["king"]} if context.run_step == 1 else SETTINGS


async def main():
    tell = Agent(model, model_settings={**SETTINGS, "max_tokens": 12})
    whole = await tell.run("Tell me of a king")
    assert whole.output and whole.usage.output_tokens == 12
    async with tell.run_stream("Tell me of a king") as stream:
        assert [part async for part in stream.stream_text(delta=False)][-1] == whole.output
    for output in (Lamp, NativeOutput(Lamp)):
        formed = await Agent(model, output_type=output, model_settings=SETTINGS).run("x")
        assert isinstance(formed.output, Lamp), formed.output

    called = []
    handy = Agent(model, output_type=Lamp, model_settings=first_a_king)

    @handy.tool_plain
    def king(name: Literal["Midas", "Minos"]) -> str:
        """Return facts about a king."""
        called.append(name)
        return f"{name} is a king"

    answer = await handy.run("x")
    assert isinstance(answer.output, Lamp) and called[0] in ("Midas", "Minos")
    parts = [part for message in answer.all_messages() for part in message.parts]
    assert any(isinstance(part, ToolCallPart) and part.tool_name == "king" for part in parts)
    assert any(
        isinstance(part, ToolReturnPart) and part.content == f"{called[0]} is a king"
        for part in parts
    )
    thought = ThinkingPart("A king", id="reasoning_content", provider_name="openai")
    cut = ToolCallPart("king", '{"name": "Mi', tool_call_id="call1")
    past = [
        ModelRequest([UserPromptPart("x")]),
        ModelResponse([thought, cut]),
        ModelRequest([ToolReturnPart("king", "no such king", tool_call_id="call1")]),
        ModelResponse([thought, TextPart("Midas")]),
    ]
    short = {"max_tokens": 6, "top_p": 0.0, "stop_sequences": ["</s>"]}
    assert (await tell.run("And?", message_history=past, model_settings=short)).output
    long = {"max_tokens": 100_000, "extra_body": {"ignore_eos": True}}
    assert (await tell.run("Tell me of a king", model_settings=long)).usage.total_tokens == 512
    try:
        await tell.run("king " * 600)
    except ModelHTTPError as error:
        assert error.status_code == 400 and error.body["code"] == "context_length_exceeded"
    else:
        raise AssertionError("it was too long")


asyncio.run(main())
sys.stdout.write("ok\n")
