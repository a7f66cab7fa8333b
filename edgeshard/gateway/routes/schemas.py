"""JSON schemas of requests: their size, and their objects, closed unless the schema sets that
itself.

By the standard an object may have any keys that its schema does not name, and a model under only
that constraint writes further ones without end. A schema for an answer means the keys that it
names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import GUIDE_LIMIT_BYTES

Schema = dict[str, Any]

MAX_PARTS = 4096
"""The most lists and objects of a schema, each of which costs some 15 us."""
MAX_DEPTH = 64
"""The most lists and objects within each other."""
MAX_REFERENCES = 1024
MAX_REFERENCE_CHARACTERS = 1024
MAX_STEPS = 1 << 17
"""The most steps from schema to schema that `closed` goes; a schema that `check_schema` takes needs
fewer."""
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
_GROUPING = frozenset({"allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref"})
"""The keywords that combine several schemas for one object."""


def check_schema(schema: Any, field: str) -> None:
    """Raise InvalidArgumentError naming `field` if a schema, or several in a list, is larger than a
    guide may be.

    It checks no more than the bounds allow, and precedes every copy or walk of a schema.
    """
    size = parts = references = 0
    waiting = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise _too_much(field, "has a number beyond what JSON readers take")
        elif isinstance(value, dict | list):
            parts += 1
            if depth > MAX_DEPTH:
                raise _too_much(field, f"is nested deeper than {MAX_DEPTH} levels")
            if len(value) > GUIDE_LIMIT_BYTES - size:
                raise _too_long(field)
            if isinstance(value, dict):
                size += sum(map(len, value))
                references += _references(value, field)
            waiting += [
                (part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)
            ]
        if size > GUIDE_LIMIT_BYTES:
            raise _too_long(field)
        if parts > MAX_PARTS:
            raise _too_much(field, f"has more than {MAX_PARTS} lists and objects")
        if references > MAX_REFERENCES:
            raise _too_much(field, f"has more than {MAX_REFERENCES} references")


def _references(node: Schema, field: str) -> int:
    """The number of references that an object of a schema has itself: 0 or 1."""
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return 0
    if len(reference) > MAX_REFERENCE_CHARACTERS:
        raise _too_much(
            field, f"has a reference of more than {MAX_REFERENCE_CHARACTERS} characters"
        )
    return 1


def _too_long(field: str) -> InvalidArgumentError:
    rule = f"{field}: the JSON schema has more than {GUIDE_LIMIT_BYTES} bytes: make it smaller"
    return InvalidArgumentError(rule, field=field, reason="GUIDE_TOO_LONG")


def _too_much(field: str, what: str) -> InvalidArgumentError:
    rule = f"{field}: the JSON schema {what}: make it simpler"
    return InvalidArgumentError(rule, field=field, reason="GUIDE_INVALID")


def closed(schema: Schema, max_steps: int = MAX_STEPS) -> Schema:
    """A copy in which an object with `properties` has no others.

    Some objects stay open: one that sets this itself (`additionalProperties`,
    `unevaluatedProperties`), and one without `properties`, whose keys are free. So does one whose
    properties are from several schemas at once (as with allOf), with all of these, since none of
    them knows the others' properties. Raises InvalidArgumentError naming `guide` if that takes more
    than `max_steps`.
    """
    copy: Schema = json.loads(json.dumps(schema))
    walk = _Walk(max_steps)
    nodes = walk.reached([copy], lambda node: (*_subschemas(node), *_referred(node, copy)))
    composed = _composed(nodes, copy, walk)
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
            copy[key] = {
                name: without_nulls(part) for name, part in value.items() if part is not None
            }
        elif value is not None:
            copy[key] = without_nulls(value)
    return copy


def _composed(nodes: list[Schema], root: Schema, walk: _Walk) -> set[int]:
    """The ids of schemas that together define an object's properties."""
    groups = {id(node): [list(group) for group in _groups(node, root)] for node in nodes}
    users: dict[int, list[Schema]] = {}
    for node in nodes:
        for part in (part for group in groups[id(node)] for part in group):
            users.setdefault(id(part), []).append(node)
    declaring = [node for node in nodes if node.keys() & {"properties", "patternProperties"}]
    adding = {id(node) for node in walk.reached(declaring, lambda node: users.get(id(node), ()))}

    def sources(node: Schema) -> int:
        own = bool(node.keys() & {"properties", "patternProperties"})
        return own + sum(any(id(part) in adding for part in group) for group in groups[id(node)])

    several = [node for node in nodes if sources(node) > 1]
    parts = walk.reached(
        several, lambda node: (part for group in groups.get(id(node), ()) for part in group)
    )
    return {id(node) for node in parts}


def _groups(node: Schema, root: Schema) -> Iterator[Iterator[Schema]]:
    """Schemas of the same object as `node`: it matches one of a group, and all groups at once."""
    if _GROUPING.isdisjoint(node):
        return
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
    for name, value in node.items():
        if name in _OF_ONE and isinstance(value, dict):
            yield value
        elif name in _OF_SEVERAL:
            yield from _schemas(value)
        elif name in _BY_NAME and isinstance(value, dict):
            yield from _schemas(list(value.values()))


def _schemas(values: Any) -> Iterator[Schema]:
    return (
        (value for value in values if isinstance(value, dict))
        if isinstance(values, list)
        else iter(())
    )


def _referred(node: Schema, root: Schema) -> Iterator[Schema]:
    """The schema that `$ref` names, if it is in this document."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return
    target: Any = root
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name)
        elif isinstance(target, list):
            target = target[int(name)] if name.isdecimal() and int(name) < len(target) else None
    if isinstance(target, dict):
        yield target


class _Walk:
    """Ways through a schema, with a bound of their steps together."""

    def __init__(self, max_steps: int) -> None:
        self._left = max_steps

    def reached(
        self, first: list[Schema], following: Callable[[Schema], Iterable[Schema]]
    ) -> list[Schema]:
        """Each schema that is reached from the first ones, once."""
        schemas = {id(node): node for node in first}
        waiting = list(first)
        while waiting:
            for node in following(waiting.pop()):
                self._left -= 1
                if self._left < 0:
                    raise _too_much("guide", "refers too often to itself")
                if id(node) not in schemas:
                    schemas[id(node)] = node
                    waiting.append(node)
        return list(schemas.values())
