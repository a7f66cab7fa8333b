"""A template gets messages in the form that it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeshard.chat.template_forms import REASONING_NAMES
from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError
from edgeshard.domain.requests.conversation import Conversation
from tests.support.chat_models import model_with

THOUGHT = "THE HILL IS IN THE NORTH"
SENT = '{"kingdom":"Nörth",  "n": 1e0}'
EACH = "{% for message in messages %}"
CALLS = EACH + "{% for call in message.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"


def rendered(template: str, *messages: dict[str, Any]) -> str:
    return model_with({}, template).render(Conversation(json.dumps(messages)))[0]


def called(content: str | None = None, arguments: str = SENT, **more: Any) -> dict[str, Any]:
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "find", "arguments": arguments},
    }
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


@pytest.mark.parametrize("sent", REASONING_NAMES)
@pytest.mark.parametrize(
    "read",
    [
        "message.{}",
        "message['{}']",
        "message.get('{}', '')",
        "message['{}'] if '{}' in message",
        "namespace(x=message.{}).x",
    ],
)
@pytest.mark.parametrize("name", REASONING_NAMES)
def test_reasoning_has_the_name_that_a_template_reads(name: str, read: str, sent: str) -> None:
    template = EACH + "{{ " + read.replace("{}", name) + " }}{% endfor %}"
    answer = {"role": "assistant", "content": "On the hill.", sent: THOUGHT}
    assert THOUGHT in rendered(template, {"role": "user", "content": "x"}, answer)
    assert THOUGHT in rendered(template, called(**{sent: THOUGHT}))


def test_a_template_that_goes_through_names_gets_one_of_them() -> None:
    names = "{% for name in ['thinking', 'reasoning_content'] %}{{ message[name] }}{% endfor %}"
    answer = {"role": "assistant", "content": "x", "reasoning": THOUGHT}
    assert rendered(EACH + names + "{% endfor %}", answer) == THOUGHT


@pytest.mark.parametrize("sent", REASONING_NAMES)
def test_reasoning_is_a_part_of_the_content_if_the_template_reads_it_there(sent: str) -> None:
    part = (
        "{% if part.type == 'thinking' %}[{{ part['thinking'] }}]{% else %}{{ part.text }}{% "
        "endif %}"
    )
    either = (
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in "
        "message.content %}"
    )
    template = EACH + either + part + "{% endfor %}{% endif %}{% endfor %}"
    answer = {"role": "assistant", "content": "On the hill.", sent: THOUGHT}
    assert (
        rendered(template, {"role": "user", "content": "Where?"}, answer)
        == f"Where?[{THOUGHT}]On the hill."
    )
    assert rendered(template, called(**{sent: THOUGHT})) == f"[{THOUGHT}]"


def test_reasoning_keeps_its_name_if_the_template_reads_it_and_is_given_once() -> None:
    both = (
        EACH
        + "{% for name in message %}{{ name }} {% endfor %}{# #}"
        + "{{ message.thinking ~ message.reasoning }}"
    )
    answer = {"role": "assistant", "content": "x", "reasoning": THOUGHT}
    assert rendered(both + "{% endfor %}", answer).count("reasoning") == 1
    none = EACH + "{{ message | tojson }}{% endfor %}"
    assert json.loads(rendered(none, answer)) == answer, (
        "a template that reads none gets what was sent"
    )
    twice = rendered(
        both + "{% endfor %}", {**answer, "thinking": THOUGHT, "reasoning_content": THOUGHT}
    )
    assert twice.count(THOUGHT) == 1


@pytest.mark.parametrize(
    "joined",
    [
        "{{ '<' + call.function.arguments + '>' }}",
        "{{ '<' ~ call.function.arguments ~ '>' }}",
        "<{{ call.function.arguments }}>",
        "{{ '<%s>' | format(call.function.arguments) }}",
        "{{ ['<', call.function.arguments, '>'] | join }}",
        "{% set text = call['function']['arguments'] | string %}{{ '<' + text + '>' }}",
        "{{ '<' + call.function.arguments.strip() + '>' }}",
    ],
)
def test_a_template_that_joins_arguments_gets_the_text_that_was_sent(joined: str) -> None:
    assert rendered(CALLS + joined + END, called()) == f"<{SENT}>"


@pytest.mark.parametrize(
    ("walked", "expected"),
    [
        (
            "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
            "kingdom=Nörth;n=1.0;",
        ),
        (
            "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
            "kingdom=Nörth;n=1.0;",
        ),
        ("{% for k, v in call.function.arguments | dictsort %}{{ k }}{% endfor %}", "kingdomn"),
        ("{% for k in call.function.arguments %}{{ k }}{% endfor %}", "kingdomn"),
        ("{{ call.function.arguments.kingdom }}", "Nörth"),
        ("{{ call.function.arguments | tojson }}", '{"kingdom": "Nörth", "n": 1.0}'),
        (
            "{{ call.function.arguments if call.function.arguments is string else 'object' }}",
            "object",
        ),
        ("{{ 'object' if call.function.arguments is mapping }}", "object"),
    ],
)
def test_a_template_that_walks_through_arguments_gets_an_object(walked: str, expected: str) -> None:
    assert rendered(CALLS + walked + END, called()) == expected


@pytest.mark.parametrize(
    "test",
    [
        "message.content is none",
        "message['content'] is none",
        "not message.content is not none",
        "message.get('content') is none",
        "message.content == none",
        "content is none",
        "body is none",
    ],
)
@pytest.mark.parametrize("content", [None, ""])
def test_a_template_that_tests_for_none_gets_it_with_calls(test: str, content: str | None) -> None:
    sets = "{% set content = message.content %}{% set body = message.content %}"
    template = EACH + sets + "{% if " + test + " %}calls{% else %}text{% endif %}{% endfor %}"
    assert rendered(template, called(content)) == "calls"
    assert rendered(template, called("I look.")) == "text"
    assert rendered(template, {"role": "user", "content": ""}) == "text"


def test_no_other_template_gets_none() -> None:
    assert (
        rendered(EACH + "{{ message.content }}{{ tools is none }}{% endfor %}", called()) == "True"
    )
    mixed = (
        EACH + "{% if message.content is none %}-{% endif %}{{ message.content + '!' }}{% endfor %}"
    )
    assert rendered(mixed, called()) == "!", "one that tests for it and cannot bear it"


PARTS = (
    EACH + "{% for part in message.content %}{{ part.type and part.text }}{% endfor %}{% endfor %}"
)
"""As in templates of models that see: a text is found in no other form."""


def test_a_template_that_reads_parts_only_gets_parts() -> None:
    talk = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "Where?"},
        called(""),
    ]
    assert rendered(PARTS, *talk) == "Be brief. Where?"
    selects = (
        EACH
        + "{% for x in message.content | selectattr('type', 'equalto', 'text') %}{{ x.text }}{% "
        "endfor %}"
    )
    assert rendered(selects + "{% endfor %}", *talk) == "Be brief. Where?"
    system = "{{ messages[0].content[0].text + messages[1].content[0].text }}"
    assert rendered(system, *talk) == "Be brief. Where?", "one that fails on text"
    either = (
        EACH
        + "{% if message.content is string %}{{ message.content }}{% else %}parts{% endif %}{% "
        "endfor %}"
    )
    assert rendered(either, *talk) == "Be brief. Where?"


def test_reasoning_that_a_template_refuses_is_left_out() -> None:
    refuses = (
        "{% if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}"
    )
    template = EACH + refuses + "{{ message.thinking }}{{ message.content }}{% endfor %}"
    assert rendered(template, called(reasoning=THOUGHT)) == THOUGHT
    assert rendered(template, called("I look.", reasoning=THOUGHT)) == "I look."


def test_the_first_failure_is_the_one_that_is_raised() -> None:
    with pytest.raises(UnsupportedModelError, match="'objects' is undefined"):
        rendered(
            CALLS + "{{ objects.x if call.function.arguments is mapping else texts.x }}" + END,
            called(),
        )
    with pytest.raises(InvalidArgumentError, match="roles alternate"):
        rendered("{{ raise_exception('roles alternate') }}", called())
    with pytest.raises(UnsupportedModelError, match="is not a valid template"):
        rendered("{% for %}", called())


def test_half_a_surrogate_pair_of_a_call_is_replaced() -> None:
    template = CALLS + "{{ call.function.name ~ call.function.arguments }}{{ call | tojson }}" + END
    for arguments in ('{"a": "\\ud800"}', "\ud800"):
        assert "?" in rendered(template, called(arguments=arguments))


CUT = '{"kingdom": "Nor'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ call.function.arguments }}", CUT),
        ("{{ '' + call.function.arguments }}", CUT),
        ("{{ call.function.arguments | tojson }}", json.dumps(CUT)),
        ("{{ call.function.arguments if call.function.arguments is string else 'object' }}", CUT),
        ("({% for k, v in call.function.arguments | items %}{{ k }}{% endfor %})", "()"),
        ("({% for k, v in call.function.arguments.items() %}{{ k }}{% endfor %})", "()"),
        (
            "{% if call.function.arguments is not mapping %}{{ raise_exception('no object') }}{% "
            "endif %}",
            "",
        ),
    ],
)
def test_arguments_that_were_cut_off_are_text_or_an_empty_object(
    template: str, expected: str
) -> None:
    assert rendered(CALLS + template + END, called(arguments=CUT)) == expected
    walks = "{% for k, v in call.function.arguments | items %}{{ k }};{% endfor %}"
    assert rendered(CALLS + walks + END, called(), called(arguments=CUT)) == "kingdom;n;"
