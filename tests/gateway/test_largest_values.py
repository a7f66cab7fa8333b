"""Each field of each body with the largest values that it may have: no callback of the event loop
takes long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from edgeshard.domain.requests.generation import PROMPT_LIMIT_BYTES
from edgeshard.gateway.access import bodies
from edgeshard.gateway.app import FORMS
from tests.support.body_exchange import Gateway

MAX_CALLBACK_S = 0.25
"""The bound of any callback, in seconds of processor time. On a quiet machine the slowest value
takes 0.12 s."""
TURNS = 3
"""The fastest counts."""
TURN = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {
    "type": "function",
    "name": "f",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/responses": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/api/chat": {"messages": [TURN], "stream": False},
    "/api/generate": {"prompt": "x", "stream": False},
}
"""The fields besides `model` that a body needs."""
_PARTS, _ITEMS = bodies.MOST_PARTS - 50, bodies.MOST_ITEMS - 50
_DEEP: Any = json.loads('{"a":' * 90 + "[]" + "}" * 90)
LARGE: dict[str, Any] = {
    "a text": "x" * (bodies.MOST_BODY_BYTES - 500),
    "a text of line ends": "\n" * (bodies.MOST_BODY_BYTES // 2 - 500),
    "a text as long as a prompt may be": "é" * (PROMPT_LIMIT_BYTES // 3),
    "ids": [1234567] * _ITEMS,
    "texts": ["x"] * _ITEMS,
    "different texts": [f"{number:06}" for number in range(_ITEMS)],
    "lists": [[] for _ in range(_PARTS)],
    "lists of ids": [[1] * 1024 for _ in range(250)],
    "objects": [{} for _ in range(_PARTS)],
    "messages": [TURN] * (_PARTS // 4),
    "parts": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (_PARTS // 3)}],
    "calls": [{"role": "assistant", "content": "", "tool_calls": [CALL] * (_PARTS // 9)}],
    "results": [{"type": "function_call_output", "call_id": "c", "output": "x"}] * (_PARTS // 4),
    "past calls": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    * (_PARTS // 5),
    "tools": [TOOL] * 1024,
    "too many tools": [TOOL] * (_PARTS // 9),
    "large tools": [{**TOOL, "parameters": {"properties": {f"p{n}": {} for n in range(60)}}}]
    * (_PARTS // 140),
    "fields": {f"f{number}": number for number in range(_PARTS)},
    "objects by name": {f"f{number}": {} for number in range(_PARTS // 2)},
    "a schema": {"allOf": [{"properties": {"a": {}}}] * (_PARTS // 6)},
    "a depth": [_DEEP] * (_PARTS // 200),
    "an enum": {"enum": ["x"] * _ITEMS},
    "numbers of a hundred digits": [int("9" * 100)] * 100_000,
}


_TEXTS = tuple(name for name in LARGE if name.startswith("a text"))
_OBJECTS = ("fields", "objects by name", "a schema", "an enum", "a depth")
_KINDS = {"type": "json_schema"}
"""A format of an answer has its schema only if its type is this."""


def _is_taken(annotation: Any, what: str) -> bool:
    """Whether a field of a type may take a large value; a number or a word is refused by its
    type."""
    if annotation is Any:
        return True
    name = str(annotation)
    if what in _TEXTS:
        return "str" in name
    if what in _OBJECTS and what != "a depth":
        return "dict" in name.partition("list[")[0]
    return "list[" in name


def cases(model: type[BaseModel]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """The fields of a form and of the forms in it, each with its large values by their names.

    One field stands for all that take any value and have no effect, except those that an answer
    repeats.
    """
    has_ignored = False
    for field, info in model.model_fields.items():
        name = info.alias or field
        if info.annotation is Any and name not in ("metadata", "user"):
            if has_ignored:
                continue
            has_ignored = True
        large = [
            (what, {name: value})
            for what, value in LARGE.items()
            if _is_taken(info.annotation, what)
        ]
        if large:
            yield name, large
        for inner in _models(info.annotation):
            for inner_name, inner_large in cases(inner):
                yield (
                    f"{name}.{inner_name}",
                    [
                        (what, {name: _around(info.annotation, value)})
                        for what, value in inner_large
                    ],
                )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _around(annotation: Any, value: dict[str, Any]) -> Any:
    if "list[" in str(annotation):
        return [{"type": "function", "name": "f", **value}]
    return {**_KINDS, **value}


CASES = {
    f"{path} {name}: {what}": (path, value)
    for path, form in FORMS.items()
    for name, large in cases(form)
    for what, value in large
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@pytest.mark.timing
@pytest.mark.one_in(40)
@pytest.mark.parametrize("name", CASES)
def test_no_value_of_a_field_takes_long(gateway: Gateway, name: str) -> None:
    path, value = CASES[name]
    body = json.dumps(
        {"model": "m", **NEEDED.get(path, {}), **value}, separators=(",", ":")
    ).encode()
    answer = gateway.post(path, body)
    longest_s = answer.longest_s
    for _ in range(TURNS - 1):
        if longest_s >= MAX_CALLBACK_S:
            longest_s = min(longest_s, gateway.post(path, body).longest_s)
    assert longest_s < MAX_CALLBACK_S and answer.status < 500, (longest_s, answer.status)
