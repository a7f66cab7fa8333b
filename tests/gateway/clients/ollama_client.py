"""Ollama's own library against a gateway: URL and KEY are the arguments."""

# mypy: ignore-errors

import asyncio
import json
import sys

import ollama

URL, KEY = sys.argv[1:]
CHAT = [{"role": "user", "content": "Tell me of a king"}]
OPTIONS = {"temperature": 0, "num_predict": 12}
SHOWN = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(host=URL, headers=SHOWN)

(tales,) = [model for model in client.list().models if model.model == "tales"]
assert (
    tales.size > 1_000_000
    and len(tales.digest) == 64
    and tales.details.parameter_size.endswith("M")
)
assert client.show("tales").capabilities
assert "tales" in [model.model for model in client.ps().models] and tales.modified_at.year > 2000
whole = client.chat(model="tales:latest", messages=CHAT, options=OPTIONS)
assert whole.message.content and whole.done_reason == "length" and whole.eval_count == 12
parts = list(client.chat(model="tales", messages=CHAT, options=OPTIONS, stream=True))
assert "".join(part.message.content for part in parts) == whole.message.content and parts[-1].done
generated = client.generate(model="tales", prompt=CHAT[0]["content"], options=OPTIONS)
assert generated.response == whole.message.content
assert client.generate(model="tales", prompt="Once upon a time", raw=True, options=OPTIONS).response
assert client.generate(model="tales").done_reason == "load"
schema = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
formed = client.chat(model="tales", messages=CHAT, format=schema, options={"num_predict": 60})
assert json.loads(formed.message.content).keys() == {"on"}


def set_lamp(on: bool) -> str:
    """Set the lamp.

    Args:
        on: whether it shines
    """
    return "done"


call = {"function": {"name": "set_lamp", "arguments": {"on": True}}}
told = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}]
told.append({"role": "tool", "content": "done", "tool_name": "set_lamp"})
assert client.chat(model="handy", messages=told, tools=[set_lamp], options=OPTIONS).done
past = {"role": "assistant", "content": "", "thinking": "The lamp", "tool_calls": [call]}
memory = {
    "num_ctx": 8192,
    "num_batch": 512,
    "num_gpu": -1,
    "low_vram": False,
    "use_mlock": True,
    "num_keep": 4,
}
unused = {
    "typical_p": 1.0,
    "tfs_z": 1.0,
    "mirostat": 0,
    "penalize_newline": True,
    "top_p": 0.0,
    "stop": ["</s>"],
}
sent = {"options": {**OPTIONS, **memory, **unused}, "keep_alive": -1, "think": False}
answer = client.chat(model="tales", messages=[CHAT[0], past, told[-1]], tools=[set_lamp], **sent)
assert (
    answer.message.content
    and client.chat(model="tales", messages=[*CHAT, answer.message, *CHAT], **sent).done
)
long = client.chat(
    model="handy", messages=CHAT, options={"num_predict": 100_000, "num_ctx": 131072}
)
assert long.done_reason == "stop" or long.prompt_eval_count + long.eval_count == 256
empty = client.generate(
    model="tales", prompt="x", suffix="", context=[], images=[], template="", **sent
)
assert empty.done and empty.prompt_eval_count > 0
try:
    client.chat(model="none", messages=CHAT)
except ollama.ResponseError as error:
    assert error.status_code == 404 and "none" in error.error


async def at_once():
    several = ollama.AsyncClient(host=URL, headers=SHOWN)
    calls = [several.chat(model="tales", messages=CHAT, options=OPTIONS) for _ in range(4)]
    assert {answer.message.content for answer in await asyncio.gather(*calls)} == {
        whole.message.content
    }


asyncio.run(at_once())
sys.stdout.write("ok\n")
