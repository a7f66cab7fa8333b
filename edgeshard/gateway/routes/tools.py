"""The tools that an answer may call, must call, or must not."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.chat import AnswerDelta, AnswerFormat, ContentDelta, ToolCall
from edgeshard.domain.requests.generation import Guide
from edgeshard.gateway.routes.fields import RequestModel, schema_guide


class NamedFunction(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def tools_for(tools: Sequence[Any] | None, choice: ToolChoice | None) -> Sequence[Any]:
    """The tools for the template. Raises InvalidArgumentError for a choice among none."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidArgumentError("tool_choice: there are no tools to choose from", field="tool_choice")
        return ()
    return () if choice == "none" else tools


def forced_call(tools: Sequence[Any], choice: ToolChoice | None, open_objects: bool) -> Guide | None:
    """The guide of an answer that must be a call: an object with the name of a tool and its arguments.

    The arguments follow the tools' own schemas, closed but for `open_objects`. None where no call is asked for. Raises
    InvalidArgumentError for a tool that is not there.
    """
    if choice in (None, "none", "auto"):
        return None
    wanted = [_function(tool) for tool in tools]
    if isinstance(choice, NamedTool):
        wanted = [function for function in wanted if function.get("name") == choice.function.name]
        if not wanted:
            raise InvalidArgumentError("tool_choice: names a function that is not among the tools", field="tool_choice")
    named = {f"tool{number}": function for number, function in enumerate(wanted)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.get("name")}, "arguments": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, function in named.items()
    ]
    schema: dict[str, Any] = {"anyOf": calls} if len(calls) > 1 else calls[0]
    definitions = {
        place: _moved(function.get("parameters") or {"type": "object"}, f"#/$defs/{place}")
        for place, function in named.items()
    }
    return schema_guide({**schema, "$defs": definitions}, open_objects)


def _moved(schema: Any, place: str) -> Any:
    """A schema that now stands at `place`, with its references to its own top moved there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: value if key in _VALUES else _moved(value, place) for key, value in schema.items()}
    if isinstance(to := schema.get("$ref"), str) and to.startswith("#"):
        moved["$ref"] = place + to[1:]
    return moved


_VALUES = frozenset({"const", "default", "enum", "examples"})
"""The keys of a schema whose values are no schemas."""


def _function(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise InvalidArgumentError(
            'tools: one is not of the form {"type": "function", "function": {...}}', field="tools"
        )
    return function


class ForcedCall:
    """A reader of an answer that is one call and nothing else, in place of `AnswerParser`."""

    def __init__(self) -> None:
        self.calls = 0
        self._text: list[str] = []

    def feed(self, text: str, token: int | None = None) -> list[AnswerDelta]:
        self._text.append(text)
        return []

    def finish(self) -> list[AnswerDelta]:
        """The call, or the text as content where it is no call, since there was no room for all of it."""
        text = "".join(self._text)
        try:
            call = json.loads(text)
            name, arguments = call["name"], json.dumps(call["arguments"])
        except (ValueError, TypeError, KeyError):
            return [ContentDelta(text)] if text else []
        self.calls = 1
        return [ToolCall(0, f"call_{secrets.token_hex(12)}", str(name), arguments)]


PLAIN = AnswerFormat()
"""The format of an answer whose form the request gives: it has no reasoning and no calls."""
