"""Calls of tools in a model's text. What is no call of a known form is none; nothing is guessed or mended."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Called:
    """A call of the tool `name`; `arguments` is JSON text."""

    name: str
    arguments: str


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_LISTED = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
_DECODER = json.JSONDecoder()


def calls_in_tag(text: str, tools: Sequence[Any]) -> tuple[Called, ...]:
    """The calls between two tags: JSON, or a function with parameters in tags, or a name with keys and values."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        return _calls_in_json(stripped)
    function = _FUNCTION.fullmatch(stripped)
    if function is not None:
        name = function[1].strip()
        pairs = [(key.strip(), _without_edges(value)) for key, value in _PARAMETER.findall(function[2])]
        return (Called(name, _typed(name, pairs, tools)),)
    name, newline, rest = stripped.partition("\n")
    if "<arg_key>" in name:
        name, rest = name[: name.index("<arg_key>")], name[name.index("<arg_key>") :] + newline + rest
    if not name or (rest.strip() and not _PAIR.search(rest)) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name.strip()):
        return ()
    pairs = [(key.strip(), value) for key, value in _PAIR.findall(rest)]
    return (Called(name.strip(), _typed(name.strip(), pairs, tools)),)


def calls_in_list(text: str, marker: str) -> tuple[Called, ...]:
    """The calls behind the first marker: one list in JSON, or a name and its arguments for each, with a marker again
    between them."""
    if text.lstrip().startswith("["):
        return _calls_in_json(text.strip())
    calls: list[Called] = []
    for piece in text.split(marker):
        named = _LISTED.match(piece)
        arguments = None if named is None else _json_or(piece[named.end() :], None)
        if named is None or not isinstance(arguments, dict):
            return ()
        calls.append(Called(named[1], json.dumps(arguments, ensure_ascii=False)))
    return tuple(calls)


def calls_in_bare(text: str, tools: Sequence[Any]) -> tuple[Called, ...]:
    """The calls in an answer that is nothing but JSON, of tools that there are; several stand in a list, or one behind
    the other with white space or a semicolon between them."""
    calls: list[Called] = []
    rest = text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return ()
        found = _calls_of(value)
        if not found:
            return ()
        calls += found
        rest = rest[end:].lstrip(" \t\r\n;")
    return tuple(calls) if {call.name for call in calls} <= _names(tools) else ()


def _calls_in_json(text: str) -> tuple[Called, ...]:
    try:
        return _calls_of(json.loads(text))
    except (ValueError, RecursionError):
        return ()


def _calls_of(value: Any) -> tuple[Called, ...]:
    calls = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
    found = tuple(call for call in calls if call is not None)
    return found if len(found) == len(calls) else ()


def _call_of(value: Any) -> Called | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json_or(arguments, None)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Called(name, json.dumps(arguments, ensure_ascii=False))


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Any]) -> str:
    """Arguments that were written as texts: one that its tool does not take as a text is read as JSON, where it is."""
    properties = _properties(name, tools)
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        schema = properties.get(key)
        kind = schema.get("type") if isinstance(schema, dict) else None
        arguments[key] = value if kind == "string" else _json_or(value, value)
    return json.dumps(arguments, ensure_ascii=False)


def _json_or(text: str, otherwise: Any) -> Any:
    """The value of a JSON text; `otherwise` where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _without_edges(value: str) -> str:
    """Without the line's end behind the opening tag and before the closing one."""
    return value.removeprefix("\n").removesuffix("\n")


def _functions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    described = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools]
    return [function for function in described if isinstance(function, dict)]


def _names(tools: Sequence[Any]) -> set[str]:
    return {name for function in _functions(tools) if isinstance(name := function.get("name"), str)}


def _properties(name: str, tools: Sequence[Any]) -> dict[str, Any]:
    described = (function.get("parameters") for function in _functions(tools) if function.get("name") == name)
    parameters = next((found for found in described if isinstance(found, dict)), {})
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}
