"""Errors as OpenAI's bodies, by one table off the typed errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from edgeshard.domain.errors import Code, EdgeShardError, InvalidArgumentError
from edgeshard.gateway.json_text import json_text

STATUSES: Mapping[Code, tuple[int, str]] = {
    Code.CANCELLED: (499, "cancelled_error"),
    Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
    Code.NOT_FOUND: (404, "invalid_request_error"),
    Code.ALREADY_EXISTS: (409, "invalid_request_error"),
    Code.PERMISSION_DENIED: (403, "permission_error"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    Code.FAILED_PRECONDITION: (400, "invalid_request_error"),
    Code.ABORTED: (409, "invalid_request_error"),
    Code.INTERNAL: (500, "server_error"),
    Code.UNAVAILABLE: (503, "server_error"),
    Code.DATA_LOSS: (500, "server_error"),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
}
"""A typed error's HTTP status and the `type` of its body."""
_STATUSES_OF_REASONS = {"BODY_TOO_LARGE": 413, "UNSUPPORTED_ENCODING": 415}
"""Statuses of reasons that HTTP has one for."""
OVERFLOW = "context_length_exceeded"
CODES = {
    "MODEL_NOT_SERVED": "model_not_found",
    "QUOTA": "rate_limit_exceeded",
    "CONTEXT_EXCEEDED": OVERFLOW,
    "PROMPT_TOO_LONG": OVERFLOW,
}
"""Reasons that programs know by another `code`; the others are their own in lower case."""
_MOST_FAULTS = 1000
"""The most faults of a body that are examined one by one."""
_MAX_NAME_CHARACTERS = 200
"""The longest name of a field in an error: a client may use any name."""
OLLAMA = "/api/"
"""The beginning of paths whose errors are Ollama's: a text."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The form of every refusal."""

    error: ErrorDetail


def body_of(error: EdgeShardError) -> dict[str, Any]:
    """The body of a typed error in OpenAI's form."""
    code = CODES.get(error.reason, error.reason.lower())
    return error_body(error.message, STATUSES[error.code][1], error.field or None, code)


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: EdgeShardError, path: str = "") -> Response:
    """The error as an answer to a request for `path`, with Retry-After if a retry may help."""
    headers = {"x-should-retry": "true" if error.retry_after_s is not None else "false"}
    if error.retry_after_s is not None:
        headers |= {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(math.ceil(1000 * error.retry_after_s)),
        }
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    body = {"error": error.message} if path.startswith(OLLAMA) else body_of(error)
    status = _STATUSES_OF_REASONS.get(error.reason, STATUSES[error.code][0])
    return json_response(body, status, headers)


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """The body as JSON. A lone surrogate, which is no text, leaves as an escape, which JSON
    allows."""
    return Response(json_text(body), status, headers, media_type="application/json")


def renamed(
    error: EdgeShardError, names: Mapping[str, str], max_context: int = 0
) -> EdgeShardError:
    """The error with the name that the caller knows the field by.

    If a prompt exceeds a context of `max_context` tokens (0: unknown), the error has OpenAI's
    words, too: LiteLLM and LangChain search for them in the text, and switch to a model with a
    larger context.
    """
    name, message = names.get(error.field, error.field), error.message
    if name != error.field:
        message = message.replace(error.field, name)
    if CODES.get(error.reason) == OVERFLOW:
        limit = (
            f"This model's maximum context length is {max_context} tokens. " if max_context else ""
        )
        message = f"{limit}{message} ({OVERFLOW})"
    if message == error.message:
        return error
    return type(error)(message, field=name, reason=error.reason, retry_after_s=error.retry_after_s)


def refusal_of(error: ValidationError) -> InvalidArgumentError:
    """The first fault of a body, by the field's name; never the field's value, which is private."""
    if error.error_count() > _MOST_FAULTS:
        return InvalidArgumentError(
            f"the body has {error.error_count()} faults", reason="INVALID_VALUE"
        )
    faults = error.errors(include_url=False, include_context=True, include_input=False)
    # A union reports each of its kinds; the deepest one was meant.
    first = (
        max(faults, key=lambda item: len(item["loc"]))
        if len({item["loc"][:1] for item in faults}) == 1
        else faults[0]
    )
    name = _name(first["loc"])
    match first["type"]:
        case "extra_forbidden":
            return InvalidArgumentError(
                f"{name} is not supported here: leave it out",
                field=name,
                reason="UNSUPPORTED_PARAMETER",
            )
        case "missing":
            return InvalidArgumentError(
                f"{name} is required", field=name, reason="MISSING_REQUIRED_PARAMETER"
            )
        case "json_invalid":
            return InvalidArgumentError("the body is not JSON", reason="INVALID_JSON")
    cause, message = first.get("ctx", {}).get("error"), first["msg"].removeprefix("Value error, ")
    reason = "INVALID_VALUE"
    if isinstance(cause, Refused):
        reason = cause.reason
        name = ".".join(part for part in (name, cause.field) if part)
    return InvalidArgumentError(
        f"{name or 'the body'}: {message[:1].lower()}{message[1:]}", field=name, reason=reason
    )


class Refused(ValueError):
    """The error of a field's check: its value is known, and not supported here.

    `field` is the name of the field if the check is one of the object around it.
    """

    def __init__(self, message: str, reason: str = "UNSUPPORTED_VALUE", field: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field


_KINDS = frozenset({"str", "int", "float", "bool", "none"})


def _name(loc: tuple[int | str, ...]) -> str:
    """The name `messages[0].content` of ('messages', 0, 'content'), without pydantic's names of a
    union's kinds."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif "[" not in part and "(" not in part and not part[:1].isupper() and part not in _KINDS:
            name += f".{part}" if name else part
        if len(name) > _MAX_NAME_CHARACTERS:
            return f"{name[:_MAX_NAME_CHARACTERS]}..."
    return name
