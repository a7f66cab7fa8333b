# ruff: noqa: T201
"""Label many texts, each with a JSON object of one schema.

    python label.py MODEL TEXTS.txt > labels.jsonl

Every line of the file is a text; the output has a line for each, in the same order. What is no object of the schema is
asked for again with another seed, and after three times it is an error, which stands in its line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from edgeshard import Client
from edgeshard.client import Chat, ChatCompletion

MOODS = ("glad", "sad", "angry", "calm")
SYSTEM = f'Answer with nothing but JSON: {{"mood": one of {json.dumps(MOODS)}, "animals": true or false}}'
ATTEMPTS = 3


def label_of(text: str) -> dict[str, Any] | None:
    """The label in an answer; None where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.keys() != {"mood", "animals"}:
        return None
    return value if value["mood"] in MOODS and isinstance(value["animals"], bool) else None


async def label(client: Client, model: str, texts: list[str]) -> list[dict[str, Any]]:
    labels: dict[int, dict[str, Any]] = {}
    for seed in range(ATTEMPTS):
        left = [place for place in range(len(texts)) if "mood" not in labels.get(place, {})]
        requests = [
            Chat(
                model,
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": texts[place]}],
                options={"max_new_tokens": 48, "temperature": 0.5, "seed": seed},
            )
            for place in left
        ]
        for place, result in zip(left, await client.batch(requests, concurrency=16, on_progress=progress), strict=True):
            found = label_of(result.content) if isinstance(result, ChatCompletion) else None
            labels[place] = found or {"error": "no label" if isinstance(result, ChatCompletion) else str(result)}
    return [labels[place] for place in range(len(texts))]


def progress(done: int, count: int) -> None:
    print(f"\r{done} of {count}", end="\n" if done == count else "", file=sys.stderr, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    options = parser.parse_args()
    texts = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    async with Client() as client:
        for text, found in zip(texts, await label(client, options.model, texts), strict=True):
            print(json.dumps({"text": text, **found}, ensure_ascii=False))


if __name__ == "__main__":
    asyncio.run(main())
