"""Tables of the fields of a body, with the treatment of each, for documents. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from edgeshard.gateway.routes.fields import Treatment


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A field by its path in the body, such as `options.num_ctx`; `values` and `meaning` are words for people."""

    name: str
    treatment: Treatment
    values: str
    meaning: str


def field_rows(form: type[BaseModel], prefix: str = "") -> Iterator[FieldRow]:
    """A row for each field of a body and of the objects in it: required ones first, then by name."""
    schema = form.model_json_schema(by_alias=True)
    names = {name: item.alias or name for name, item in form.model_fields.items()}
    for name in sorted(names, key=lambda name: (not form.model_fields[name].is_required(), names[name])):
        item = form.model_fields[name]
        field_name = f"{prefix}{names[name]}"
        meaning = item.description or ""
        if item.is_required():
            meaning = f"required; {meaning}" if meaning else "required"
        treatment = treatment_of(item)
        values = "empty" if treatment is Treatment.REFUSED else values_text(schema["properties"][names[name]])
        yield FieldRow(field_name, treatment, values, meaning)
        for inner, is_list in _objects(item.annotation):
            yield from field_rows(inner, f"{field_name}{'[]' if is_list else ''}.")


def treatment_of(item: FieldInfo) -> Treatment:
    """The treatment that a field's declaration names."""
    marks = [mark for mark in item.metadata if isinstance(mark, Treatment)]
    return marks[0] if marks else Treatment.ACCEPTED


def _objects(annotation: Any, is_list: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """The classes of bodies in a field's type, and whether they are items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_list
        return
    is_list = is_list or getattr(annotation, "__origin__", None) is list
    for part in get_args(annotation):
        yield from _objects(part, is_list)


_KINDS = {"string": "text", "boolean": "true or false", "object": "object"}


def values_text(schema: dict[str, Any]) -> str:
    """The values of a field in words, by its JSON schema."""
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"] if value is not None)
    if "anyOf" in schema:
        kinds = dict.fromkeys(values_text(kind) for kind in schema["anyOf"] if kind.get("type") != "null")
        return " or ".join(kinds)
    if "const" in schema:
        return json.dumps(schema["const"])
    if "$ref" in schema:
        return "object"
    kind = schema.get("type", "")
    if kind == "array":
        inner = values_text(schema.get("items", {}))
        return f"list of ({inner})" if "," in inner or " or " in inner else f"list of {inner}"
    if kind in ("number", "integer"):
        return ", ".join(part for part in ("whole number" if kind == "integer" else kind, _bounds(schema)) if part)
    return _KINDS.get(kind, "any")


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{low} to {high}"
    above = schema.get("exclusiveMinimum")
    parts = (f"above {above}" if above is not None else "", f"{low} or more" if low is not None else "")
    most = f"at most {high}" if high is not None else ""
    return ", ".join(part for part in (*parts, most) if part)
