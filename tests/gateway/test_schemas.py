"""Objects are closed if a schema leaves it open, and nowhere else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import GUIDE_LIMIT_BYTES
from edgeshard.gateway.routes import schemas
from edgeshard.gateway.routes.schemas import check_schema, closed, without_nulls

TEXT = {"type": "string"}
POINT = {"type": "object", "properties": {"x": TEXT}}
SHUT = {**POINT, "additionalProperties": False}
OTHER = {"properties": {"y": TEXT}}
OTHER_SHUT = {**OTHER, "additionalProperties": False}


def point(**more: Any) -> dict[str, Any]:
    return {**POINT, **more}


def shut(**more: Any) -> dict[str, Any]:
    return {**SHUT, **more}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an object": (POINT, SHUT),
    "one without properties yet": (point(properties={}), shut(properties={})),
    "one with patterns too": (
        point(patternProperties={"^z": TEXT}),
        shut(patternProperties={"^z": TEXT}),
    ),
    "in a property": (
        {"properties": {"p": POINT}},
        {"properties": {"p": SHUT}, "additionalProperties": False},
    ),
    "in a list": ({"items": POINT}, {"items": SHUT}),
    "in places": (
        {"prefixItems": [POINT, TEXT], "items": OTHER},
        {"prefixItems": [SHUT, TEXT], "items": OTHER_SHUT},
    ),
    "as values": ({"additionalProperties": POINT}, {"additionalProperties": SHUT}),
    "in $defs": (
        {"$ref": "#/$defs/p", "$defs": {"p": POINT, "unused": OTHER}},
        {"$ref": "#/$defs/p", "$defs": {"p": SHUT, "unused": OTHER_SHUT}},
    ),
    "in definitions with odd names": (
        {"properties": {"a": {"$ref": "#/definitions/a~1b%20c"}}, "definitions": {"a/b c": POINT}},
        {
            "properties": {"a": {"$ref": "#/definitions/a~1b%20c"}},
            "additionalProperties": False,
            "definitions": {"a/b c": SHUT},
        },
    ),
    "elsewhere": ({"$ref": "#/x/0", "x": [POINT]}, {"$ref": "#/x/0", "x": [SHUT]}),
    "of itself": (
        {"properties": {"next": {"$ref": "#"}}},
        {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    ),
    "an optional one": ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
    "one of two": ({"oneOf": [POINT, OTHER]}, {"oneOf": [SHUT, OTHER_SHUT]}),
    "alone in allOf": (
        {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": POINT}},
        {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": SHUT}},
    ),
    "a composition that adds no properties": (
        point(anyOf=[{"required": ["x"]}, {"minProperties": 1}]),
        shut(anyOf=[{"required": ["x"]}, {"minProperties": 1}]),
    ),
    "an object inside a composition's property": (
        {"allOf": [{"properties": {"p": POINT}}, OTHER]},
        {"allOf": [{"properties": {"p": SHUT}}, OTHER]},
    ),
    "values that look like schemas": (
        point(default=POINT, enum=[POINT]),
        shut(default=POINT, enum=[POINT]),
    ),
    "a property named as a keyword": (
        {"properties": {"properties": POINT, "default": OTHER}},
        {"properties": {"properties": SHUT, "default": OTHER_SHUT}, "additionalProperties": False},
    ),
}
OPEN: dict[str, dict[str, Any]] = {
    "it says so": point(additionalProperties=True),
    "it says of what": point(additionalProperties=TEXT),
    "it says so otherwise": point(unevaluatedProperties=False),
    "a free object": {"type": "object"},
    "patterns alone": {"patternProperties": {"^z": TEXT}},
    "several at once": {"allOf": [POINT, OTHER]},
    "beside its own": point(allOf=[OTHER]),
    "beside one of several": point(oneOf=[OTHER, {"required": ["x"]}]),
    "beside a reference": point(**{"$ref": "#/$defs/o", "$defs": {"o": OTHER}}),
    "by a condition": point(**{"if": {"required": ["x"]}, "then": OTHER}),
    "by another property": point(dependentSchemas={"x": OTHER}),
    "far down": {
        "allOf": [{"$ref": "#/$defs/a"}, POINT],
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, TEXT]}, "b": OTHER},
    },
    "what a composition uses elsewhere too": {
        "prefixItems": [{"$ref": "#/$defs/o"}, {"allOf": [{"$ref": "#/$defs/o"}, POINT]}],
        "$defs": {"o": OTHER},
    },
    "a condition": {"if": POINT, "not": POINT},
    "no schema of an object": {"type": "string"},
    "nothing sensible": {
        "properties_": 1,
        "allOf": 3,
        "$ref": 7,
        "$defs": [],
        "items": True,
        "anyOf": [1, None],
    },
    "what is not there": {"$ref": "#/$defs/none"},
    "what is no schema": {"items": {"$ref": "#/items/$ref/0"}},
}


@pytest.mark.parametrize("name", CASES)
def test_an_object_with_properties_has_no_others(name: str) -> None:
    schema, expected = CASES[name]
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before and closed(expected) == expected


@pytest.mark.parametrize("name", OPEN)
def test_what_says_so_or_cannot_be_closed_stays_open(name: str) -> None:
    assert closed(OPEN[name]) == OPEN[name]


def test_a_schema_that_refers_to_itself_over_and_over_takes_no_time() -> None:
    count = 20_000
    names = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{(n + 1) % count}"}, {"$ref": "#/$defs/d0"}]}
        for n in range(count)
    }
    began = time.process_time()
    assert closed({"$ref": "#/$defs/d0", "$defs": {**names, "p": POINT}})["$defs"]["p"] == SHUT
    assert time.process_time() - began < 5


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def of_parts(count: int) -> dict[str, Any]:
    """Objects that are each a part of a composition, which take longest."""
    several: list[dict[str, Any]] = [{"properties": {"a": {}}} for _ in range(count // 3)]
    return {"allOf": several}


LARGEST: dict[str, dict[str, Any]] = {
    "bytes": {"description": "x" * (GUIDE_LIMIT_BYTES - 20)},
    "objects": of_parts(schemas.MAX_PARTS - 3),
    "depth": nested(schemas.MAX_DEPTH),
    "references": {
        "$defs": {"a": POINT},
        "allOf": [{"$ref": "#/$defs/a"}] * schemas.MAX_REFERENCES,
    },
    "reference": {"allOf": [{"$ref": "#" + "/" * (schemas.MAX_REFERENCE_CHARACTERS - 1)}] * 100},
}
TOO_LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"description": "x" * GUIDE_LIMIT_BYTES}, "bytes"),
    "names": (
        {"properties": {f"{number:08}": 1 for number in range(GUIDE_LIMIT_BYTES // 8)}},
        "bytes",
    ),
    "numbers": ({"enum": [1] * GUIDE_LIMIT_BYTES}, "bytes"),
    "a million numbers": ({"enum": [1] * 1_000_000}, "bytes"),
    "objects": (of_parts(schemas.MAX_PARTS + 3), "lists and objects"),
    "depth": (nested(schemas.MAX_DEPTH + 1), "deeper"),
    "references": ({"allOf": [{"$ref": "#"}] * (schemas.MAX_REFERENCES + 1)}, "references"),
    "a long reference": (
        {"$ref": "#" + "/" * schemas.MAX_REFERENCE_CHARACTERS},
        "reference of more",
    ),
    "infinity": ({"maximum": float("inf")}, "number"),
}


def processor_s(work: Callable[[], object]) -> float:
    """The seconds of the processor that the fastest of three turns takes."""
    taken = []
    for _ in range(3):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return min(taken)


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_schema_that_is_taken_is_closed_at_once(name: str) -> None:
    def close() -> None:
        check_schema(LARGEST[name], "format")
        closed(without_nulls(LARGEST[name]))

    assert processor_s(close) < 0.1


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_schema_that_is_too_large_is_refused_at_once(name: str) -> None:
    schema, word = TOO_LARGE[name]

    def check() -> None:
        with pytest.raises(InvalidArgumentError, match=word) as refused:
            check_schema(schema, "format")
        assert refused.value.field == "format"

    assert processor_s(check) < 0.1


def test_steps_from_schema_to_schema_are_counted() -> None:
    assert closed(LARGEST["references"])
    with pytest.raises(InvalidArgumentError, match="refers too often"):
        closed(LARGEST["references"], max_steps=1000)
