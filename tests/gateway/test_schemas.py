"""Objects are closed where a schema leaves it open, and nowhere else."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from edgeshard.gateway.routes.schemas import closed

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
    "one with patterns too": (point(patternProperties={"^z": TEXT}), shut(patternProperties={"^z": TEXT})),
    "in a property": ({"properties": {"p": POINT}}, {"properties": {"p": SHUT}, "additionalProperties": False}),
    "in a list": ({"items": POINT}, {"items": SHUT}),
    "in places": ({"prefixItems": [POINT, TEXT], "items": OTHER}, {"prefixItems": [SHUT, TEXT], "items": OTHER_SHUT}),
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
    "values that look like schemas": (point(default=POINT, enum=[POINT]), shut(default=POINT, enum=[POINT])),
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
    "nothing sensible": {"properties_": 1, "allOf": 3, "$ref": 7, "$defs": [], "items": True, "anyOf": [1, None]},
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
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{(n + 1) % count}"}, {"$ref": "#/$defs/d0"}]} for n in range(count)
    }
    began = time.process_time()
    assert closed({"$ref": "#/$defs/d0", "$defs": {**names, "p": POINT}})["$defs"]["p"] == SHUT
    assert time.process_time() - began < 5
