"""Calls of tools in a model's text. Text in no known form is no call; nothing is inferred or
mended."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgeshard.chat.literals import STRICT_DECODER, gemma_call, python_calls, strict_json


@dataclass(frozen=True, slots=True)
class Called:
    """A call of the tool `name`; `arguments` is JSON text, `id` the model's own if its form has
    one."""

    name: str
    arguments: str
    id: str = ""


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_LISTED = re.compile(
    r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*)?\s*(?:\[ARGS\])?\s*(?=\{)"
)
_INVOKED = re.compile(r'\s*<invoke name="?([^>"\n]+)"?>(.*?)</invoke>\s*', re.DOTALL)
_ARGUMENT = re.compile(r'<parameter name="?([^>"\n]+)"?>(.*?)</parameter>', re.DOTALL)
_IN_SECTION = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[A-Za-z0-9_.-]+)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>\s*",
    re.DOTALL,
)
SECTION_MARKERS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
"""Around each call of a section, and between its name and its arguments."""


def calls_in_tag(text: str, tools: Sequence[Any]) -> tuple[Called, ...]:
    """The calls between two tags, in one of the forms that models have for it.

    They may be JSON, a list in Python's form, a call in Gemma's, or a section in which each call
    has an id. They may also be functions that are invoked, one function with parameters in tags, or
    a name with keys and values.
    """
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        return _calls_in_json(stripped) or _written(python_calls(stripped) or ())
    if stripped.startswith("call:"):
        call = gemma_call(stripped)
        return () if call is None else _written([call])
    if stripped.startswith(SECTION_MARKERS[0]):
        return _calls_in_section(stripped)
    if stripped.startswith("<invoke"):
        return tuple(_invoked(call[1].strip(), call[2], tools) for call in _all(_INVOKED, stripped))
    function = _FUNCTION.fullmatch(stripped)
    if function is not None:
        name = function[1].strip()
        pairs = [
            (key.strip(), _without_edges(value)) for key, value in _PARAMETER.findall(function[2])
        ]
        return (Called(name, _typed(name, pairs, tools)),)
    name, newline, rest = stripped.partition("\n")
    if "<arg_key>" in name:
        end = name.index("<arg_key>")
        rest = name[end:] + newline + rest
        name = name[:end]
    if (
        not name
        or (rest.strip() and not _PAIR.search(rest))
        or not re.fullmatch(r"[A-Za-z0-9_.-]+", name.strip())
    ):
        return ()
    pairs = [(key.strip(), value) for key, value in _PAIR.findall(rest)]
    return (Called(name.strip(), _typed(name.strip(), pairs, tools)),)


def calls_in_list(text: str, marker: str) -> tuple[Called, ...]:
    """The calls after the first marker: one list in JSON, or a name and its arguments for each,
    with a marker again between them."""
    if text.lstrip().startswith("["):
        return _calls_in_json(text.strip())
    calls: list[Called] = []
    for piece in text.split(marker):
        named = _LISTED.match(piece)
        arguments = None if named is None else _json_or(piece[named.end() :], None)
        if named is None or not isinstance(arguments, dict):
            return ()
        calls.append(Called(named[1], _to_json(arguments)))
    return tuple(calls)


def calls_in_bare(text: str, tools: Sequence[Any]) -> tuple[Called, ...]:
    """The calls of existing tools in an answer that is only JSON. Several form a list, or follow
    each other with white space or a semicolon between them."""
    calls: list[Called] = []
    rest = text.strip()
    while rest:
        try:
            value, end = STRICT_DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return ()
        parsed_calls = _calls_of(value)
        if not parsed_calls:
            return ()
        calls += parsed_calls
        rest = rest[end:].lstrip(" \t\r\n;")
    return tuple(calls) if {call.name for call in calls} <= _names(tools) else ()


def _calls_in_json(text: str) -> tuple[Called, ...]:
    try:
        return _calls_of(strict_json(text))
    except (ValueError, RecursionError):
        return ()


def _calls_of(value: Any) -> tuple[Called, ...]:
    calls = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
    valid_calls = tuple(call for call in calls if call is not None)
    return valid_calls if len(valid_calls) == len(calls) else ()


def _call_of(value: Any) -> Called | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json_or(arguments, None)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Called(name, _to_json(arguments))


def _written(calls: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Called, ...]:
    return tuple(Called(name, _to_json(arguments)) for name, arguments in calls)


def _invoked(name: str, inside: str, tools: Sequence[Any]) -> Called:
    pairs = [(key.strip(), _without_edges(value)) for key, value in _ARGUMENT.findall(inside)]
    return Called(name, _typed(name, pairs, tools))


def _calls_in_section(text: str) -> tuple[Called, ...]:
    calls: list[Called] = []
    for match in _all(_IN_SECTION, text):
        arguments = _json_or(match["arguments"].strip() or "{}", None)
        if not isinstance(arguments, dict):
            return ()
        calls.append(Called(match["name"], _to_json(arguments), match["id"]))
    return tuple(calls)


def _all(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """All matches, if the text is only these, one after the other."""
    matches: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None:
            return []
        matches.append(match)
        at = match.end()
    return matches


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Any]) -> str:
    """Arguments that were written as texts: one whose tool does not take it as a text is read as
    JSON, if it is JSON."""
    properties = _properties(name, tools)
    return _to_json({key: _value(value, _kinds(properties.get(key))) for key, value in pairs})


def _value(text: str, kinds: set[str]) -> Any:
    """An argument by the types in its schema. If one of these is a text, another counts if the
    value is of it."""
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    value = _json_or(text, text)
    return value if "string" not in kinds or kinds & _KINDS.get(type(value), set()) else text


_KINDS: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
"""The names in schemas of JSON values that are no texts."""


def _kinds(schema: Any) -> set[str]:
    """The types that a schema and its alternatives name."""
    kinds: set[str] = set()
    if not isinstance(schema, dict):
        return kinds
    alternatives = [schema.get(key) for key in ("anyOf", "oneOf")]
    for one in (schema, *(one for some in alternatives if isinstance(some, list) for one in some)):
        named = one.get("type") if isinstance(one, dict) else None
        kinds |= {
            kind
            for kind in (named if isinstance(named, list) else [named])
            if isinstance(kind, str)
        }
    return kinds


def _to_json(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half a character, which JSON may have as an escape, is nothing that can be sent but as one.
    return text if text.isascii() or _is_whole(text) else json.dumps(arguments)


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_or(text: str, otherwise: Any) -> Any:
    """The value of a JSON text; `otherwise` if it is no JSON."""
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return otherwise


def _without_edges(value: str) -> str:
    """Without the line's end after the opening tag and before the closing one."""
    return value.removeprefix("\n").removesuffix("\n")


def _functions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    described = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools]
    return [function for function in described if isinstance(function, dict)]


def _names(tools: Sequence[Any]) -> set[str]:
    return {name for function in _functions(tools) if isinstance(name := function.get("name"), str)}


def _properties(name: str, tools: Sequence[Any]) -> dict[str, Any]:
    described = (
        function.get("parameters") for function in _functions(tools) if function.get("name") == name
    )
    parameters = next((schema for schema in described if isinstance(schema, dict)), {})
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}
