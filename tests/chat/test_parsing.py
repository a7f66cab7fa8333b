"""Answers taken apart: the same however they are cut, and no part of a marker is ever content."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeshard.chat.parsing import AnswerParser
from edgeshard.domain.requests.chat import (
    AnswerDelta,
    AnswerFormat,
    ContentDelta,
    Marker,
    ReasoningDelta,
    ToolCall,
    ToolFormat,
)

TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {"properties": {"what": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}},
]
THINK: dict[str, Any] = {"reasoning_begin": "<think>", "reasoning_end": "</think>"}
FORMATS = {
    "tagged": AnswerFormat(ToolFormat.TAGGED, **THINK),
    "thinking": AnswerFormat(ToolFormat.TAGGED, in_reasoning=True, **THINK),
    "listed": AnswerFormat(ToolFormat.LISTED),
    "channels": AnswerFormat(ToolFormat.CHANNELS),
    "bare": AnswerFormat(ToolFormat.BARE, **THINK),
    "none": AnswerFormat(),
}
FIND = '{"name": "find", "arguments": {"what": "7"}}'
ASKED = [("find", {"what": "7"})]
# Format, text, content, reasoning, calls.
CASES: list[tuple[str, str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("tagged", "plain text", "plain text", "", []),
    ("tagged", "a < b <tool", "a < b <tool", "", []),
    ("tagged", "  \n", "  \n", "", []),
    ("tagged", "", "", "", []),
    ("tagged", f"<tool_call>\n{FIND}\n</tool_call>", "", "", ASKED),
    ("tagged", f"Yes.\n<tool_call>{FIND}</tool_call>\n<tool_call>{FIND}</tool_call> Done.", "Yes.\nDone.", "",
     ASKED * 2),
    ("tagged", f"<tool_call>{FIND}", "", "", ASKED),
    ("tagged", "<tool_call>{bad}</tool_call> so", "<tool_call>{bad}</tool_call> so", "", []),
    ("tagged", "<tool_call>{bad", "<tool_call>{bad", "", []),
    ("tagged", " <tool_call>{bad", " <tool_call>{bad", "", []),
    ("tagged", f" <tool_call>{FIND}", "", "", ASKED),
    ("tagged", "<tool_call>\n<function=find>\n<parameter=what>\n7\n</parameter>\n</function>\n</tool_call>", "", "",
     ASKED),
    ("tagged", "<tool_call><function=go><parameter=far>\n7\n</parameter></function></tool_call>", "", "",
     [("go", {"far": 7})]),
    ("tagged", "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>7</arg_value>\n</tool_call>", "", "", ASKED),
    ("tagged", "<tool_call>go</tool_call>", "", "", [("go", {})]),
    ("tagged", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", "", []),
    ("tagged", "<think>hm < </th\n</think>\n\nYes", "Yes", "hm < </th\n", []),
    ("tagged", "\n<think>hm</think>" + f"<tool_call>{FIND}</tool_call>", "", "hm", ASKED),
    ("tagged", "<think>never ends", "", "never ends", []),
    ("tagged", "see <think>", "see <think>", "", []),
    ("tagged", "<thin", "<thin", "", []),
    ("thinking", "hm</think>Yes", "Yes", "hm", []),
    ("thinking", "hm", "", "hm", []),
    ("listed", f"[TOOL_CALLS] [{FIND}]", "", "", ASKED),
    ("listed", f"Yes [TOOL_CALLS][{FIND}, {FIND}]", "Yes ", "", ASKED * 2),
    ("listed", '[TOOL_CALLS]find[ARGS]{"what": "7"}[TOOL_CALLS]go{"far": 7}', "", "", [*ASKED, ("go", {"far": 7})]),
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
    ("none", f"<think>x</think><tool_call>{FIND}</tool_call>", f"<think>x</think><tool_call>{FIND}</tool_call>", "",
     []),
    ("channels", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
     "Yes", "hm", []),
    ("channels", "<|channel|>commentary to=functions.find <|constrain|>json<|message|>" '{"what": "7"}<|call|>', "", "",
     ASKED),
    ("channels", '<|channel|>commentary to=functions.find<|constrain|>json<|message|>{"what": "7"}', "", "", ASKED),
    ("channels", ' to=functions.find<|channel|>commentary<|message|>{"what": "7"}<|call|>', "", "", ASKED),
    ("channels", "<|channel|>commentary<|message|>I look.<|end|>", "I look.", "", []),
    ("channels", "no channels at all", "no channels at all", "", []),
]  # fmt: skip
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "<|channel|>", "<|message|>")


def parsed(form: str, pieces: list[str], tools: list[Any] = TOOLS) -> list[AnswerDelta]:
    ids = count()
    parser = AnswerParser(FORMATS[form], tools, lambda: f"id{next(ids)}")
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def joined(deltas: list[AnswerDelta]) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [delta for delta in deltas if isinstance(delta, ToolCall)]
    assert [(call.index, call.id) for call in calls] == [(n, f"id{n}") for n in range(len(calls))]
    return (
        "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        [(call.name, json.loads(call.arguments)) for call in calls],
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
        st.sampled_from([*MARKERS, "<|end|>", FIND, " ", "\n", "Yes", "<", "[", "find", '{"a": 1}']), max_size=12
    ),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
@settings(max_examples=300, deadline=None)
@example("tagged", [" ", "<tool_call>"], [4])
@example("listed", ["\n", "[TOOL_CALLS]", "find"], [2])
@example("tagged", ["Yes", "\n", "<tool_call>", FIND, "</tool_call>"], [3])
@example("bare", [" ", "<", "find"], [2])
def test_any_text_ends_and_comes_out_alike_in_any_pieces(form: str, parts: list[str], cuts: list[int]) -> None:
    """`cuts` are places in the text; those behind its end are at its end."""
    text = "".join(parts)
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert joined(parsed(form, pieces)) == joined(parsed(form, [text]))


def test_without_tools_nothing_is_a_call() -> None:
    text = f"<tool_call>{FIND}</tool_call>"
    assert joined(parsed("tagged", [text], [])) == (text, "", [])
    assert joined(parsed("bare", [FIND], [])) == (FIND, "", [])


def test_markers_that_the_text_leaves_out_come_by_their_tokens() -> None:
    """As special tokens do, which are no text."""
    answer_format = AnswerFormat(ToolFormat.LISTED, markers=(Marker(5, "[TOOL_CALLS]"), Marker(6, "[ARGS]")))
    parser = AnswerParser(answer_format, TOOLS)
    deltas = [*parser.feed("Yes", 1), *parser.feed("", 5), *parser.feed("find", 2), *parser.feed("", 6)]
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
