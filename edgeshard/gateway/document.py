"""The gateway's OpenAPI document: the forms of bodies and answers, and tables of the fields of a
body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from edgeshard.gateway.errors import ErrorBody
from edgeshard.gateway.routes.body_fields import Treatment


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A field by its path in the body, such as `options.num_ctx`; `values` and `meaning` are words
    for people."""

    name: str
    treatment: Treatment
    values: str
    meaning: str


def field_rows(form: type[BaseModel], prefix: str = "") -> Iterator[FieldRow]:
    """A row for each field of a body and of the objects in it: required ones first, then by
    name."""
    schema = form.model_json_schema(by_alias=True)
    names = {name: item.alias or name for name, item in form.model_fields.items()}
    for name in sorted(
        names, key=lambda name: (not form.model_fields[name].is_required(), names[name])
    ):
        item = form.model_fields[name]
        field_name = f"{prefix}{names[name]}"
        meaning = item.description or ""
        if item.is_required():
            meaning = f"required; {meaning}" if meaning else "required"
        treatment = treatment_of(item)
        values = (
            "empty"
            if treatment is Treatment.REFUSED
            else values_text(schema["properties"][names[name]])
        )
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
        kinds = dict.fromkeys(
            values_text(kind) for kind in schema["anyOf"] if kind.get("type") != "null"
        )
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
        return ", ".join(
            part
            for part in ("whole number" if kind == "integer" else kind, _bounds(schema))
            if part
        )
    return _KINDS.get(kind, "any")


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{low} to {high}"
    above = schema.get("exclusiveMinimum")
    parts = (
        f"above {above}" if above is not None else "",
        f"{low} or more" if low is not None else "",
    )
    most = f"at most {high}" if high is not None else ""
    return ", ".join(part for part in (*parts, most) if part)


PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors "
    "'none'"
}
"""Headers of the page: a browser loads nothing for it."""
_REF = "#/components/schemas/{model}"
_SCHEMA_NAMES = {"ChatCompletionObject": "ChatCompletion", "CompletionObject": "Completion"}
"""Names of schemas that differ from their classes' names, which the SDK uses for its own
answers."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class CompletionObject(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletionObject(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok"]


class Version(BaseModel):
    version: str


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(BaseModel):
    prompt: str


class OllamaError(BaseModel):
    error: str


class OllamaAnswer(BaseModel):
    model: str
    created_at: str
    done: bool
    done_reason: str


class OllamaModels(BaseModel):
    models: list[dict[str, Any]]


class OllamaModel(BaseModel):
    modified_at: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


_REFUSALS = {
    400: "The request is invalid or not supported; `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "The key is not for this model, or the request comes from a page of another site.",
    404: "There is no such model.",
    409: "This id exists already.",
    413: "The body is too large, decoded.",
    415: "The body's Content-Encoding is not supported.",
    429: "Too many requests; Retry-After gives the delay before a retry.",
    500: "The site failed.",
    503: "The deployment does not answer at the moment.",
    504: "It took too long.",
}


def answers_of(
    answer: type[BaseModel], *, stream: str = "", ollama: bool = False
) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of a route; `stream` is the media type of its stream."""
    content: dict[str, Any] = {"content": {stream: {"schema": {}}}} if stream else {}
    return refusals_of(ollama=ollama) | {
        200: {"model": answer, "description": "The answer.", **content}
    }


def refusals_of(*, ollama: bool = False) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of a route that returns only errors."""
    refusal = OllamaError if ollama else ErrorBody
    return {status: {"model": refusal, "description": text} for status, text in _REFUSALS.items()}


OPEN: dict[str, Any] = {"security": []}
"""FastAPI's `openapi_extra` of a route that requires no key."""


def body_of(form: type[BaseModel]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route that reads its body itself."""
    schema = {"$ref": _REF.format(model=form.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, bodies: Iterable[type[BaseModel]]) -> None:
    """Have the application's document name the forms of `bodies`, and the key."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema(
                [(form, "validation") for form in bodies], ref_template=_REF
            )
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions.get("$defs", {}))
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "key_header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            schema["security"] = [{"key": []}, {"key_header": []}]
            app.openapi_schema = _with_schema_names(schema)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _with_schema_names(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the names of `_SCHEMA_NAMES` as keys, titles and ends of references."""
    text = json.dumps(document)
    for kind, name in _SCHEMA_NAMES.items():
        text = re.sub(rf'(?<=["/]){kind}(?=")', name, text)
    renamed: dict[str, Any] = json.loads(text)
    return renamed


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border:1px solid #999;padding:.2rem "
    ".5rem;text-align:left}"
    "code{font-family:ui-monospace,monospace}"
)


def page(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> str:
    """The application's routes as a page for people, in HTML without scripts; `bodies` are the
    forms by their paths."""
    document = app.openapi()
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>EdgeShard</title>'
        f"<style>{_STYLE}</style><h1>EdgeShard {escape(document['info']['version'])}</h1>"
        '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>'
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            key = "no key" if operation.get("security") == [] else "with a key"
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{key}</p>")
        if path in bodies:
            parts += _table(bodies[path])
    return "".join(parts)


def _table(form: type[BaseModel]) -> Iterator[str]:
    """The fields of a body as a table."""
    yield "<table><tr><th>field</th><th>treatment</th><th>values</th><th>meaning</th></tr>"
    for row in field_rows(form):
        cells = (row.name, row.treatment, row.values, row.meaning)
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"
