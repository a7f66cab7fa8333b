"""The openai library against a gateway: URL and KEY are the arguments."""

# mypy: ignore-errors

import asyncio
import gzip
import json
import sys

import httpx
import openai
from openai import AsyncOpenAI, OpenAI

URL, KEY = sys.argv[1:]
CHAT = [{"role": "user", "content": "Tell me of a king"}]
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "on": {"type": "boolean"}},
    "required": ["color", "on"],
    "additionalProperties": False,
}
FUNCTION = {"name": "set_lamp", "parameters": SCHEMA}
client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def chats():
    assert "tales" in [model.id for model in client.models.list()]
    assert client.models.retrieve("tales").object == "model"
    whole = client.chat.completions.create(
        model="tales", messages=CHAT, max_tokens=12, temperature=0
    )
    text = whole.choices[0].message.content
    assert (
        text and whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12
    )
    stream = client.chat.completions.create(
        model="tales", messages=CHAT, max_completion_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True}, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == whole.usage
    assert len(chunks[1].choices[0].logprobs.content[0].top_logprobs) == 3
    several = client.chat.completions.create(
        model="tales", messages=CHAT, max_tokens=5, n=3, seed=1, stop=["king"]
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def tools_and_forms():
    asked = {
        "model": "handy",
        "messages": CHAT,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    made = client.chat.completions.create(**asked, tool_choice="required")
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "set_lamp" and json.loads(call.function.arguments).keys() == {
        "color",
        "on",
    }
    assert made.choices[0].finish_reason == "tool_calls"
    named = {"type": "function", "function": {"name": "set_lamp"}}
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        final = stream.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments)["color"] in (
        "red",
        "green",
    )
    back = [
        *CHAT,
        made.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert client.chat.completions.create(model="handy", messages=back, max_tokens=3).choices
    form = {
        "type": "json_schema",
        "json_schema": {"name": "lamp", "schema": SCHEMA, "strict": True},
    }
    formed = client.chat.completions.create(
        model="tales", messages=CHAT, max_tokens=60, response_format=form
    )
    assert json.loads(formed.choices[0].message.content).keys() == {"color", "on"}


def history():
    """An answer that the library dumped is accepted in the history, also with a malformed call."""
    asked = {
        "model": "handy",
        "max_tokens": 3,
        "top_p": 0,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    made = client.chat.completions.create(
        **{**asked, "max_tokens": 60}, messages=CHAT, tool_choice="required"
    )
    dumped = made.choices[0].message.model_dump()
    assert None in dumped.values()
    (call,) = dumped["tool_calls"]
    told = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    others = {
        "annotations": None,
        "audio": None,
        "reasoning": "easy",
        "provider_specific_fields": {"a": 1},
    }
    cut = {**call, "function": {**call["function"], "arguments": '{"color": "re'}}
    nothing = {**call, "function": {**call["function"], "arguments": None}}
    for message in (
        dumped,
        {**dumped, **others},
        {**dumped, "tool_calls": [cut]},
        {**dumped, "tool_calls": [nothing]},
    ):
        answer = client.chat.completions.create(**asked, messages=[*CHAT, message, told])
        assert answer.choices[0].message.content, message
    nulls = dict.fromkeys(("temperature", "stop", "response_format", "seed", "logit_bias", "user"))
    assert client.chat.completions.create(**asked, messages=CHAT, extra_body=nulls).choices


def tools_of_the_server():
    """Tools that the server cannot run are left out, and the answer names them."""
    search = {"type": "web_search"}
    asked = {
        "model": "tales",
        "input": CHAT,
        "max_output_tokens": 3,
        "temperature": 0,
        "tools": [search],
    }
    answer = client.responses.with_raw_response.create(**asked)
    assert answer.headers["x-ignored-tools"] == "web_search" and answer.parse().output_text
    try:
        client.responses.create(**asked, tool_choice=search)
    except openai.BadRequestError as error:
        assert error.param == "tool_choice"
    else:
        raise AssertionError("it cannot be called")


def stops():
    """A text that is a special token ends an answer."""
    ends = {"ignore_eos": True, "logit_bias": {"2": 100}}
    asked = {"model": "tales", "max_tokens": 8, "temperature": 0, "extra_body": ends}
    for stop, reason in (("</s>", "stop"), ("<unk>", "length")):
        assert (
            client.chat.completions.create(**asked, messages=CHAT, stop=[stop])
            .choices[0]
            .finish_reason
            == reason
        )
        assert (
            client.completions.create(**asked, prompt="x", stop=stop).choices[0].finish_reason
            == reason
        )


def long_answers():
    """With a limit beyond the context, or without one, an answer may fill the rest of the
    context."""
    asked = {"model": "handy", "temperature": 0, "extra_body": {"ignore_eos": True}}
    for limit in ({"max_tokens": 100_000}, {"max_completion_tokens": 4096}, {}):
        answer = client.chat.completions.create(**asked, messages=CHAT, **limit)
        assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", 256), (
            limit
        )
    text = client.completions.create(**asked, prompt="x", max_tokens=2000)
    assert (text.choices[0].finish_reason, text.usage.total_tokens) == ("length", 256)
    response = client.responses.create(**asked, input=CHAT, max_output_tokens=32_000)
    assert (response.status, response.usage.total_tokens) == ("incomplete", 256)


def plain_http():
    """The same requests as proxies and people send them."""
    asked = {"model": "tales", "messages": CHAT, "max_tokens": 3}
    chat, body = "/v1/chat/completions", json.dumps(asked).encode()
    with httpx.Client(
        base_url=URL, headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    ) as plain:
        for path in ("/health", "/version", "/v1/models", "/api/tags", "/api/version"):
            head = plain.head(path)
            assert (head.status_code, head.content) == (200, b""), path
        assert plain.post(f"{chat}/", json=asked).status_code == 200
        assert (
            plain.post(
                chat, content=gzip.compress(body), headers={"Content-Encoding": "gzip"}
            ).status_code
            == 200
        )
        refused = plain.post(chat, content=body, headers={"Content-Encoding": "br"})
        assert (
            refused.status_code == 415 and "Content-Encoding" in refused.json()["error"]["message"]
        )
    assert httpx.get(f"{URL}/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert OpenAI(base_url=f"{URL}/v1/", api_key=KEY).chat.completions.create(**asked).choices
    try:
        OpenAI(base_url=URL, api_key=KEY, max_retries=0).chat.completions.create(**asked)
    except openai.NotFoundError as error:
        assert chat in error.message
    else:
        raise AssertionError("/v1 is absent")


def responses():
    whole = client.responses.create(
        model="tales", input="Tell me of a king", max_output_tokens=12, temperature=0
    )
    assert whole.output_text and whole.status == "incomplete" and whole.usage.output_tokens == 12
    with client.responses.stream(
        model="tales", input=CHAT, max_output_tokens=12, temperature=0
    ) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    assert text == whole.output_text
    events = client.responses.create(
        model="handy", input="x", tools=[{"type": "function", "strict": True, **FUNCTION}],
        tool_choice="required", max_output_tokens=60, stream=True,
    )  # fmt: skip
    done = [event for event in events if event.type == "response.completed"]
    (call,) = done[0].response.output
    assert call.type == "function_call" and json.loads(call.arguments).keys() == {"color", "on"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    question = {"role": "user", "content": "x"}
    again = client.responses.create(
        model="handy", input=[question, call, output], max_output_tokens=3
    )
    assert again.output_text


def completions():
    scored = client.completions.create(
        model="tales", prompt="Once upon a time", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    assert scored.choices[0].text.startswith("Once upon a time")
    assert (
        scored.choices[0].logprobs.token_logprobs[0] is None
        and len(scored.choices[0].logprobs.tokens) == 5
    )
    streamed = client.completions.create(
        model="tales", prompt=["a", "b"], max_tokens=3, stream=True
    )
    assert {chunk.choices[0].index for chunk in streamed} == {0, 1}


def errors():
    for kind, call in (
        (openai.NotFoundError, lambda: client.models.retrieve("none")),
        (
            openai.AuthenticationError,
            lambda: OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0).models.list(),
        ),
        (openai.BadRequestError, lambda: client.embeddings.create(model="tales", input="x")),
    ):
        try:
            call()
        except kind as error:
            assert error.body["message"] and error.request_id.startswith("req_")
        else:
            raise AssertionError(kind)
    try:
        client.chat.completions.create(model="tales", messages=CHAT, service_tier="flex")
    except openai.BadRequestError as error:
        assert (error.param, error.code) == ("service_tier", "unsupported_value")


async def at_once():
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as several:

        async def one(number):
            stream = await several.chat.completions.create(
                model="tales", messages=CHAT, max_tokens=10, seed=number, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(one(number) for number in range(6)))
    assert len(set(texts)) > 1 and all(texts)


chats()
tools_and_forms()
history()
tools_of_the_server()
stops()
long_answers()
plain_http()
responses()
completions()
errors()
asyncio.run(at_once())
sys.stdout.write("ok\n")
