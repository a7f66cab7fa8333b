"""Keys and values that one client's tokens left are gone from every stage once its blocks are
another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.static_decode import Rerun
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.kv_arena import PanelArena, RowArena
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator
from edgeshard_agent.scheduler.scheduler import Limits, Scheduler
from edgeshard_agent.scheduler.text import TextStream

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.architectures import KvHeads
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Generation, Token
from edgeshard.domain.requests.head import RequestEnd
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

BLOCKS, SIZE = 3, 16
HALVES = (LayerRange(0, 2), LayerRange(2, 4))


class Pipeline:
    """A head's scheduler over real stages; each request runs to its end."""

    def __init__(
        self, checkpoint: Any, kv_dtype: DType, recorder: Rerun | None, prefix_cache: bool
    ) -> None:
        directory = SafetensorsDirectory(checkpoint.path)
        self.stages = [
            StageModel.with_kv(
                StageWeights.load(
                    directory, checkpoint.config, layers, dtype=DType.FLOAT32, device="cpu"
                ),
                KvMemory(kv_dtype, BLOCKS, SIZE),
                recorder,
            )
            for layers in HALVES
        ]
        self.scheduler = Scheduler(
            BlockAllocator(BLOCKS, SIZE),
            Limits(64, 8, prefix_cache=prefix_cache),
            Batching(Mode.NO_BUBBLES, 1, 1, 1),
            Chunking(64),
            frozenset(),
        )

    def run(self, name: str, client: str, prompt: Sequence[int], new_tokens: int) -> set[int]:
        """The tokens that its prompt and its answer have."""
        generation = Generation(tuple(prompt), new_tokens, ignore_eos=True)
        text = TextStream(lambda ids: "", list(prompt))
        assert (
            self.scheduler.submit(RequestId(name), generation, list(prompt), text, client=client)
            is None
        )
        tokens, ended = set(prompt), False
        while not ended:
            step = self.scheduler.next_step()
            assert step is not None
            inputs: Any = np.array(step.tokens, dtype=np.int64) if step.tokens else None
            for stage in self.stages[:-1]:
                inputs = stage.execute(step.plan, inputs).hidden
            result = self.stages[-1].execute(step.plan, inputs).result
            events = self.scheduler.events(self.scheduler.on_result(step.number, result, 0.0))
            tokens |= {event.event.token for event in events if isinstance(event.event, Token)}
            ended = any(isinstance(event.event, RequestEnd) for event in events)
        return tokens

    def rows(self) -> set[bytes]:
        """The bytes of every slot that is not empty: a token's keys, and its values, in each layer
        of each stage."""
        found: set[bytes] = set()
        for stage in self.stages:
            for layer in range(stage.layers.first, stage.layers.end):
                slots = torch.arange(BLOCKS * SIZE)
                for part in stage.pool.arena(layer).read(slots):
                    found |= {row.contiguous().view(torch.uint8).numpy().tobytes() for row in part}
        return {row for row in found if any(row)}


CASES = {
    "panels": ("llama-plain", DType.FLOAT32, None),
    "panels of bfloat16": ("llama-plain", DType.BFLOAT16, None),
    "rows": ("phi3-partial", DType.FLOAT32, None),
    "rows as on an accelerator": ("llama-options", DType.FLOAT32, Rerun()),
    "modules of transformers": ("gpt2-options", DType.FLOAT32, None),
}


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["", "prefix cache"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_of_a_client_is_left_in_blocks_that_another_has(
    case: str, prefix_cache: bool, checkpoint_of: Callable[[str], Any]
) -> None:
    name, kv_dtype, recorder = CASES[case]
    pipeline = Pipeline(checkpoint_of(name), kv_dtype, recorder, prefix_cache)
    arena = pipeline.stages[0].pool.arena(0)
    assert isinstance(arena, PanelArena if "panels" in case and native_available() else RowArena)
    rows = pipeline.stages[0].layers, pipeline.stages[1].layers
    written = 2 * sum(map(len, rows)) * (BLOCKS * SIZE - 1)
    prompt = [7 + i % 11 + i // 11 for i in range(BLOCKS * SIZE - 4)]
    tokens = pipeline.run("a", "client/a", prompt, 4)
    of_a = pipeline.rows()
    assert len(of_a) > 0.9 * written, "nearly every slot was filled, with something of its own"
    # Tokens of its own, since the first layer's values depend only on the token. They take all
    # blocks of the pool, and of the last one a single slot.
    own = sorted(set(range(60)) - tokens)
    other = [own[i % 13] for i in range((BLOCKS - 1) * SIZE + 1)]
    pipeline.run("b", "client/b", other, 1)
    of_b = pipeline.rows()
    assert len(of_b) <= 2 * sum(map(len, rows)) * len(other)
    assert not of_a & of_b


@pytest.fixture
def pool() -> KvPool:
    """Request 1 filled blocks 5 and 2, and left them. Every number of the pool is 1."""
    pool = KvPool(LayerRange(2, 5), KvMemory(DType.FLOAT32, 8, 4), [KvHeads(2, 6)] * 3, "cpu")
    pool.grant(1, 0, (5, 2))
    pool.begin_span(1, 0, 8, truncate_allowed=False)
    pool.free(1)
    for layer in range(2, 5):
        pool.arena(layer).write(torch.arange(32), torch.ones(32, 2, 6), torch.ones(32, 2, 6))
    return pool


def zero_blocks(pool: KvPool) -> list[int]:
    """Blocks that are zero as a whole; the others are 1 as a whole."""
    found: list[int] = []
    for block in range(8):
        parts = [
            part
            for layer in range(2, 5)
            for part in pool.arena(layer).read(torch.arange(4) + 4 * block)
        ]
        numbers = torch.cat(parts).unique().tolist()
        assert len(numbers) == 1
        found += [block] if numbers == [0] else []
    return found


def test_a_grant_zeroes_its_blocks_in_every_layer_and_no_others(pool: KvPool) -> None:
    pool.grant(2, 0, (3, 2, 7, 1))
    assert zero_blocks(pool) == [1, 2, 3, 7]
    pool.grant(2, 4, (6,))
    pool.grant(3, 0, ())
    assert zero_blocks(pool) == [1, 2, 3, 6, 7]


def test_blocks_that_are_shared_keep_what_they_hold(pool: KvPool) -> None:
    pool.commit(pool.check(StepPlan(grants=(KvGrant(2, 0, (5, 2), filled=8), KvGrant(2, 2, (0,))))))
    assert zero_blocks(pool) == [0]


def test_a_refused_step_zeroes_nothing(pool: KvPool) -> None:
    with pytest.raises(FailedPreconditionError):
        pool.check(StepPlan(grants=(KvGrant(2, 0, (0, 1)),), spans=(Span(2, 3, 1),)))
    assert zero_blocks(pool) == []


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="this system does not tell")
def test_the_memory_of_a_pool_goes_back_to_the_system() -> None:
    """The system zeroes it before another process gets it."""
    pool = KvPool(LayerRange(0, 4), KvMemory(DType.FLOAT32, 64, 16), [KvHeads(4, 64)] * 4, "cpu")
    address = pool.arena(0).keys.data_ptr()
    assert is_mapped(address)
    pool.release()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    ranges = (
        line.split(" ", 1)[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)
