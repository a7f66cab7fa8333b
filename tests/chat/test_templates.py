"""Templates give the same result as transformers, and errors and refusals are named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from edgeshard.chat.messages import parse_messages, parse_tools, parse_variables
from edgeshard.chat.templates import SOURCE_LIMIT_BYTES, ChatTemplate
from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError

TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "é <b>", "parameters": {"type": "object"}},
}
CALL = {
    "id": "123456789",
    "type": "function",
    "function": {"name": "find", "arguments": '{"what": "é"}'},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Find "}, {"type": "text", "text": "<it> & 'that'"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "123456789", "content": "here"},
    {"role": "assistant", "content": "Here.", "reasoning_content": "easy"},
    {"role": "user", "content": "  Thanks  "},
]
TEMPLATES = {
    "tags": """{{ bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' ~ \
{"name": call.function.name, "arguments": call.function.arguments} | tojson }}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "macros, loop controls and a namespace": """\
{% macro said(m) %}[{{ m.role | upper }}] {{ m.content }}{% endmacro %}
{% set seen = namespace(users=0) %}
{% for m in messages %}
{% if m.role == 'tool' %}{% continue %}{% endif %}
{% if m.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}
{{ said(m) }}{{ loop.index0 }}
{% if seen.users > 5 %}{% break %}{% endif %}
{% endfor %}
{{ seen.users }}{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content }}""",
    "tools and a training mark": """\
{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}
{{ messages[0].content.split(' ')[0] }}{{ custom if custom is defined }}{{ eos_token }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_prompt_is_that_of_transformers(name: str, begins: bool, tools: list[Any]) -> None:
    messages = parse_messages(json.dumps(TALK))
    ours = ChatTemplate(TEMPLATES[name], TOKENS).render(messages, tools, begins, {"custom": "x"})
    theirs: Any = render_jinja_template(
        [messages],
        tools=tools or None,
        chat_template=TEMPLATES[name],
        add_generation_prompt=begins,
        custom="x",
        **TOKENS,
    )
    assert ours == theirs[0][0]


def test_the_date_is_there() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]).startswith("2")


@pytest.mark.parametrize(
    ("source", "reason", "kind"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "TEMPLATE_REFUSES", InvalidArgumentError),
        ("{% for %}", "BAD_TEMPLATE", UnsupportedModelError),
        ("{{ messages.x.y }}", "BAD_TEMPLATE", UnsupportedModelError),
        ("{{ messages.append(1) }}", "BAD_TEMPLATE", UnsupportedModelError),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "BAD_TEMPLATE", UnsupportedModelError),
        ("{% include 'x' %}", "BAD_TEMPLATE", UnsupportedModelError),
        ("x" * (SOURCE_LIMIT_BYTES + 1), "BAD_TEMPLATE", UnsupportedModelError),
        (
            "{% for i in range(99) %}{{ 'x' * 99999 }}{% endfor %}",
            "PROMPT_TOO_LONG",
            InvalidArgumentError,
        ),
    ],
)
def test_a_template_that_refuses_or_breaks_says_so(
    source: str, reason: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert getattr(caught.value, "reason", "") == reason and type(caught.value) is kind


def test_messages_take_the_form_that_templates_expect() -> None:
    messages = parse_messages(json.dumps(TALK))
    assert messages[1]["content"] == "Find <it> & 'that'" and messages[2]["content"] == ""
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"what": "é"}


BAD = {
    "messages": ["{", "{}", "[]", "null", '["x"' + "," * (1 << 22) + "]"],
    "messages[0]": ["[1]"],
    "messages[0].role": ['[{"role": [], "content": ""}]', '[{"role": "x", "content": '
                                                          '""}]', '[{"content": ""}]'],
    "messages[0].content": ['[{"role": "user"}]', '[{"role": "user", "content": 1}]',
                            '[{"role": "user", "content": "\\ud800"}]'],
    "messages[0].content[0].type": ['[{"role": "user", "content": [{"type": "image_url"}]}]',
                                    '[{"role": "user", "content": [1]}]'],
    "messages[0].name": ['[{"role": "user", "content": "", "name": 1}]'],
}  # fmt: skip
PAST_CALLS: dict[str, tuple[Any, list[Any], str]] = {
    "cut off": ([{"function": {"name": "x", "arguments": '{"a": '}}], ['{"a": '], ""),
    "null": ([{"id": None, "type": None, "function": {"name": "x", "arguments": None}}], [{}], ""),
    "null as text": ([{"function": {"name": "x", "arguments": "null"}}], [{}], ""),
    "a list": ([{"function": {"name": "x", "arguments": "[1]"}}], ["[1]"], ""),
    "a value": ([{"function": {"name": "x", "arguments": [1]}}], ["[1]"], ""),
    "another tool": (
        [{"type": "custom", "custom": {"name": "x", "input": "+a"}}],
        [{"input": "+a"}],
        "",
    ),
    "no call": (1, [], "1"),
    "no name": ([{"function": {}}], [], '{"function": {}}'),
}
"""Calls of a message, the arguments that a template gets of them, and the text for those that are
none."""


@pytest.mark.parametrize("name", PAST_CALLS)
def test_a_call_that_a_model_wrote_wrongly_is_passed_on(name: str) -> None:
    calls, arguments, text = PAST_CALLS[name]
    (message,) = parse_messages(
        json.dumps([{"role": "assistant", "content": None, "tool_calls": calls}])
    )
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == arguments
    assert message["content"] == text
    assert all(call["type"] == "function" and "id" not in call for call in message["tool_calls"])


def test_the_older_form_of_a_call_becomes_the_newer() -> None:
    older = [
        {"role": "assistant", "function_call": {"name": "x", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "x", "content": "done"},
    ]
    called, result = parse_messages(json.dumps(older))
    assert called["tool_calls"][0]["function"] == {"name": "x", "arguments": {"a": 1}}
    assert result == {"role": "tool", "name": "x", "content": "done"}


def test_nulls_and_fields_of_other_servers_are_ignored() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a", "annotations": None}, {"type": "audio"}],
    }
    others: dict[str, Any] = {
        "annotations": [],
        "audio": None,
        "tool_calls": None,
        "reasoning": {"effort": "low"},
        "name": None,
    }
    assert parse_messages(json.dumps([{**message, **others}])) == [
        {"role": "assistant", "content": "a"}
    ]
    tool = {
        "type": None,
        "strict": None,
        "function": {"name": "x", "description": None, "parameters": None},
    }
    assert parse_tools(json.dumps([tool])) == [{"function": {"name": "x"}}]


@pytest.mark.parametrize(
    ("field", "text"), [(field, text) for field, texts in BAD.items() for text in texts]
)
def test_what_is_no_message_is_refused_by_name(field: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_messages(text)
    assert caught.value.field == field


def test_what_is_no_tool_or_variable_is_refused_by_name() -> None:
    bad = {
        "tools": "1", "tools[0]": "[1]", "tools[0].function.name": '[{"function": {}}]',
        "tools[0].function.parameters": '[{"function": {"name": "x", "parameters": 1}}]',
    }  # fmt: skip
    for field, text in bad.items():
        with pytest.raises(InvalidArgumentError) as caught:
            parse_tools(text)
        assert caught.value.field == field
    for text in ("[]", '{"messages": 1}'):
        with pytest.raises(InvalidArgumentError):
            parse_variables(text)
    assert parse_tools("") == [] and parse_variables("") == {}
