"""The content of a model's small files about chats."""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from edgeshard.chat.chat_model import ChatModel
from edgeshard.chat.parsing import AnswerParser
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError
from edgeshard.domain.requests.conversation import (
    AnswerFormat,
    Conversation,
    GenerationDefaults,
    Marker,
    ToolCall,
    ToolFormat,
)
from tests.support.chat_models import model_with

DEMO = Path(__file__).parents[2] / "edgeshard" / "demo_model"
HELLO = Conversation(json.dumps([{"role": "developer", "content": "Hello"}]))
TOOLS = json.dumps([{"type": "function", "function": {"name": "find"}}])
TAGS: dict[str, Any] = {"call_begin": "<tool_call>", "call_end": "</tool_call>"}


def rendered(model: ChatModel, conversation: Conversation = HELLO) -> str:
    return model.render(conversation)[0]


def test_the_file_of_its_own_counts_then_the_settings_of_the_tokenizer() -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    assert rendered(model_with({"chat_template": "inside"})) == "inside"
    assert rendered(model_with({"chat_template": "inside"}, "beside")) == "beside"
    both = model_with({"chat_template": named})
    assert rendered(both) == "plain"
    assert rendered(both, Conversation(HELLO.messages, TOOLS)) == "find"


def test_special_tokens_are_named_and_become_their_ids() -> None:
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "add_bos_token": True,
    }
    model = model_with(settings, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    tokens = model.tokenize(rendered(model), special=False)
    assert (tokens[0], tokens[-1]) == (1, 2) and model.detokenize(tokens) == "<s>Hello</s>"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    assert rendered(model_with({}, "{{ messages[0].role }}")) == "system"
    assert rendered(model_with({}, "{{ messages[0].role }}{# developer #}")) == "developer"


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        ("x", (), AnswerFormat()),
        ("{{ tools }}", (), AnswerFormat(ToolFormat.BARE)),
        ("{{ tools }}<tool_call>", (), AnswerFormat(ToolFormat.TAGGED, **TAGS)),
        ("{{ tools }}<tool_call>", ("<tool_call>",),
         AnswerFormat(ToolFormat.TAGGED, markers=(Marker(4096, "<tool_call>"),), **TAGS)),
        ("{{ tools }}{% set begin = '<minimax:tool_call>' %}{# </think> #}<think>\n", (),
         AnswerFormat(ToolFormat.TAGGED, "<think>", "</think>", True,
                      call_begin="<minimax:tool_call>", call_end="</minimax:tool_call>")),
        ("{{ tools }}{# <TOOLCALL> #}", (),
         AnswerFormat(ToolFormat.TAGGED, call_begin="<TOOLCALL>", call_end="</TOOLCALL>")),
        ("{{ tools }}{# <|tool_calls_section_begin|> #}", ("<|tool_call_begin|>",),
         AnswerFormat(ToolFormat.TAGGED, markers=(Marker(4096, "<|tool_call_begin|>"),),
                      call_begin="<|tool_calls_section_begin|>",
                      call_end="<|tool_calls_section_end|>")),
        ("{{ tools }}{# <|tool_call>call: <channel|> #}",
         ("<|channel>", "<channel|>", "<|tool_call>", '<|"|>'),
         AnswerFormat(ToolFormat.TAGGED, "<|channel>thought\n", "<channel|>", False,
                      (Marker(4096, "<|channel>"), Marker(4097, "<channel|>"),
                       Marker(4098, "<|tool_call>"), Marker(4099, '<|"|>')),
                      "<|tool_call>", "<tool_call|>")),
        ("{{ tools }}", ("<|tool_calls_section_begin|>", "<tool_call>"),
         AnswerFormat(ToolFormat.TAGGED, markers=(Marker(4096, "<|tool_calls_section_begin|>"),),
                      call_begin="<|tool_calls_section_begin|>",
                      call_end="<|tool_calls_section_end|>")),
        ("{{ tools }}", ("<tool_call>",), AnswerFormat(ToolFormat.BARE)),
        ("{{ tools }}{# <seed:tool_call> #}", (),
         AnswerFormat(ToolFormat.TAGGED,
                      call_begin="<seed:tool_call>", call_end="</seed:tool_call>")),
        ("{{ tools }}<|tool_list_start|>", ("<|tool_call_start|>", "<|tool_call_end|>"),
         AnswerFormat(ToolFormat.TAGGED,
                      markers=(Marker(4096, "<|tool_call_start|>"),
                               Marker(4097, "<|tool_call_end|>")),
                      call_begin="<|tool_call_start|>", call_end="<|tool_call_end|>")),
        ("{{ tools }}[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]"),
         AnswerFormat(ToolFormat.LISTED,
                      markers=(Marker(4096, "[TOOL_CALLS]"), Marker(4097, "[ARGS]")))),
        ("{{ tools }}<|start|>assistant{# <|channel|> #}", ("<|channel|>", "<|call|>"),
         AnswerFormat(ToolFormat.CHANNELS,
                      markers=(Marker(4096, "<|channel|>"), Marker(4097, "<|call|>")))),
        ("{{ messages[0].content.split('</think>')[-1] }}", (),
         AnswerFormat(reasoning_begin="<think>", reasoning_end="</think>")),
        ("{# </think> #}<think>\n", (),
         AnswerFormat(ToolFormat.NONE, "<think>", "</think>", in_reasoning=True)),
        ("<think>\n\n</think>\n\n", (), AnswerFormat(ToolFormat.NONE, "<think>", "</think>")),
        ("[THINK]{# [/THINK] #}", ("[THINK]", "[/THINK]"),
         AnswerFormat(ToolFormat.NONE, "[THINK]", "[/THINK]", True, (Marker(4096, "[THINK]"),
         Marker(4097, "[/THINK]")))),
    ],
)  # fmt: skip
def test_the_template_says_how_answers_are_to_be_read(
    template: str, special: tuple[str, ...], expected: AnswerFormat
) -> None:
    assert model_with({}, template, special).render(HELLO)[1] == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eos_token_id": 2}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20},
         {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "repetition_penalty": 1.1},
         {"temperature": 1.0, "repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_generation_config(
    values: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert model_with(**values).defaults == GenerationDefaults(**expected)
    assert model_with(**values).defaults.given() == expected


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"},
        {"top_p": 7},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": True},
        {"top_k": math.inf},
        {"temperature": math.nan},
        {"temperature": 10**400},
    ],
)
def test_defaults_that_no_request_may_have_are_left_out(values: dict[str, Any]) -> None:
    assert model_with(**values, repetition_penalty=1.25).defaults == GenerationDefaults(
        repetition_penalty=1.25
    )


