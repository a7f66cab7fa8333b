"""Bodies that cost much to prepare, shown by somebody with a key. For sites of one's own on
loopback."""

from __future__ import annotations

import json
from typing import Any

from tests.attack.raw import dial, head, status_of

ANSWERS_S = 20.0


def bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """Path and body, by the cause of their cost."""
    biases = {str(token): 1 for token in range(20_000)}
    completion = {"model": model, "prompt": "x", "max_tokens": 1}
    schemas = {
        "many allOf": {"type": "object", "allOf": [{"type": "string", "minLength": 1}] * 20_000},
        "many properties": {
            "type": "object",
            "properties": {f"p{n}": {"type": "string"} for n in range(40_000)},
        },
        "a long reference": {"$ref": "#" + "/" * 8_000_000},
        "many definitions": {
            "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(40_000)}
        },
    }
    talk = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}}
        for n in range(8000)
    ]
    found: dict[str, tuple[str, Any]] = {
        "prompts, answers and biases": (
            "/v1/completions",
            {**completion, "prompt": ["x"] * 256, "n": 16, "logit_bias": biases},
        ),
        "prompts and answers": ("/v1/completions", {**completion, "prompt": ["x"] * 256, "n": 16}),
        "many stop strings": ("/v1/completions", {**completion, "stop": ["x"] * 100_000}),
        "many tools": ("/v1/chat/completions", {**talk, "tools": tools}),
        "a large bias": ("/v1/chat/completions", {**talk, "logit_bias": {"9999999999": 1}}),
        **{
            name: ("/v1/chat/completions", {**talk, "response_format": _format(schema)})
            for name, schema in schemas.items()
        },
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in found.items()}


def _format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


async def send(url: str, key: str, path: str, body: bytes) -> int:
    """The status of one POST (`raw.status_of`)."""
    reader, writer = await dial(url)
    try:
        lines = (
            f"Content-Length: {len(body)}",
            "Content-Type: application/json",
            "Connection: close",
        )
        writer.write(head("POST", path, key, *lines) + body)
        return await status_of(reader, ANSWERS_S)
    finally:
        writer.close()
