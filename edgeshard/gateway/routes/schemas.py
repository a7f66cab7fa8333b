"""Objects of a JSON schema, closed where the schema leaves open whether they are.

By the standard an object may have any keys that its schema does not name, and a model that is held to no more than that
writes further ones without end. A schema for an answer means the keys that it names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_SAYS = frozenset({"additionalProperties", "unevaluatedProperties"})
_OF_ONE = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "additionalItems",
    "unevaluatedItems",
    "then",
    "else",
)
_OF_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def closed(schema: Schema) -> Schema:
    """A copy in which an object with `properties` has no others.

    Left as they are: an object that says so itself (`additionalProperties`, `unevaluatedProperties`), one without
    `properties`, whose keys are free, and one whose properties come from several schemas at once (as with allOf),
    with all of these, since none of them knows the others' properties.
    """
    copy: Schema = json.loads(json.dumps(schema))
    nodes = _reached([copy], lambda node: (*_subschemas(node), *_referred(node, copy)))
    composed = _composed(nodes, copy)
    for node in nodes:
        if "properties" in node and not _SAYS & node.keys() and id(node) not in composed:
            node["additionalProperties"] = False
    return copy


_VALUES = frozenset({"const", "default", "enum", "examples"})
"""The keywords whose values are no schemas."""


def without_nulls(schema: Any) -> Any:
    """A copy of a schema without keywords that are null, which clients write for absent ones."""
    if isinstance(schema, list):
        return [without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy: Schema = {}
    for key, value in schema.items():
        if key in _VALUES:
            copy[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            copy[key] = {name: without_nulls(part) for name, part in value.items() if part is not None}
        elif value is not None:
            copy[key] = without_nulls(value)
    return copy


def _composed(nodes: list[Schema], root: Schema) -> set[int]:
    """The ids of schemas that together say which properties an object has."""
    groups = {id(node): [list(group) for group in _groups(node, root)] for node in nodes}
    users: dict[int, list[Schema]] = {}
    for node in nodes:
        for part in (part for group in groups[id(node)] for part in group):
            users.setdefault(id(part), []).append(node)
    declaring = [node for node in nodes if node.keys() & {"properties", "patternProperties"}]
    adding = {id(node) for node in _reached(declaring, lambda node: users.get(id(node), ()))}

    def sources(node: Schema) -> int:
        own = bool(node.keys() & {"properties", "patternProperties"})
        return own + sum(any(id(part) in adding for part in group) for group in groups[id(node)])

    several = [node for node in nodes if sources(node) > 1]
    parts = _reached(several, lambda node: (part for group in groups.get(id(node), ()) for part in group))
    return {id(node) for node in parts}


def _groups(node: Schema, root: Schema) -> Iterator[Iterator[Schema]]:
    """Schemas of the same object as `node`: of one group it is of one, of all groups at once."""
    for part in _schemas(node.get("allOf")):
        yield iter((part,))
    yield _schemas(node.get("anyOf"))
    yield _schemas(node.get("oneOf"))
    yield (part for name in ("if", "then", "else") for part in _schemas([node.get(name)]))
    dependent = node.get("dependentSchemas")
    for part in _schemas(list(dependent.values()) if isinstance(dependent, dict) else None):
        yield iter((part,))
    yield _referred(node, root)


def _subschemas(node: Schema) -> Iterator[Schema]:
    for name in _OF_ONE:
        yield from _schemas([node.get(name)])
    for name in _OF_SEVERAL:
        yield from _schemas(node.get(name))
    for name in _BY_NAME:
        named = node.get(name)
        yield from _schemas(list(named.values()) if isinstance(named, dict) else None)


def _schemas(values: Any) -> Iterator[Schema]:
    return (value for value in values if isinstance(value, dict)) if isinstance(values, list) else iter(())


def _referred(node: Schema, root: Schema) -> Iterator[Schema]:
    """The schema that `$ref` names, where it is one of this document."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return
    found: Any = root
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
    if isinstance(found, dict):
        yield found


def _reached(first: list[Schema], following: Callable[[Schema], Any]) -> list[Schema]:
    """Each schema that is reached from the first ones, once."""
    found = {id(node): node for node in first}
    waiting = list(first)
    while waiting:
        for node in following(waiting.pop()):
            if id(node) not in found:
                found[id(node)] = node
                waiting.append(node)
    return list(found.values())
