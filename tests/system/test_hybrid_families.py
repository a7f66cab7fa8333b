"""Families whose layers keep states of requests, or nothing, over real nodes: their tokens are
transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.hybrids import likeliest, save_random
from tests.support.site import Site

PROMPTS = [[5, 7, 9, 11, 13, 2], [3, 3, 8], [40, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
NEW_TOKENS = 10


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "layers"),
    [
        ("nemotron_h-latent", "a=0:1,b=1:3,c=3:4"),  # b has an MLP and experts, which keep nothing
        ("falcon_h1-bare", "a=0:1,b=1:4"),
        ("mamba2-tied", "a=0:1,b=1:4"),  # without attention
    ],
)
@pytest.mark.asyncio
async def test_a_hybrid_over_real_nodes_gives_the_tokens_of_transformers(
    row: str, layers: str, tmp_path: Path
) -> None:
    model = save_random(tmp_path / "model", row)
    nodes = [part[0] for part in layers.split(",")]
    async with Site(tmp_path, nodes, models={"hybrid": tmp_path / "model"}) as site:
        client = site.client
        values = {
            "model": "hybrid",
            "source": "a",
            "layers": layers,
            "dtype": "float32",
            "max_context": 48,
        }
        await client.deploy(parse_spec({"name": "h", **values, "concurrency": 4}), timeout_s=60)
        ways = [
            client.complete("h", prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            for prompt in PROMPTS
        ]
        found = [list(answer.token_ids) for answer in await asyncio.gather(*ways)]
    assert [len(answer) for answer in found] == [NEW_TOKENS] * len(PROMPTS)
    assert found == [
        likeliest(model, prompt, answer) for prompt, answer in zip(PROMPTS, found, strict=True)
    ]
