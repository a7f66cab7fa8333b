"""Parses a model's answer as it arrives: content, reasoning and calls of tools.

A piece of text is returned when its kind is certain: a marker, or the beginning of one, is never
content. A call is returned whole. Text that began like a call and is none is content, word for
word.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any

from edgeshard.chat.tool_calls import Called, calls_in_bare, calls_in_list, calls_in_tag
from edgeshard.domain.requests.conversation import (
    AnswerDelta,
    AnswerFormat,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolFormat,
)

_TAG = "<tool_call>"
_END_TAG = "</tool_call>"
_LIST = "[TOOL_CALLS]"
_LONGEST_CALL = 1 << 20
"""Characters of one call, or of what may still become one; longer ones are content."""
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Some templates take no ids of another length."""


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


class AnswerParser:
    """Reads one answer: `feed` each token and its text, then `finish`.

    Without `tools`, JSON values as the request has them, nothing is taken for a call.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        tools: Sequence[Any] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._markers = {marker.token: marker.text for marker in answer_format.markers}
        channels = answer_format.tools is ToolFormat.CHANNELS
        self._reader: _Tagged | _Channels = (
            _Channels(bool(tools)) if channels else _Tagged(answer_format, tools)
        )
        self._new_id = new_id
        self.calls = 0
        """So far."""

    def feed(self, text: str, token: int | None = None) -> list[AnswerDelta]:
        """The parts that are certain now. `token` is the id after the text, since the text leaves
        some markers out."""
        if token is not None:
            text += self._markers.get(token, "")
        return self._deltas(self._reader.read(text, over=False)) if text else []

    def finish(self) -> list[AnswerDelta]:
        """The rest, once the answer is over."""
        return self._deltas(self._reader.read("", over=True))

    def _deltas(self, parts: Sequence[_Part]) -> list[AnswerDelta]:
        deltas: list[AnswerDelta] = []
        for part in parts:
            if isinstance(part, Called):
                deltas.append(
                    ToolCall(self.calls, part.id or self._new_id(), part.name, part.arguments)
                )
                self.calls += 1
            elif part.text:
                deltas.append(part)
        return deltas


class Gathered:
    """The parts of one answer, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    def add(self, *deltas: AnswerDelta) -> None:
        """Append further parts."""
        for delta in deltas:
            match delta:
                case ContentDelta():
                    self._content.append(delta.text)
                case ReasoningDelta():
                    self._reasoning.append(delta.text)
                case ToolCall():
                    self.calls.append(delta)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)


_Part = ContentDelta | ReasoningDelta | Called


