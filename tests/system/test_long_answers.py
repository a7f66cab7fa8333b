"""Answers as long as the context, and many short ones at once in a KV pool of two contexts."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest

from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.requests.conversation import ChatFinished, ContentDelta
from tests.support.chat_models import demo_model_with
from tests.support.site import Site

POSITIONS = 8192
CHATS, TOKENS = 8, 200


def long_model(directory: Path) -> Path:
    """The demo model with more positions; its weights are the same."""
    model = demo_model_with(directory)
    path = model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    return model


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.asyncio
async def test_answers_fill_the_context_and_eight_chats_run_in_a_pool_of_two(
    tmp_path: Path,
) -> None:
    async with Site(tmp_path, ["a"], models={"long": long_model(tmp_path / "model")}) as site:
        client = site.client
        await client.deploy(parse_spec({"name": "long", "model": "long"}))
        done = await client.complete(
            "long", "Once upon a time", max_new_tokens=6000, ignore_eos=True
        )
        assert len(done.token_ids) == 6000
        await client.delete_deployment("long")

        await client.deploy(
            parse_spec({"name": "two", "model": "long", "concurrency": 2, "max_context": 2048})
        )
        pool = (await client.deployment("two")).placement
        assert pool.kv_blocks * pool.kv_block_tokens == 2 * 2048
        all_write = asyncio.Barrier(CHATS)

        async def chat(number: int) -> int:
            """Read an open answer up to `TOKENS`, once all chats have a first token; the tokens
            that came."""
            count = 0
            events = client.chat("two", f"Tell a tale of {number} kings", ignore_eos=True)
            async with aclosing(events):
                async for event in events:
                    if not isinstance(event, ContentDelta):
                        assert not isinstance(event, ChatFinished), "it ended early"
                        continue
                    count += 1
                    if count == 1:
                        await asyncio.wait_for(all_write.wait(), 60)
                    if count == TOKENS:
                        break
            return count

        assert await asyncio.gather(*map(chat, range(CHATS))) == [TOKENS] * CHATS
