"""With published chat templates, prompts equal transformers' prompts.

The templates are those that the package trl ships, as their models' repositories have them;
`make clients` installs it. docs/http.md lists the differences from transformers. `Reads` and
`expected` repeat them as code.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from edgeshard.chat.chat_model import ChatModel
from edgeshard.chat.template_forms import REASONING_NAMES
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.conversation import Conversation
from tests.support.chat_models import model_with
from tests.support.clients import CLIENTS

TOKENS: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


@dataclass(frozen=True)
class Reads:
    """The inputs a template reads: reasoning under this name, None as the content of a message with
    calls, lists of parts only, arguments as text only. `knows_tools` is False if it has no place
    for tools."""

    reasoning: str = ""
    null: bool = False
    parts: bool = False
    text: bool = False
    knows_tools: bool = True


PLAIN = Reads(knows_tools=False)
THINKS = Reads("reasoning_content")
THINKS_OR_NULL = Reads("reasoning_content", null=True)
PARTS = Reads(parts=True, knows_tools=False)
DEEPSEEK = Reads(null=True, text=True, knows_tools=False)
PUBLISHED = {
    "cohere": PLAIN,
    "cohere2": PLAIN,
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "diffusion_gemma": Reads("reasoning"),
    "gemma": PLAIN,
    "gemma3": PLAIN,
    "gemma4": Reads("reasoning"),
    "glm4moe": THINKS,
    "gptoss": Reads("thinking"),
    "idefics3": PARTS,
    "lfm2": Reads(),
    "lfm2_2_5": Reads("thinking"),
    "lfm2_2_5_vl": Reads("thinking"),
    "llama3": PLAIN,
    "llama3_1": Reads(),
    "llama3_2": Reads(),
    "llava_next": PARTS,
    "muse_glimmer": THINKS_OR_NULL,
    "nemotron_3_5_lightning": THINKS,
    "nemotron_3_nano": THINKS,
    "nemotron_3_super": THINKS,
    "nemotron_3_ultra": THINKS,
    "phi3": PLAIN,
    "phi3_5": PLAIN,
    "qwen2_5": Reads(),
    "qwen2_5_vl": PLAIN,
    "qwen3": THINKS,
    "qwen3_5_think": THINKS_OR_NULL,
    "qwen3_6": THINKS_OR_NULL,
    "qwen3_8": THINKS_OR_NULL,
    "qwen3_instruct_2507": Reads(),
    "qwen3_vl": Reads(),
    "smolvlm": PARTS,
}

ASKED = {"role": "user", "content": "Where is the castle?"}
BRIEF = {"role": "system", "content": "Be brief."}
FOUND = {
    "role": "tool",
    "tool_call_id": "abcdefghi",
    "name": "find_castle",
    "content": "on the hill",
}
THANKS = {"role": "user", "content": "Thanks. Which hill?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "find_castle",
        "description": "Finds <a> castle & a 'way'.",
        "parameters": {
            "type": "object",
            "properties": {
                "kingdom": {"type": "string", "description": "Its kingdom"},
                "miles": {"type": "integer"},
            },
            "required": ["kingdom"],
        },
    },
}
SENT = '{"kingdom": "North", "miles": 3}'


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any = SENT, number: str = "abcdefghi") -> dict[str, Any]:
    return {
        "id": number,
        "type": "function",
        "function": {"name": "find_castle", "arguments": arguments},
    }


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@dataclass(frozen=True)
class Talk:
    """A conversation, and the other arguments of a template."""

    messages: list[dict[str, Any]]
    has_tools: bool = False
    asks: bool = True
    variables: dict[str, Any] | None = None


def with_tools(*messages: dict[str, Any]) -> Talk:
    return Talk([ASKED, *messages], has_tools=True)


TALKS = {
    "a question": Talk([ASKED]),
    "a system": Talk([BRIEF, ASKED]),
    "three turns": Talk([ASKED, said("On the hill."), THANKS]),
    "a system and five turns": Talk(
        [BRIEF, ASKED, said("On the hill."), THANKS, said("The high one."), ASKED]
    ),
    "an answer": Talk([ASKED, said("On the hill.")], asks=False),
    "the beginning of an answer": Talk([ASKED, said("On the")]),
    "parts": Talk([{**ASKED, "content": parts("Where is", " the castle?")}]),
    "parts of a system": Talk([{**BRIEF, "content": parts("Be brief.")}, ASKED]),
    "other letters and marks": Talk(
        [{**ASKED, "content": "Où est le château? 城 <b>&amp;</b> 'x' \"y\" {{ z }}"}]
    ),
    "white space": Talk([{**ASKED, "content": "  Where?\n\n"}, said("\n There. "), THANKS]),
    "a developer": Talk([{**BRIEF, "role": "developer"}, ASKED]),
    "a variable": Talk([ASKED], variables={"enable_thinking": False}),
    "a thought": Talk([ASKED, said("On the hill.", reasoning_content="Hills are high."), THANKS]),
    "a tool": with_tools(),
    "a system and a tool": Talk([BRIEF, ASKED], has_tools=True),
    "a call": with_tools(said("", tool_calls=[call()]), FOUND),
    "a call and null": with_tools(said(None, tool_calls=[call()]), FOUND),
    "a call with an object": with_tools(
        said("", tool_calls=[call({"kingdom": "North", "miles": 3})]), FOUND
    ),
    "a call with nothing": with_tools(said("", tool_calls=[call("{}")]), FOUND),
    "a call with objects inside": with_tools(
        said("", tool_calls=[call('{"kingdom": "Nörth", "miles": {"x": [1, 2.5, null, true]}}')]),
        FOUND,
    ),
    "a call and text, then more": with_tools(
        said("I look.", tool_calls=[call()]), FOUND, said("On the hill."), THANKS
    ),
    "two calls": with_tools(
        said("", tool_calls=[call(), call('{"kingdom": "South"}', "ABCDEFGHI")]),
        FOUND,
        {**FOUND, "tool_call_id": "ABCDEFGHI"},
    ),
    "a call that was cut off": with_tools(
        said("", tool_calls=[call('{"kingdom": "Nor')]), FOUND, THANKS
    ),
    "a call with null": with_tools(said("", tool_calls=[call(None)]), FOUND, THANKS),
    "a thought and a call": with_tools(
        said("", reasoning="Hills are high.", tool_calls=[call()]), FOUND
    ),
    "a thought with another name": with_tools(
        said("", thinking="Hills are high.", tool_calls=[call()]), FOUND
    ),
    "a thought, text and a call": with_tools(
        said("I look.", reasoning_content="Hills are high.", tool_calls=[call()]), FOUND
    ),
}


def expected(source: str, reads: Reads, talk: Talk) -> str | None:
    """Transformers' prompt for a conversation in the form that a template reads; None if it refuses
    each form."""
    for empties, thinks in ((False, True), (True, True), (True, False)):
        messages = [
            adapted(message, source, reads, empties, thinks)
            for message in copy.deepcopy(talk.messages)
        ]
        try:
            rendered = render_jinja_template(
                [messages],
                tools=[TOOL] if talk.has_tools else None,
                chat_template=source,
                add_generation_prompt=talk.asks,
                **TOKENS,
                **(talk.variables or {}),
            )
        except Exception:
            continue
        return str(rendered[0][0])
    return None


def adapted(
    message: dict[str, Any], source: str, reads: Reads, empties: bool, thinks: bool
) -> dict[str, Any]:
    if message["role"] == "developer" and "developer" not in source:
        message["role"] = "system"
    if isinstance(message["content"], list):
        message["content"] = "".join(part["text"] for part in message["content"])
    message["content"] = message["content"] or (
        "" if "tool_calls" not in message or not reads.null else None
    )
    if reads.parts:
        message["content"] = parts(*filter(None, [message["content"]]))
    thoughts = [message.pop(name) for name in REASONING_NAMES if name in message]
    if thoughts and thinks and reads.reasoning:
        message[reads.reasoning] = thoughts[0]
    for one in message.get("tool_calls", ()):
        one["function"]["arguments"] = adapted_arguments(
            one["function"]["arguments"], reads, empties
        )
    return message


def adapted_arguments(arguments: Any, reads: Reads, empties: bool) -> Any:
    if reads.text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    except ValueError:
        return {} if empties else arguments


def prompt_of(model: ChatModel, talk: Talk) -> str | None:
    """The prompt; None if it is refused."""
    tools = json.dumps([TOOL]) if talk.has_tools else ""
    variables = json.dumps(talk.variables) if talk.variables else ""
    try:
        return model.render(Conversation(json.dumps(talk.messages), tools, variables, talk.asks))[0]
    except EdgeShardError:
        return None


def published(name: str) -> str:
    found = sorted(CLIENTS.glob(f"lib/python3*/site-packages/trl/chat_templates/{name}.jinja"))
    if not found:
        pytest.skip("run `make clients` first")
    return found[0].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * bool(n % 4))
        for n, name in enumerate(PUBLISHED)
    ],
)
def test_prompts_are_those_of_transformers(name: str) -> None:
    source, reads = published(name), PUBLISHED[name]
    model = model_with({**TOKENS, "chat_template": source})
    for what, talk in TALKS.items():
        wanted = None if talk.has_tools and not reads.knows_tools else expected(source, reads, talk)
        assert prompt_of(model, talk) == wanted, what


def test_there_are_as_many_as_the_documents_name() -> None:
    assert (len(PUBLISHED), len(TALKS)) == (34, 27)
