"""The chat templates for models that have none: each form's prompt, and the calls of tools in
ChatML."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeshard.chat.chat_model import ChatModel
from edgeshard.chat.templates import ChatTemplate
from edgeshard.domain.requests.conversation import Conversation, ToolFormat
from edgeshard.importing.gguf_tokenizer import TEMPLATES, KnownTemplate, template_for
from tests.support.chat_models import DEMO_MODEL

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]
PROMPTS = {
    "ChatML": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "Llama 3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "Gemma 3": (
        "<s><start_of_turn>user\nBe "
        "brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    ),
    "Phi 3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi<|end|>\n"
    "<|user|>\nBye<|end|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("known", TEMPLATES, ids=lambda known: known.name)
def test_a_prompt_has_the_marks_of_its_form(known: KnownTemplate) -> None:
    template = ChatTemplate(known.text, {"bos_token": "<s>"})
    assert template.render(MESSAGES) == PROMPTS[known.name]
    assert template_for(known.markers) is known
    assert template_for(["".join(known.markers)]) is known
    assert all(
        marker in known.text or marker.strip("<|>") in ("user", "assistant")
        for marker in known.markers
    )


def test_an_unknown_form_has_none() -> None:
    assert template_for([""]) is None and template_for(["<|im_start|>"]) is None


def test_chatml_calls_tools() -> None:
    known = template_for(["<|im_start|>", "<|im_end|>"])
    assert known is not None
    files = {
        "tokenizer.json": (DEMO_MODEL / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": json.dumps({"chat_template": known.text}).encode(),
    }
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    messages = [
        MESSAGES[1],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
    ]
    text, form = ChatModel.from_files(files).render(
        Conversation(json.dumps(messages), json.dumps([tool]))
    )
    assert form.tools is not ToolFormat.NONE
    assert '"name": "find"' in text.split("</tools>")[0]
    assert '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in text
    assert text.endswith(
        "<tool_response>\nfound\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
