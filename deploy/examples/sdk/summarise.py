# ruff: noqa: T201
"""Summarise a document that is longer than the model's context.

    python summarise.py MODEL FILE [--words N]

The document is cut into pieces that fit, as few as possible. A long prompt passes the pipeline in
slices, so that all nodes work on it at once (the slices of HPipe's search). The pieces are
summarised in parallel. Their summaries are summarised in turn, until one is left.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from edgeshard import Client, errors
from edgeshard.client import Chat

ASK = "Summarise this in at most {words} words:\n\n"
KEPT_FREE = 32
"""Tokens of a prompt that a chat template may add."""


async def pieces_of(client: Client, model: str, text: str, most: int) -> list[str]:
    """The text in pieces of at most `most` tokens."""
    tokens = await client.tokenize(model, text, special=False)
    parts = [tokens[begin : begin + most] for begin in range(0, len(tokens), most)]
    return [await client.detokenize(model, part) for part in parts]


async def summarise(client: Client, model: str, text: str, words: int) -> str:
    served = {
        name: each
        for each in await client.served_models()
        for name in (each.deployment, each.model)
    }
    if model not in served:
        raise SystemExit(f"{model} is not served; there are {', '.join(sorted(served)) or 'none'}")
    ask, answer = ASK.format(words=words), 2 * words
    most = served[model].max_context - answer - KEPT_FREE - len(await client.tokenize(model, ask))
    if most <= answer:
        raise SystemExit(f"{model} has too small a context for summaries of {words} words")
    while True:
        pieces = await pieces_of(client, model, text, most)
        requests = [
            Chat(model, ask + piece, options={"max_new_tokens": answer}) for piece in pieces
        ]
        results = await client.batch(requests, concurrency=4, on_progress=progress)
        failed = [result for result in results if isinstance(result, errors.EdgeShardError)]
        if failed:
            raise failed[0]
        text = "\n".join(str(result) for result in results)
        if len(pieces) == 1:
            return text


def progress(done: int, count: int) -> None:
    print(
        f"\r{done} of {count} pieces",
        end="\n" if done == count else "",
        file=sys.stderr,
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--words", type=int, default=40)
    options = parser.parse_args()
    async with Client() as client:
        print(
            await summarise(
                client, options.model, options.file.read_text(encoding="utf-8"), options.words
            )
        )


if __name__ == "__main__":
    asyncio.run(main())
