"""Answers taken apart: the same however they are cut, and no part of a marker is ever content."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeshard.chat.literals import strict_json
from edgeshard.chat.parsing import AnswerParser
from edgeshard.domain.requests.conversation import (
    AnswerDelta,
    AnswerFormat,
    ContentDelta,
    Marker,
    ReasoningDelta,
    ToolCall,
    ToolFormat,
)

TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {"properties": {
        "what": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}},
    {"name": "set", "parameters": {"properties": {
        "text": {"type": ["string", "null"]},
        "count": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "on": {"type": "boolean"}, "many": {"type": "array"}}}},
]  # fmt: skip
THINK: dict[str, Any] = {"reasoning_begin": "<think>", "reasoning_end": "</think>"}


def tagged(begin: str, end: str, **more: Any) -> AnswerFormat:
    return AnswerFormat(ToolFormat.TAGGED, call_begin=begin, call_end=end, **more)


FORMATS = {
    "tagged": tagged("<tool_call>", "</tool_call>", **THINK),
    "thinking": tagged("<tool_call>", "</tool_call>", in_reasoning=True, **THINK),
    "minimax": tagged("<minimax:tool_call>", "</minimax:tool_call>", in_reasoning=True, **THINK),
    "nemotron": tagged("<TOOLCALL>", "</TOOLCALL>", **THINK),
    "kimi": tagged("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", **THINK),
    "gemma": tagged(
        "<|tool_call>",
        "<tool_call|>",
        reasoning_begin="<|channel>thought\n",
        reasoning_end="<channel|>",
    ),
    "lfm": tagged("<|tool_call_start|>", "<|tool_call_end|>"),
    "cohere": tagged("<|START_ACTION|>", "<|END_ACTION|>"),
    "listed": AnswerFormat(ToolFormat.LISTED),
    "channels": AnswerFormat(ToolFormat.CHANNELS),
    "bare": AnswerFormat(ToolFormat.BARE, **THINK),
    "none": AnswerFormat(),
}
FIND = '{"name": "find", "arguments": {"what": "7"}}'
ASKED = [("find", {"what": "7"})]
# Format, text, content, reasoning, calls.
CASES: list[tuple[str, str, str, str, list[tuple[Any, ...]]]] = [
    ("tagged", "plain text", "plain text", "", []),
    ("tagged", "a < b <tool", "a < b <tool", "", []),
    ("tagged", "  \n", "  \n", "", []),
    ("tagged", "", "", "", []),
    ("tagged", f"<tool_call>\n{FIND}\n</tool_call>", "", "", ASKED),
    ("tagged", f"Yes.\n<tool_call>{FIND}</tool_call>\n<tool_call>{FIND}</tool_call> "
               "Done.", "Yes.\nDone.", "",
     ASKED * 2),
    ("tagged", f"<tool_call>{FIND}", "", "", ASKED),
    ("tagged", "<tool_call>{bad}</tool_call> so", "<tool_call>{bad}</tool_call> so", "", []),
    ("tagged", "<tool_call>{bad", "<tool_call>{bad", "", []),
    ("tagged", " <tool_call>{bad", " <tool_call>{bad", "", []),
    ("tagged", f" <tool_call>{FIND}", "", "", ASKED),
    ("tagged", "<tool_call>\n<function=find>\n<parameter=what>\n7\n</parameter>\n</function>\n"
     "</tool_call>", "", "", ASKED),
    ("tagged", "<tool_call><function=go><parameter=far>\n7\n</parameter></function></tool_call>",
     "", "", [("go", {"far": 7})]),
    ("tagged", "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
     "", "", ASKED),
    ("tagged", "<tool_call>go</tool_call>", "", "", [("go", {})]),
    ("tagged", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", "", []),
    ("tagged", "<think>hm < </th\n</think>\n\nYes", "Yes", "hm < </th\n", []),
    ("tagged", "\n<think>hm</think>" + f"<tool_call>{FIND}</tool_call>", "", "hm", ASKED),
    ("tagged", "<think>never ends", "", "never ends", []),
    ("tagged", "see <think>", "see <think>", "", []),
    ("tagged", "<thin", "<thin", "", []),
    ("thinking", "hm</think>Yes", "Yes", "hm", []),
    ("thinking", "hm", "", "hm", []),
    ("tagged", "<tool_call><function=set><parameter=text>7</parameter>"
     "<parameter=count>7</parameter><parameter=on>True</parameter>"
     "<parameter=many>[1, NaN]</parameter></function></tool_call>", "", "",
     [("set", {"text": "7", "count": 7, "on": True, "many": "[1, NaN]"})]),
    ("tagged", "<tool_call>set<arg_key>text</arg_key><arg_value>null</arg_value>"
     "<arg_key>count</arg_key><arg_value>x</arg_value></tool_call>", "", "",
     [("set", {"text": None, "count": "x"})]),
    ("tagged", '<tool_call>{"name": "go", "arguments": {"far": "\\ud800"}}</tool_call>', "", "",
     [("go", {"far": "\ud800"})]),
    ("minimax", 'hm</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="find">\n<parameter '
                'name="what">7</parameter>'
     '\n</invoke>\n<invoke name="go">\n<parameter name="far">[1, '
     '"é"]</parameter>\n</invoke>\n</minimax:tool_call>\n',
     "I look.\n", "hm", [*ASKED, ("go", {"far": [1, "é"]})]),
    ("minimax", '</think><minimax:tool_call><invoke '
                'name="go"></invoke></minimax:tool_call>', "", "", [("go", {})]),
    ("minimax", '</think><minimax:tool_call><invoke '
                'name="go">', '<minimax:tool_call><invoke name="go">', "", []),
    ("minimax", '</think><minimax:tool_call><invoke name="go"></invoke> so</minimax:tool_call>',
     '<minimax:tool_call><invoke name="go"></invoke> so</minimax:tool_call>', "", []),
    ("nemotron", f"<think>hm</think>\n<TOOLCALL>[{FIND}, {FIND}]</TOOLCALL>", "", "hm", ASKED * 2),
    ("kimi", "Yes<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
     '<|tool_call_argument_begin|>{"what": "7"}<|tool_call_end|><|tool_call_begin|>functions.go:1 '
     '<|tool_call_argument_begin|>{}<|tool_call_end|>'
     "<|tool_calls_section_end|>", "Yes", "", [("find", {"what": "7"}, "functions.find:0"),
     ("go", {}, "functions.go:1")]),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>go"
     "<|tool_call_argument_begin|>far<|tool_call_end|><|tool_calls_section_end|>",
     "<|tool_calls_section_begin|><|tool_call_begin|>go"
     "<|tool_call_argument_begin|>far<|tool_call_end|><|tool_calls_section_end|>", "", []),
    ("gemma", "<|channel>thought\nhm\n<channel|>"
     '<|tool_call>call:find{what:<|"|>7<|"|>}<tool_call|>', "", "hm\n", ASKED),
    ("gemma", '<|tool_call>call:go{far:[1,-2.5,<|"|>{a}, "b"<|"|>],by:{<|"|>x '
              'y<|"|>:true,z:null}}<tool_call|>'
     "<|tool_call>call:go{}<tool_call|>", "", "",
     [("go", {"far": [1, -2.5, '{a}, "b"'], "by": {"x y": True, "z": None}}), ("go", {})]),
    ("gemma", "<|tool_call>call:go{far}<tool_call|>",
     "<|tool_call>call:go{far}<tool_call|>", "", []),
    ("gemma", "<|channel>final", "<|channel>final", "", []),
    ("lfm", 'Yes.<|tool_call_start|>[find(what="7"), go(far=[1, 2.5], by={"x": None, \'y\': '
            '(True,)})]'
     "<|tool_call_end|>So.",
     "Yes.So.", "", [*ASKED, ("go", {"far": [1, 2.5], "by": {"x": None, "y": [True]}})]),
    ("lfm", "<|tool_call_start|>[go(far='it\\'s\\n\\u00e9 \\d', by=\"\"\"a \"b\" "
            "\"\"\")]<|tool_call_end|>", "", "",
     [("go", {"far": "it's\né \\d", "by": 'a "b" '})]),
    ("lfm", f"<|tool_call_start|>[{FIND}]<|tool_call_end|>", "", "", ASKED),
    ("lfm", "<|tool_call_start|>[go(7)]<|tool_call_end|>",
     "<|tool_call_start|>[go(7)]<|tool_call_end|>", "", []),
    ("lfm", "<|tool_call_start|>[go(far=NaN)]<|tool_call_end|>",
     "<|tool_call_start|>[go(far=NaN)]<|tool_call_end|>", "", []),
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "find", "parameters": '
               '{"what": "7"}}\n]'
     "<|END_ACTION|>", "", "", ASKED),
    ("listed", f"[TOOL_CALLS] [{FIND}]", "", "", ASKED),
    ("listed", f"Yes [TOOL_CALLS][{FIND}, {FIND}]", "Yes ", "", ASKED * 2),
    ("listed", '[TOOL_CALLS]find[ARGS]{"what": "7"}[TOOL_CALLS]go{"far": '
               '7}', "", "", [*ASKED, ("go", {"far": 7})]),
    ("listed", "\n[TOOL_CALLS]nothing", "\n[TOOL_CALLS]nothing", "", []),
    ("listed", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", "", []),
    ("listed", "[TOOL_", "[TOOL_", "", []),
    ("bare", '{"name": "find", "parameters": {"what": "7"}}', "", "", ASKED),
    ("bare", f" {FIND}; {FIND}", "", "", ASKED * 2),
    ("bare", f"[{FIND}]", "", "", ASKED),
    ("bare", f"<think>hm</think> {FIND}", "", "hm", ASKED),
    ("bare", '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', "", []),
    ("bare", '{"answer": 7}', '{"answer": 7}', "", []),
    ("bare", f"Yes: {FIND}", f"Yes: {FIND}", "", []),
    ("none", f"<think>x</think><tool_call>{FIND}</tool_call>",
     f"<think>x</think><tool_call>{FIND}</tool_call>", "", []),
    ("channels", "<|channel|>analysis<|message|>hm<|end|>"
     "<|start|>assistant<|channel|>final<|message|>Yes<|return|>", "Yes", "hm", []),
    ("channels", "<|channel|>commentary to=functions.find "
                 "<|constrain|>json<|message|>" '{"what": "7"}<|call|>', "", "",
     ASKED),
    ("channels", '<|channel|>commentary to=functions.find<|constrain|>json<|message|>{"what": '
                 '"7"}', "", "", ASKED),
    ("channels", ' to=functions.find<|channel|>commentary<|message|>{"what": '
                 '"7"}<|call|>', "", "", ASKED),
    ("channels", "<|channel|>commentary<|message|>I look.<|end|>", "I look.", "", []),
    ("channels", "no channels at all", "no channels at all", "", []),
    *(
        (form, text.replace("NUMBER", number), text.replace("NUMBER", number), "", [])
        for number in ("NaN", "-Infinity", "1e999", "-1e999")
        for form, text in (
            ("tagged", '<tool_call>{"name": "go", "arguments": {"far": [NUMBER]}}</tool_call>'),
            ("tagged", '<tool_call>{"name": "go", "arguments": "{\\"far\\": NUMBER}"}</tool_call>'),
            ("bare", '{"name": "go", "parameters": {"far": NUMBER}}'),
            ("nemotron", '<TOOLCALL>[{"name": "go", "arguments": {"far": NUMBER}}]</TOOLCALL>'),
            ("listed", '[TOOL_CALLS]go[ARGS]{"far": NUMBER}'),
            ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>go<|tool_call_argument_begin|>"
             '{"far": NUMBER}<|tool_call_end|><|tool_calls_section_end|>'),
            ("gemma", "<|tool_call>call:go{far:NUMBER}<tool_call|>"),
            ("lfm", "<|tool_call_start|>[go(far=NUMBER)]<|tool_call_end|>"),
        )
    ),
    ("tagged", "<tool_call><function=set><parameter=count>1e999</parameter></function></tool_call>",
     "", "", [("set", {"count": "1e999"})]),
]  # fmt: skip
MARKERS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]",
    "<think>", "</think>", "<|channel|>", "<|message|>",
    *(tag for one in FORMATS.values() for tag in (one.call_begin, one.call_end) if tag),
    "<|channel>thought\n", "<channel|>",
)  # fmt: skip


def parsed(form: str, pieces: list[str], tools: list[Any] = TOOLS) -> list[AnswerDelta]:
    ids = count()
    parser = AnswerParser(FORMATS[form], tools, lambda: f"id{next(ids)}")
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def joined(deltas: list[AnswerDelta]) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [delta for delta in deltas if isinstance(delta, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    own = [call.id for call in calls if not call.id.startswith("id")]  # some forms have one
    assert [call.id for call in calls if call.id not in own] == [
        f"id{n}" for n in range(len(calls) - len(own))
    ]
    return (
        "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        [
            (call.name, strict_json(call.arguments), *([call.id] if call.id in own else []))
            for call in calls
        ],
    )


@pytest.mark.parametrize(("form", "text", "content", "reasoning", "calls"), CASES)
def test_an_answer_is_taken_apart_in_the_same_way_however_it_is_cut(
    form: str, text: str, content: str, reasoning: str, calls: list[Any]
) -> None:
    for size in (1, 2, 3, 7, len(text) or 1):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert joined(parsed(form, pieces)) == (content, reasoning, calls), size


@pytest.mark.parametrize(("form", "text", "content", "reasoning", "calls"), CASES)
def test_no_piece_of_an_answer_holds_the_beginning_of_a_marker(
    form: str, text: str, content: str, reasoning: str, calls: list[Any]
) -> None:
    """Unless it turned out to be none: then it comes with what follows."""
    parser = AnswerParser(FORMATS[form], TOOLS)
    said = ""
    for character in text:
        for delta in parser.feed(character):
            said += getattr(delta, "text", "")
    for marker in MARKERS if form != "none" else ():
        if marker in content + reasoning:
            continue
        for length in range(2, len(marker)):
            held_back = marker[:length] not in content + reasoning
            assert not held_back or marker[:length] not in said


@given(
    form=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(
        st.sampled_from(
            [
                *(*MARKERS, "<|end|>", FIND, " ", "\n", "Yes", "<", "[", "find", '{"a": 1}'),
                "[go(a=1)]",
                "call:go{a:1}",
                '<invoke name="go"></invoke>',
                "<|tool_call_begin|>go<|tool_call_argument_begin|>{}<|tool_call_end|>",
            ]
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
@settings(max_examples=300, deadline=None)
@example("tagged", [" ", "<tool_call>"], [4])
@example("listed", ["\n", "[TOOL_CALLS]", "find"], [2])
@example("tagged", ["Yes", "\n", "<tool_call>", FIND, "</tool_call>"], [3])
@example("bare", [" ", "<", "find"], [2])
def test_any_text_ends_and_comes_out_alike_in_any_pieces(
    form: str, parts: list[str], cuts: list[int]
) -> None:
    """`cuts` are places in the text; a place after its end counts as the end."""
    text = "".join(parts)
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [
        text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)
    ]
    assert joined(parsed(form, pieces)) == joined(parsed(form, [text]))


def test_without_tools_nothing_is_a_call() -> None:
    text = f"<tool_call>{FIND}</tool_call>"
    assert joined(parsed("tagged", [text], [])) == (text, "", [])
    assert joined(parsed("bare", [FIND], [])) == (FIND, "", [])


def test_markers_that_the_text_leaves_out_come_by_their_tokens() -> None:
    """As special tokens do, which are no text."""
    answer_format = AnswerFormat(
        ToolFormat.LISTED, markers=(Marker(5, "[TOOL_CALLS]"), Marker(6, "[ARGS]"))
    )
    parser = AnswerParser(answer_format, TOOLS)
    deltas = [
        *parser.feed("Yes", 1),
        *parser.feed("", 5),
        *parser.feed("find", 2),
        *parser.feed("", 6),
    ]
    deltas += [*parser.feed('{"what": "7"}', 3), *parser.finish()]
    assert deltas[0] == ContentDelta("Yes")
    assert [(call.name, call.arguments) for call in deltas[1:] if isinstance(call, ToolCall)] == [
        ("find", '{"what": "7"}')
    ]


def test_ids_of_calls_differ_and_have_the_form_that_every_template_takes() -> None:
    parser = AnswerParser(FORMATS["tagged"], TOOLS)
    calls = parser.feed(f"<tool_call>{FIND}</tool_call>" * 2)
    ids = {call.id for call in calls if isinstance(call, ToolCall)}
    assert len(ids) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)


def test_a_call_that_never_ends_is_not_held_for_ever() -> None:
    parser = AnswerParser(FORMATS["tagged"], TOOLS)
    deltas = parser.feed("<tool_call>" + "x" * (2 << 20))
    assert sum(len(delta.text) for delta in deltas if isinstance(delta, ContentDelta)) > 2 << 20
