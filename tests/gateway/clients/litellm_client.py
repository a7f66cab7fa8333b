"""litellm against a gateway: URL and KEY are the arguments."""

# mypy: ignore-errors

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

URL, KEY = sys.argv[1:]
CHAT = [{"role": "user", "content": "Tell me of a king"}]
ASKED = {
    "model": "openai/tales",
    "messages": CHAT,
    "api_base": f"{URL}/v1",
    "api_key": KEY,
    "max_tokens": 12,
}
litellm.telemetry = False

whole = litellm.completion(**ASKED, temperature=0)
text = whole.choices[0].message.content
assert text and whole.usage.completion_tokens == 12
chunks = list(litellm.completion(**ASKED, temperature=0, stream=True))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
assert asyncio.run(litellm.acompletion(**ASKED, temperature=0)).choices[0].message.content == text
form = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
formed = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": form, "strict": True}}
answer = litellm.completion(**{**ASKED, "max_tokens": 60}, response_format=formed)
assert json.loads(answer.choices[0].message.content).keys() == {"on"}
ollama = {
    "model": "ollama_chat/tales",
    "messages": CHAT,
    "api_base": URL,
    "api_key": KEY,
    "max_tokens": 12,
}
assert litellm.completion(**ollama, temperature=0).choices[0].message.content == text
big = {**ollama, "num_ctx": 8192, "top_p": 0, "keep_alive": "5m"}
assert litellm.completion(**big).choices[0].message.content == text
long = litellm.completion(
    **{**ASKED, "model": "openai/handy", "max_tokens": 100_000}, ignore_eos=True
)
assert long.choices[0].finish_reason == "length" and long.usage.total_tokens == 256
lamp = {"type": "function", "function": {"name": "set_lamp", "parameters": form}}
made = litellm.completion(
    **{**ASKED, "model": "openai/handy", "max_tokens": 60}, tools=[lamp], tool_choice="required"
)
dumped = made.choices[0].message.model_dump()
assert dumped["function_call"] is None, "it goes back with nulls"
told = {"role": "tool", "tool_call_id": dumped["tool_calls"][0]["id"], "content": "done"}
back = {**ASKED, "model": "openai/handy", "messages": [*CHAT, dumped, told], "top_p": 0}
assert litellm.completion(**back, tools=[lamp]).choices[0].message.content


def deployed(name):
    return {
        "model_name": name,
        "litellm_params": {"model": f"openai/{name}", "api_base": f"{URL}/v1", "api_key": KEY},
    }


LONG = [{"role": "user", "content": "king " * 300}]
router = litellm.Router(
    model_list=[deployed("handy"), deployed("tales")],
    context_window_fallbacks=[{"handy": ["tales"]}],
    num_retries=0,
)
for stream in (False, True):
    # handy's context is too small for it, and that of tales is not.
    answer = router.completion(
        model="handy", messages=LONG, max_tokens=12, temperature=0, stream=stream
    )
    parts = list(answer) if stream else [answer]
    assert {part.model for part in parts} == {"tales"}
try:
    litellm.completion(**{**ASKED, "messages": LONG * 2})
except litellm.ContextWindowExceededError as error:
    assert "512 tokens" in error.message
else:
    raise AssertionError("it was too long")
try:
    litellm.completion(**{**ASKED, "model": "openai/none"})
except litellm.NotFoundError:
    sys.stdout.write("ok\n")
