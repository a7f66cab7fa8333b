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
ASKED = {"model": "openai/tales", "messages": CHAT, "api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 12}
litellm.telemetry = False

whole = litellm.completion(**ASKED, temperature=0)
text = whole.choices[0].message.content
assert text and whole.usage.completion_tokens == 12
chunks = list(litellm.completion(**ASKED, temperature=0, stream=True))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
assert asyncio.run(litellm.acompletion(**ASKED, temperature=0)).choices[0].message.content == text
form = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
formed = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": form, "strict": True}}
answer = litellm.completion(**{**ASKED, "max_tokens": 60}, response_format=formed)
assert json.loads(answer.choices[0].message.content).keys() == {"on"}
ollama = {"model": "ollama_chat/tales", "messages": CHAT, "api_base": URL, "api_key": KEY, "max_tokens": 12}
assert litellm.completion(**ollama, temperature=0).choices[0].message.content == text
try:
    litellm.completion(**{**ASKED, "model": "openai/none"})
except litellm.NotFoundError:
    sys.stdout.write("ok\n")
