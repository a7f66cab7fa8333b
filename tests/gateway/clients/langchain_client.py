"""langchain-openai against a gateway: URL and KEY are the arguments."""

# mypy: ignore-errors

import sys
from typing import Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, KEY = sys.argv[1:]
SHARED = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}


class Lamp(BaseModel):
    """A lamp to set."""

    color: Literal["red", "green"]
    on: bool


model = ChatOpenAI(model="tales", temperature=0, max_tokens=12, **SHARED)
whole = model.invoke("Tell me of a king")
assert whole.content and whole.usage_metadata["output_tokens"] == 12
assert "".join(chunk.content for chunk in model.stream("Tell me of a king")) == whole.content
handy = ChatOpenAI(model="handy", max_tokens=60, **SHARED)
made = handy.bind_tools([Lamp], tool_choice="any").invoke("x")
(call,) = made.tool_calls
assert call["name"] == "Lamp" and Lamp(**call["args"])
back = [HumanMessage("x"), made, ToolMessage("done", tool_call_id=call["id"])]
assert handy.bind_tools([Lamp]).invoke(back).response_metadata["finish_reason"] in (
    "stop",
    "length",
)
cut = {
    "type": "invalid_tool_call",
    "name": "Lamp",
    "args": '{"color": "re',
    "id": call["id"],
    "error": None,
}
past = AIMessage(
    "", invalid_tool_calls=[cut], additional_kwargs={"reasoning_content": "easy", "refusal": None}
)
short = ChatOpenAI(model="handy", max_tokens=6, top_p=0, stop=["</s>"], **SHARED).bind_tools([Lamp])
assert short.invoke(
    [HumanMessage("x"), past, ToolMessage("no such color", tool_call_id=call["id"])]
).content
formed = ChatOpenAI(model="tales", max_tokens=60, **SHARED).with_structured_output(
    Lamp, method="json_schema"
)
assert isinstance(formed.invoke("x"), Lamp)
called = handy.with_structured_output(Lamp, method="function_calling")
assert isinstance(called.invoke("x"), Lamp)
responses = ChatOpenAI(
    model="tales", max_tokens=12, temperature=0, use_responses_api=True, **SHARED
)
long = ChatOpenAI(
    model="handy", max_tokens=100_000, extra_body={"ignore_eos": True}, **SHARED
).invoke("Tell me")
assert long.usage_metadata["total_tokens"] == 256
told = responses.invoke("Tell me of a king")
assert told.text == whole.content
searching = responses.bind_tools([{"type": "web_search"}])
assert searching.invoke([HumanMessage("Tell me of a king"), told, HumanMessage("x")]).text
assert OpenAI(model="tales", max_tokens=4, **SHARED).invoke("Once upon a time")
try:
    ChatOpenAI(model="tales", **SHARED).invoke("king " * 600)
except ContextOverflowError as error:
    assert "maximum context length is 512 tokens" in str(error)
else:
    raise AssertionError("it was too long")
sys.stdout.write("ok\n")
