"""The tools that an answer may call, must call, or must not."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.conversation import AnswerDelta, AnswerFormat, ContentDelta, ToolCall
from edgeshard.domain.requests.generation import Guide
from edgeshard.gateway.access.middleware import add_header
from edgeshard.gateway.json_text import json_text
from edgeshard.gateway.routes.body_fields import schema_guide
from edgeshard.gateway.routes.schemas import check_schema

ValueT = TypeVar("ValueT")

ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]
"""The choice of a tool as requests have it: a word, a tool, or a list of allowed tools."""
IGNORED_TOOLS = "x-ignored-tools"
"""The header of an answer with the types of tools that the server does not run."""
_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_TYPES = 16


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that an answer may call. `is_forced`: the answer is a call of one of `names`,
    of any if None.

    `ignored` are the types of the other tools, such as web_search, which a server would have to
    run.
    """

    tools: tuple[Any, ...] = ()
    is_forced: bool = False
    names: frozenset[str] | None = None
    ignored: tuple[str, ...] = ()


def offer_of(tools: Sequence[Any] | None, choice: ToolChoice | None) -> Offer:
    """The offer of a request. Raises InvalidArgumentError for a choice that is not among the
    functions."""
    functions = tuple(tool for tool in tools or () if _type_of(tool) == "function")
    others = (_type_of(tool) for tool in tools or ())
    types = [kind if _TYPE.fullmatch(kind) else "unknown" for kind in others if kind != "function"]
    ignored = tuple(dict.fromkeys(types))[:_MAX_TYPES]
    if choice in (None, "auto"):
        return Offer(functions, ignored=ignored)
    if choice == "none":
        return Offer(ignored=ignored)
    names: frozenset[str] | None = None
    is_forced = True
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools") or choice
        names = _names(_of_type(allowed, dict).get("tools"))
        functions = tuple(tool for tool in functions if _name(_function(tool)) in names)
        is_forced = allowed.get("mode") == "required"
    elif isinstance(choice, dict):
        names = _names([choice])
    if is_forced and not functions:
        raise InvalidArgumentError(
            "tool_choice: give tools to choose from, or leave it out", field="tool_choice"
        )
    return Offer(functions, is_forced, names, ignored)


def name_ignored(request: Request, offer: Offer) -> None:
    """Have the answer to a request name the tools of an offer that are left out."""
    if offer.ignored:
        add_header(request, IGNORED_TOOLS, ", ".join(offer.ignored))


def _type_of(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind is None:
        return "function"
    return kind if isinstance(kind, str) else "unknown"


def _names(tools: Any) -> frozenset[str]:
    """The names of the functions among chosen tools. Raises InvalidArgumentError if there is
    none."""
    functions = [
        tool for tool in _of_type(tools, list) if _type_of(_of_type(tool, dict)) == "function"
    ]
    if tools and not functions:
        raise InvalidArgumentError(
            f"tool_choice: a tool of type {_type_of(tools[0])[:40]!r} is not run here; choose a "
            "function, or auto",
            field="tool_choice",
            reason="UNSUPPORTED_VALUE",
        )
    named = (_of_type(tool.get("function") or tool, dict).get("name") for tool in functions)
    return frozenset(_of_type(name, str) for name in named)


def _of_type(value: Any, kind: type[ValueT]) -> ValueT:
    if not isinstance(value, kind):
        raise InvalidArgumentError(
            'tool_choice: is not of the form {"type": "function", "function": {"name": ...}}',
            field="tool_choice",
        )
    return value


def forced_call(offer: Offer, open_objects: bool | None) -> Guide | None:
    """The guide of an answer that must be a call: an object with the name of a tool and its
    arguments.

    The arguments follow the tools' own schemas, closed except for `open_objects`. None if no call
    is required. Raises InvalidArgumentError for an unknown tool, and for schemas that are too large
    together.
    """
    if not offer.is_forced:
        return None
    functions = [_function(tool) for tool in offer.tools]
    if offer.names is not None:
        functions = [function for function in functions if _name(function) in offer.names]
        if not functions:
            raise InvalidArgumentError(
                "tool_choice: names a function that is not among the tools", field="tool_choice"
            )
    check_schema(
        [part for function in functions for part in (_name(function), function.get("parameters"))],
        "tools",
    )
    named = {f"tool{number}": function for number, function in enumerate(functions)}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": _name(function)},
                "arguments": {"$ref": f"#/$defs/{place}"},
            },
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
    return schema_guide({**schema, "$defs": definitions}, open_objects, "tools")


def _moved(schema: Any, place: str) -> Any:
    """A schema that is now at `place`, with its references to its own top moved there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value if key in _VALUES else _moved(value, place) for key, value in schema.items()
    }
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


def _name(function: dict[str, Any]) -> str:
    """The name of a function of a request; "" if it has none, which is refused when the prompt is
    made."""
    name = function.get("name")
    return name if isinstance(name, str) else ""


class ForcedCall:
    """A reader of an answer that is one call and nothing else, in place of `AnswerParser`."""

    def __init__(self) -> None:
        self.calls = 0
        self._text: list[str] = []

    def feed(self, text: str, token: int | None = None) -> list[AnswerDelta]:
        self._text.append(text)
        return []

    def finish(self) -> list[AnswerDelta]:
        """The call, or the text as content if it is no complete call, since the token limit ended
        it."""
        text = "".join(self._text)
        try:
            call = json.loads(text)
            name, arguments = call["name"], json_text(call["arguments"])
        except (ValueError, TypeError, KeyError):
            return [ContentDelta(text)] if text else []
        self.calls = 1
        return [ToolCall(0, f"call_{secrets.token_hex(12)}", str(name), arguments)]


PLAIN = AnswerFormat()
"""The format of an answer whose form the request sets: it has no reasoning and no calls."""
