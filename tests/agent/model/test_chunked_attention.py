"""Attention within chunks of positions: its definition, wherever a prompt is cut and whatever of it
is run again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from edgeshard_agent.model.attention.attention import SpansInChunks, StepAttention
from edgeshard_agent.model.attention.gathered import GatheredSpans
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.ops.attention import Scoring
from edgeshard_agent.ops.kv_arena import NativeArena
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgeshard.architectures import KvHeads
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.step import Span

LENGTH = 29
BLOCK = 4
HEADS = 4
KV_HEADS = 2
DIM = 8
HERE = torch.device("cpu")
SCORING = Scoring(0.4)
GENERATOR = torch.Generator().manual_seed(3)
QUERY, KEY, VALUE = (
    torch.randn(2, LENGTH, heads, DIM, generator=GENERATOR) for heads in (HEADS, KV_HEADS, KV_HEADS)
)
"""The tensors of two requests."""


def expected(request: int, chunk: int) -> Tensor:
    """By the definition: a token sees the positions of its own chunk up to its own."""
    positions = torch.arange(LENGTH)
    hidden = (positions > positions[:, None]) | (positions // chunk != positions[:, None] // chunk)
    keys, values = (
        part[request].repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)
        for part in (KEY, VALUE)
    )
    scores = QUERY[request].transpose(0, 1) @ keys.mT * SCORING.scale
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def run(steps: list[list[tuple[int, int, int]]], chunk: int, gathered: bool) -> tuple[Tensor, bool]:
    """Outputs of steps of spans (request, first position, end), and whether the kernels of our own
    made them."""
    pool = KvPool(
        LayerRange(0, 1),
        KvMemory(DType.FLOAT32, 16, BLOCK),
        [KvHeads(KV_HEADS, DIM)],
        "cpu",
        scratch=gathered,
    )
    for request, blocks in ((0, (5, 2, 7, 0, 11, 3, 9, 14)), (1, (1, 4, 6, 8, 10, 12, 13, 15))):
        pool.grant(request, 0, blocks)
    out = torch.full_like(QUERY, torch.nan)
    for step in steps:
        spans = [Span(request, first, end - first) for request, first, end in step]
        for span in spans:
            pool.begin_span(
                span.request, span.first_position, span.token_count, truncate_allowed=True
            )
        attention = StepAttention(pool, spans, HERE)
        if gathered:
            attention = StepAttention.gathered(pool, GatheredSpans(pool, spans, HERE))
            attention._in_chunks = SpansInChunks(
                pool, spans, lambda view, pieces: GatheredSpans(view, pieces, HERE)
            )
        query, key, value = (
            torch.cat([part[request, first:end] for request, first, end in step])
            for part in (QUERY, KEY, VALUE)
        )
        attended = attention.attend(0, query, key, value, SCORING, chunk)
        for (request, first, end), part in zip(
            step, attended.split([end - first for _, first, end in step]), strict=True
        ):
            out[request, first:end] = part
    return out, isinstance(pool.arena(0), NativeArena)


@given(
    cuts=st.tuples(*(st.sets(st.integers(1, LENGTH - 1), max_size=6) for _ in range(2))),
    together=st.booleans(),
    again=st.integers(0, LENGTH - 1),
    chunk=st.sampled_from([4, 8, 12, 32]),
    gathered=st.booleans(),
)
@settings(deadline=None)
def test_a_token_sees_its_chunk_wherever_prompts_are_cut(
    cuts: tuple[set[int], set[int]], together: bool, again: int, chunk: int, gathered: bool
) -> None:
    pieces = [
        [(request, *piece) for piece in pairwise([0, *sorted(cuts[request]), LENGTH])]
        for request in range(2)
    ]
    steps = [[piece] for own in pieces for piece in own]
    if together:
        count = max(map(len, pieces))
        steps = [[own[index] for own in pieces if index < len(own)] for index in range(count)]
    steps.append([(0, again, LENGTH)])  # cut to fewer positions, and run again
    found, native = run(steps, chunk, gathered)
    for request in range(2):
        torch.testing.assert_close(found[request], expected(request, chunk))
    if native:
        whole, _ = run([[(0, 0, LENGTH)], [(1, 0, LENGTH)]], chunk, gathered)
        assert torch.equal(found, whole), "bit for bit"


def test_blocks_must_fill_a_chunk() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        run([[(0, 0, 3)]], 6, gathered=False)
    assert refused.value.field == "block_tokens"
