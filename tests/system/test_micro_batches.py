"""The head of a real pipeline follows its load: the number of micro-batches changes, and no
stream's tokens do.

The nodes pretend: the first takes three times as long as the second, weights are read in 30 ms, and
8 requests or more take longer than that. Two streams are best off as one micro-batch (42 ms a
token, 60 as two), sixteen as two (64 ms, 87 as one). The nodes have no profiles, so the head finds
that out.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeshard import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.requests.generation import GenerateOptions
from edgeshard.local.lab_site import lab_cluster, make_stand_in
from edgeshard.planning.simulation.lab import parse_lab
from tests.support.load import Stream

LAB = """
source = "a"
[[device]]
name = "a"
memory_bytes = 8e9
bandwidth_bytes_per_s = 7.7e9
flops = 58e9
[[device]]
name = "b"
memory_bytes = 8e9
bandwidth_bytes_per_s = 7.7e9
flops = 58e9
[[link]]
bandwidth_bps = 1e9
latency_s = 0.0005
[model]
dtype = "bfloat16"
[workload]
prompt_tokens = 4
new_tokens = 400
[lab]
model = "config.json"
"""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
}
SPEC = {
    "name": "tales", "model": "stand-in", "source": "a", "dtype": "float32", "concurrency": 16,
    "max_context": 4096, "max_new_tokens": 4000, "layers": "a=0:9,b=9:12",
}  # fmt: skip
FEW, MANY = 2, 16
ALONE_TOKENS, MOST_REPEATED = 24, 400


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    lab = parse_lab(tomllib.loads(LAB), lambda name: CONFIG)
    make_stand_in(lab, tmp_path / "stand-in")
    async with lab_cluster(lab, path, tmp_path) as cluster, Client(cluster.address) as client:
        await client.add_model(tmp_path / "stand-in", "stand-in")
        await client.deploy(parse_spec(SPEC), timeout_s=180)
        yield client


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * position) % 60 for position in range(4)]


async def until_chosen(
    client: Client, micro_batches: int, tasks: Sequence[asyncio.Task[Stream]]
) -> None:
    """Until the head reports that it has chosen this number, and still reports it a while later."""
    seen = 0
    async with asyncio.timeout(120):
        while seen < 4:
            for task in tasks:
                assert not task.done(), f"a stream ended: {task!r}"
            (head, _) = sorted(
                (await client.deployment("tales")).stages, key=lambda stage: stage.stage
            )
            seen = (
                seen + 1
                if head.micro_batches == micro_batches and head.requests_running == len(tasks)
                else 0
            )
            await asyncio.sleep(0.5)


@pytest.mark.long
async def test_micro_batches_follow_the_load_and_no_token_changes(client: Client) -> None:
    heard: dict[int, Stream] = {}
    tasks: dict[int, asyncio.Task[Stream]] = {}

    def begin(numbers: range) -> None:
        for number in numbers:
            heard[number] = Stream(
                "tales", prompt(number), GenerateOptions(max_new_tokens=4000, ignore_eos=True)
            )
            tasks[number] = asyncio.create_task(heard[number].run(client))

    async def end(numbers: range) -> None:
        for number in numbers:
            tasks[number].cancel()
        await asyncio.gather(*(tasks.pop(number) for number in numbers), return_exceptions=True)

    try:
        begin(range(FEW))
        await until_chosen(client, 1, list(tasks.values()))
        begin(range(FEW, MANY))
        await until_chosen(client, 2, list(tasks.values()))
        await end(range(FEW, MANY))
        await until_chosen(client, 1, list(tasks.values()))
    finally:
        await end(range(len(tasks)))
    await check(client, heard)


async def check(client: Client, heard: dict[int, Stream]) -> None:
    """Each stream has the tokens that it gets by itself."""
    for number in (0, 1, 5, MANY - 1):
        options: dict[str, Any] = {
            "max_new_tokens": min(ALONE_TOKENS, len(heard[number].ids)),
            "ignore_eos": True,
        }
        alone = await client.complete("tales", prompt(number), **options)
        assert (
            len(alone.token_ids) > 3
            and heard[number].ids[: len(alone.token_ids)] == alone.token_ids
        )
    # A stream that ran through all changes.
    count = min(MOST_REPEATED, len(heard[0].ids))
    alone = await client.complete("tales", prompt(0), max_new_tokens=count, ignore_eos=True)
    assert alone.token_ids == heard[0].ids[:count]
