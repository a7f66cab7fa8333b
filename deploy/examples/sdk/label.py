# ruff: noqa: T201
"""Label many texts, each with a JSON object of one schema.

    python label.py MODEL TEXTS.txt > labels.jsonl

Every line of the file is a text; the output has a line for each, in the same order. A guide holds
the model to the schema: it can write nothing else. A text that got no label for another reason has
an error in its line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from edgeshard import Client, errors
from edgeshard.client import Chat, ChatCompletion, Guide, GuideKind

SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["glad", "sad", "angry", "calm"]},
        "animals": {"type": "boolean"},
    },
    "required": ["mood", "animals"],
    "additionalProperties": False,
}
SYSTEM = (
    "What is the mood of this text, and are there animals in it? Answer in JSON: "
    f"{json.dumps(SCHEMA)}"
)


async def label(client: Client, model: str, texts: list[str]) -> list[dict[str, Any]]:
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))
    requests = [
        Chat(
            model,
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            options={"max_new_tokens": 64, "temperature": 0.0, "guide": guide},
        )
        for text in texts
    ]
    results = await client.batch(requests, concurrency=16, on_progress=progress)
    return [label_of(result) for result in results]


def label_of(result: object) -> dict[str, Any]:
    if isinstance(result, errors.EdgeShardError):
        return {"error": result.message}
    assert isinstance(result, ChatCompletion)
    try:
        found: dict[str, Any] = json.loads(result.content)
    except ValueError:  # max_new_tokens came before the object's end.
        return {"error": f"the answer ended early ({result.reason})"}
    return found


def progress(done: int, count: int) -> None:
    print(f"\r{done} of {count}", end="\n" if done == count else "", file=sys.stderr, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    options = parser.parse_args()
    texts = [
        line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    async with Client() as client:
        for text, found in zip(texts, await label(client, options.model, texts), strict=True):
            print(json.dumps({"text": text, **found}, ensure_ascii=False))


if __name__ == "__main__":
    asyncio.run(main())