class _Tagged:
    """Reasoning at the beginning, if there is any; then content, with calls in it or instead of
    it."""

    def __init__(self, answer_format: AnswerFormat, tools: Sequence[Any]) -> None:
        self._begin, self._end = answer_format.reasoning_begin, answer_format.reasoning_end
        self._tag_begin = answer_format.call_begin or _TAG
        self._tag_end = answer_format.call_end or _END_TAG
        self._tools = tools
        self._format = answer_format.tools if tools else ToolFormat.NONE
        self._held = ""
        self._space = ""
        """White space that the answer begins with: content once anything but a call follows it."""
        self._read: Callable[[bool], tuple[list[_Part], bool]]
        self._read = self._reasoning if answer_format.in_reasoning else self._beginning

    def read(self, text: str, over: bool) -> list[_Part]:
        """The parts that are certain now; with `over`, the rest.

        Every state takes as much as it can of the text held, and returns whether another may
        continue at once.
        """
        self._held += text
        parts: list[_Part] = []
        goes_on = True
        while goes_on:
            new_parts, goes_on = self._read(over)
            parts += new_parts
        return parts

    def _beginning(self, over: bool) -> tuple[list[_Part], bool]:
        """So far there was only white space: reasoning may follow, or a call that is the whole
        answer."""
        text = self._held.lstrip()
        if not over and (
            not text or (self._begin and text != self._begin and self._begin.startswith(text))
        ):
            return [], False
        if self._begin and text.startswith(self._begin):
            self._held, self._read = text[len(self._begin) :], self._reasoning
            return [], True
        self._space, self._held = self._held[: len(self._held) - len(text)], text
        return self._answer()

    def _answer(self) -> tuple[list[_Part], bool]:
        """The text held is the answer's beginning, which shows whether it is only calls."""
        bare = self._format is ToolFormat.BARE and self._held.startswith(("{", "["))
        self._read = self._whole if bare else self._content
        return [], True

    def _reasoning(self, over: bool) -> tuple[list[_Part], bool]:
        before, marker, self._held = _split(self._held, (self._end,), over)
        parts: list[_Part] = [ReasoningDelta(before)]
        if not marker:
            return parts, False
        self._read = self._after_reasoning
        return parts, True

    def _after_reasoning(self, over: bool) -> tuple[list[_Part], bool]:
        """White space between reasoning and answer is neither's."""
        self._held = self._held.lstrip()
        return self._answer() if self._held else ([], False)

    def _content(self, over: bool) -> tuple[list[_Part], bool]:
        markers = {ToolFormat.TAGGED: (self._tag_begin,), ToolFormat.LISTED: (_LIST,)}.get(
            self._format, ()
        )
        before, marker, self._held = _split(self._held, markers, over)
        if marker:
            self._read = self._tag if self._format is ToolFormat.TAGGED else self._whole
        return [self._said(before)] if before or over else [], bool(marker)

    def _tag(self, over: bool) -> tuple[list[_Part], bool]:
        inside, marker, rest = _split(self._held, (self._tag_end,), over)
        if not marker and not over and len(self._held) <= _LONGEST_CALL:
            return [], False
        calls = calls_in_tag(inside, self._tools) if marker or over else ()
        self._held, self._read = rest, self._between_tags if calls else self._content
        if not marker and not calls:
            self._held, rest = "", self._held
            return [self._said(self._tag_begin + inside + rest)], False
        return self._called(calls) or [self._said(self._tag_begin + inside + marker)], True

    def _between_tags(self, over: bool) -> tuple[list[_Part], bool]:
        """White space between calls, and after the last one, is no content."""
        self._held = self._held.lstrip()
        self._read = self._content if self._held else self._read
        return [], bool(self._held)

    def _whole(self, over: bool) -> tuple[list[_Part], bool]:
        """All the rest is calls, in a list or bare, or else content."""
        if not over and len(self._held) <= _LONGEST_CALL:
            return [], False
        listed = self._format is ToolFormat.LISTED
        calls = (
            calls_in_list(self._held, _LIST) if listed else calls_in_bare(self._held, self._tools)
        )
        parts: list[_Part] = self._called(calls) or [
            self._said(_LIST + self._held if listed else self._held)
        ]
        self._held, self._read = "", self._read if listed and calls else self._content
        return parts, False

    def _said(self, text: str) -> ContentDelta:
        text, self._space = self._space + text, ""
        return ContentDelta(text)

    def _called(self, calls: Sequence[Called]) -> list[_Part]:
        self._space = "" if calls else self._space
        return list(calls)


_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_START = "<|start|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
CHANNEL_MARKERS = (_CHANNEL, _MESSAGE, _START, _CONSTRAIN, *_ENDS)
_TO_FUNCTION = "to=functions."


class _Channels:
    """Messages of a header and a body each: the header names a channel and the recipient."""

    def __init__(self, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._held = ""
        self._header = ""
        self._call = ""
        self._in_body = False
        self._is_marked = False

    def read(self, text: str, over: bool) -> list[_Part]:
        """The parts that are certain now; with `over`, the rest."""
        self._held += text
        parts: list[_Part] = []
        while True:
            before, marker, self._held = _split(self._held, CHANNEL_MARKERS, over)
            if self._in_body:
                parts += self._body(before)
            else:
                self._header += before
            if not marker:
                break
            self._is_marked = True
            if marker == _MESSAGE:
                self._in_body = True
            elif marker in (*_ENDS, _START) or (self._in_body and marker == _CHANNEL):
                parts += self._end_message()
            if not self._in_body:
                self._header += " channel=" if marker == _CHANNEL else " "
        if over:
            parts += self._end_message() if self._is_marked else [ContentDelta(self._header)]
        return parts

    def _body(self, text: str) -> list[_Part]:
        if self._function() and self._has_tools and len(self._call) <= _LONGEST_CALL:
            self._call += text
            return []
        return [ReasoningDelta(text) if "channel=analysis" in self._header else ContentDelta(text)]

    def _function(self) -> str:
        """The function that this message calls, "" if it calls none."""
        _, marker, rest = self._header.partition(_TO_FUNCTION)
        return rest.split()[0] if marker and rest.split() else ""

    def _end_message(self) -> list[_Part]:
        parts: list[_Part] = (
            [Called(self._function(), self._call.strip() or "{}")] if self._call else []
        )
        self._header = ""
        self._call = ""
        self._in_body = False
        return parts


def _split(text: str, markers: Sequence[str], over: bool) -> tuple[str, str, str]:
    """The text before the first marker, that marker, and what follows it.

    If there is none: the text that can be returned, "", and the possible beginning of one, which is
    empty when the answer is over.
    """
    places = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    if places:
        place, marker = min(places)
        return text[:place], marker, text[place + len(marker) :]
    overlap = 0 if over else max((_overlap(text, marker) for marker in markers), default=0)
    return text[: len(text) - overlap], "", text[len(text) - overlap :]


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` that `marker` begins with."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