def test_what_is_missing_is_said_with_what_to_do() -> None:
    with pytest.raises(
        FailedPreconditionError, match=r"put a chat_template\.jinja into its directory"
    ) as caught:
        model_with().render(HELLO)
    assert caught.value.reason == "NO_CHAT_TEMPLATE"
    with pytest.raises(FailedPreconditionError) as caught:
        ChatModel.from_files({})
    assert caught.value.reason == "NO_TOKENIZER"
    with pytest.raises(InvalidArgumentError) as refused:
        model_with({}, "x").render(Conversation(HELLO.messages, TOOLS))
    assert (refused.value.field, refused.value.reason) == ("tools", "NO_TOOLS")
    for settings in ({"chat_template": 7}, {"chat_template": [{"name": "x"}]}):
        with pytest.raises(InvalidArgumentError, match="chat_template"):
            model_with(settings)


def test_the_demo_models_template_knows_tools() -> None:
    model = model_with({}, (DEMO / "chat_template.jinja").read_text(encoding="utf-8"))
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Once"},
        {"role": "user", "content": "there lived"},
    ]
    assert rendered(model, Conversation(json.dumps(talk))) == "Once\n\nthere lived"
    call = {"function": {"name": "find", "arguments": '{"what": "<king>"}'}}
    talk += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a king"},
    ]
    tools = [
        {"type": "function", "function": {"name": "find", "description": "looks for somebody"}}
    ]
    text, answer_format = model.render(Conversation(json.dumps(talk), json.dumps(tools)))
    called = '<tool_call>{"name": "find", "arguments": {"what": "<king>"}}</tool_call>'
    assert text == f"find: looks for somebody\n\nOnce\n\nthere lived\n\n{called}\n\na king"
    assert answer_format.tools is ToolFormat.TAGGED
    ids = count()
    parser = AnswerParser(answer_format, tools, lambda: f"id{next(ids)}")
    deltas = [*parser.feed(called), *parser.finish()]
    assert deltas == [ToolCall(0, "id0", "find", '{"what": "<king>"}')], (
        "it is read as it is written"
    )
