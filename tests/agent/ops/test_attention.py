"""Attention over the paged memory, against the definition and against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from edgeshard_agent.ops import attention as attention_module
from edgeshard_agent.ops import native
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.kv_arena import NativeArena, PanelArena, make_arena
from edgeshard_agent.ops.kv_int4 import restored, rounded

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import KvFormat
from tests.support.forms import one_in

DTYPES = [torch.float32, torch.bfloat16]
# As in test_layers.py.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
BLOCK_TOKENS = 32
"""Two pages of the kernels."""
LONGEST = 576
REQUESTS = 3

Span = tuple[int, int, int]
"""(request, tokens, length with them)."""


Kept = torch.dtype | Literal[KvFormat.INT4]


def as_kept(numbers: torch.Tensor, kept: Kept) -> torch.Tensor:
    """What an arena gives back of keys or values."""
    return restored(*rounded(numbers)) if isinstance(kept, KvFormat) else numbers.to(kept)


class Memory:
    """Some requests' queries, keys and values, and an arena full of NaN in which their shuffled
    blocks lie."""

    def __init__(
        self, kv_heads: int, heads: int, head_dim: int, dtype: torch.dtype, kept: Kept | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        # Side by side in a row, as the linear layer makes them.
        shape = (REQUESTS * LONGEST, heads + 2 * kv_heads, head_dim)
        packed = torch.randn(shape, generator=generator).to(dtype)
        self.query, self.key, self.value = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
        blocks = -(-LONGEST // BLOCK_TOKENS)
        count = 2 * REQUESTS * blocks
        self.tables = (
            torch.randperm(count, generator=generator)[: REQUESTS * blocks]
            .view(REQUESTS, blocks)
            .int()
        )
        self.kept = kept or dtype
        self.arena = make_arena(
            count * BLOCK_TOKENS, kv_heads, head_dim, self.kept, BLOCK_TOKENS, "cpu"
        )
        for part in (self.arena.keys, self.arena.values):
            part.fill_(255 if part.dtype is torch.uint8 else torch.nan)
        self.scoring = Scoring(head_dim**-0.5)

    def slots(self, request: int, end: int) -> torch.Tensor:
        positions = torch.arange(end)
        return (
            self.tables[request].long()[positions // BLOCK_TOKENS] * BLOCK_TOKENS
            + positions % BLOCK_TOKENS
        )

    def step(self, *spans: Span) -> torch.Tensor:
        """The rows of all spans; what is before them must have been written."""
        rows = torch.cat(
            [torch.arange(end - count, end) + request * LONGEST for request, count, end in spans]
        )
        tables = SpanTables(
            self.tables[[request for request, _, _ in spans]],
            torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            torch.tensor([0, *(count for _, count, _ in spans)]).cumsum(0).int(),
            BLOCK_TOKENS,
        )
        packed = torch.cat((self.query, self.key, self.value), dim=1)[rows]
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        query, key, value = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
        return attend(query, key, value, self.arena, tables, self.scoring)

    def expected(self, request: int, count: int, end: int) -> torch.Tensor:
        """The definition, in float64."""
        scoring, kept = self.scoring, self.kept
        mine = slice(request * LONGEST, request * LONGEST + end)
        group = self.query.shape[1] // self.key.shape[1]
        query = self.query[mine][-count:].double().transpose(0, 1)
        keys, values = (
            as_kept(part[mine], kept).double().repeat_interleave(group, dim=1).transpose(0, 1)
            for part in (self.key, self.value)
        )
        scores = query @ keys.mT * scoring.scale
        if scoring.softcap:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        distance = torch.arange(end - count, end).unsqueeze(1) - torch.arange(end)
        scores.masked_fill_((distance < 0) | (distance >= (scoring.window or end)), -torch.inf)
        if scoring.sinks is not None:
            sinks = scoring.sinks.double().view(-1, 1, 1).expand(-1, count, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        answer: torch.Tensor = scores.softmax(-1)[..., :end] @ values
        return answer.transpose(0, 1)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


def parts(result: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    return list(result.split([count for _, count, _ in spans]))


# Decodes and chunks of three requests, past one end of a tile of keys, up to another, and over a
# third.
STEPS: list[list[Span]] = [
    [(0, 2, 2), (2, 1, 1)],
    [(0, 15, 17)],
    [(1, 40, 40), (2, 1, 2), (0, 100, 117)],
    [(0, 3, 120), (1, 1, 41), (2, 254, 256)],
    [(2, 1, 257), (1, 5, 46), (0, 139, 259)],
    [(0, 317, 576)],
    [(1, 530, 576), (2, 1, 258)],
]

LIMITS = [
    Scoring(1.0),
    Scoring(1.0, window=20),
    Scoring(1.0, window=300),
    Scoring(1.0, window=1),
    Scoring(1.0, softcap=5.0),
    Scoring(1.0, window=40, softcap=2.0),
    Scoring(1.0, sinks=torch.tensor([0.5, -2.0, 7.0, 100.0])),
    Scoring(1.0, window=40, sinks=torch.tensor([0.5, -2.0, 7.0, 0.0])),
]
SHAPES = [(1, 7, 128), (3, 3, 80), (1, 1, 16), (1, 2, 256), (2, 4, 20), (1, 2, 512), (1, 26, 32)]
INT4: Kept = KvFormat.INT4
KV_DTYPES = (*DTYPES, torch.float16)
CASES = [
    *(((2, 4, 64), limits, dtype, dtype) for limits in LIMITS for dtype in DTYPES),
    *((shape, LIMITS[2], dtype, dtype) for shape in SHAPES for dtype in DTYPES),
    *(
        ((2, 4, 64), LIMITS[0], dtype, other)
        for dtype in DTYPES
        for other in KV_DTYPES
        if other != dtype
    ),
    ((2, 4, 64), LIMITS[0], torch.float16, torch.float32),
    *(((2, 4, 64), limits, dtype, INT4) for limits in LIMITS for dtype in DTYPES),
    *(
        (shape, LIMITS[2], dtype, INT4)
        for shape in SHAPES
        if shape[2] % 16 == 0
        for dtype in DTYPES
    ),
]


@pytest.mark.parametrize(("shape", "limits", "dtype", "kept"), one_in(4, CASES))
@pytest.mark.one_in(2)
def test_spans_of_any_length_behind_any_past(
    shape: tuple[int, int, int], limits: Scoring, dtype: torch.dtype, kept: Kept, kernels: str
) -> None:
    memory = Memory(*shape, dtype, kept)
    memory.scoring = replace(limits, scale=memory.scoring.scale)
    for spans in STEPS:
        for span, found in zip(spans, parts(memory.step(*spans), spans), strict=True):
            tolerance = 4e-3 if dtype is torch.float16 else TOLERANCE[dtype]
            torch.testing.assert_close(
                found, memory.expected(*span).to(dtype), rtol=tolerance, atol=tolerance
            )
    ends = {request: end for spans in STEPS for request, _, end in spans}
    for request, end in ends.items():
        keys, values = memory.arena.read(memory.slots(request, end))
        mine = slice(request * LONGEST, request * LONGEST + end)
        assert torch.equal(keys, as_kept(memory.key[mine], kept))
        assert torch.equal(values, as_kept(memory.value[mine], kept))
    keys, _ = memory.arena.read(torch.arange(memory.arena.slots))
    assert keys.isnan().all(2).all(1).sum() == memory.arena.slots - sum(ends.values()), (
        "wrote beside the slots"
    )


def test_more_query_heads_than_a_unit_has_rows(kernels: str) -> None:
    memory = Memory(1, 600, 16, torch.float32)
    close(memory.step((0, 9, 9)), memory.expected(0, 9, 9))


@pytest.mark.parametrize("kept", [None, INT4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "softcap"), one_in(3, [(70, 3.0), (0, 0.0), (70, 0.0), (0, 3.0)])
)
@pytest.mark.one_in(2)
def test_a_token_has_the_same_bits_in_any_span(
    window: int, softcap: float, dtype: torch.dtype, kept: Kept | None, kernels: str
) -> None:
    if kernels == "torch":
        pytest.skip("torch's operators do not promise it")
    memory = Memory(2, 6, 64, dtype, kept)
    memory.scoring = replace(memory.scoring, window=window, softcap=softcap)
    whole = [memory.step((request, LONGEST, LONGEST)) for request in range(REQUESTS)]
    for spans in STEPS:
        for (request, count, end), found in zip(
            spans, parts(memory.step(*spans), spans), strict=True
        ):
            assert torch.equal(found, whole[request][end - count : end])


@pytest.mark.parametrize("kept", [torch.bfloat16, INT4])
@pytest.mark.parametrize("shape", [(2, 6, 64), (1, 4, 128), (5, 5, 80)])
@pytest.mark.parametrize("threads", one_in(3, [3, 2, 5]))
def test_threads_share_the_work_and_give_the_same_bits(
    threads: int, shape: tuple[int, int, int], kept: Kept, kernels: str
) -> None:
    """A prompt is cut by queries, and a single token's context by keys where its heads are too
    few."""
    memory = Memory(*shape, torch.bfloat16, kept)
    before = torch.get_num_threads()

    def answers(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        try:
            return [
                memory.step((0, LONGEST, LONGEST)),
                memory.step((0, 1, LONGEST)),
                memory.step((0, 4, 570)),
            ]
        finally:
            torch.set_num_threads(before)

    for alone, shared in zip(answers(1), answers(threads), strict=True):
        if kernels == "torch":
            close(shared, alone)
        else:
            assert torch.equal(shared, alone)


def test_scores_far_apart(kernels: str) -> None:
    """Where one key takes all the weight, whether it comes first, later or last."""
    memory = Memory(1, 2, 64, torch.float32)
    memory.key[::37] *= 300
    found, expected = memory.step((0, LONGEST, LONGEST)), memory.expected(0, LONGEST, LONGEST)
    # Scores of a thousand are known to 1e-4 in float32.
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kept", [torch.bfloat16, INT4])
def test_what_another_request_left_in_a_page_is_not_read(kept: Kept, kernels: str) -> None:
    """It may be infinite, and attention multiplies what lies behind the last token by zero."""
    memory = Memory(2, 4, 64, torch.bfloat16, kept)
    if kept is not INT4:  # which is NaN throughout already
        memory.arena.keys.fill_(torch.inf)
        memory.arena.values.fill_(torch.inf)
    for end in range(1, 20):
        assert torch.isfinite(memory.step((0, 1, end))).all()
    assert torch.isfinite(memory.step((0, 3, 21), (1, 5, 5))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_that_are_not_side_by_side(dtype: torch.dtype, kernels: str) -> None:
    """As the layers of transformers give them."""
    memory = Memory(2, 4, 64, dtype)
    plain = memory.step((0, 40, 40))
    for name in ("query", "key", "value"):
        part = getattr(memory, name)
        setattr(memory, name, part.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(memory.step((0, 40, 40)), plain)


@pytest.mark.skipif(not native.native_available(), reason="the native kernels are not built")
def test_what_a_processor_multiplies_runs_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_reference", None)
    for dtype in DTYPES:
        for kept in (*DTYPES, INT4):
            memory = Memory(2, 4, 64, dtype, kept)
            assert isinstance(memory.arena, NativeArena)
            memory.step((0, 40, 40), (1, 1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_give_back_what_was_written(dtype: torch.dtype) -> None:
    arena = PanelArena(64, 3, 48, dtype)
    slots = torch.randperm(64)[:40]
    keys, values = (torch.randn(40, 3, 48).to(dtype) for _ in range(2))
    arena.write(slots, keys, values)
    assert (arena.slots, arena.width) == (64, (3, 48))
    assert all(
        torch.equal(found, given)
        for found, given in zip(arena.read(slots), (keys, values), strict=True)
    )
    rest = torch.tensor(sorted(set(range(64)) - set(slots.tolist())))
    assert not arena.read(rest)[0].any() and not arena.read(rest)[1].any()


@pytest.mark.parametrize(
    "change",
    [
        "block",
        "negative block",
        "length beyond the table",
        "no length",
        "more tokens than the length",
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_written(change: str, kernels: str) -> None:
    memory = Memory(2, 4, 64, torch.float32)
    span = (1, 4, 100)
    if "block" in change:
        memory.tables[1, 3] = -1 if change == "negative block" else 2 * memory.tables.numel()
    tables = SpanTables(
        memory.tables[[0, 1]],
        torch.tensor(
            [8, {"length beyond the table": 577, "no length": 0}.get(change, 100)],
            dtype=torch.int32,
        ),
        torch.tensor([0, 8, 12], dtype=torch.int32),
        BLOCK_TOKENS,
    )
    if "more tokens" in change:
        tables.lengths[1] = 3
    rows = slice(0, 12)
    with pytest.raises(InvalidArgumentError, match=f"span {span[0]}") as raised:
        attend(
            memory.query[rows],
            memory.key[rows],
            memory.value[rows],
            memory.arena,
            tables,
            memory.scoring,
        )
    assert raised.value.field == "blocks"
    assert memory.arena.keys.isnan().all() and memory.arena.values.isnan().all()


def test_blocks_beyond_the_length_are_not_looked_at(kernels: str) -> None:
    memory = Memory(2, 4, 64, torch.float32)
    expected = memory.step((0, 40, 40))
    memory.tables[0, 2:] = -1
    assert torch.equal(memory.step((0, 40, 40)), expected)


def test_shapes_that_do_not_fit_are_refused(kernels: str) -> None:
    memory = Memory(2, 4, 64, torch.float32)
    query = memory.query[:4]
    key = memory.key[:4]
    value = memory.value[:4]

    def spans(rows: int, blocks: torch.Tensor = memory.tables[:1]) -> SpanTables:
        lengths = torch.tensor([40], dtype=torch.int32)
        edges = torch.tensor([0, rows], dtype=torch.int32)
        return SpanTables(blocks, lengths, edges, BLOCK_TOKENS)

    for field, call in (
        ("arena", lambda: attend(query[:, :3], key, value, memory.arena, spans(4), memory.scoring)),
        (
            "arena",
            lambda: attend(query[..., :32], key, value, memory.arena, spans(4), memory.scoring),
        ),
        ("new_keys", lambda: attend(query, key[:3], value, memory.arena, spans(4), memory.scoring)),
        (
            "new_keys",
            lambda: attend(query, key, value[..., :32], memory.arena, spans(4), memory.scoring),
        ),
        ("first_rows", lambda: attend(query, key, value, memory.arena, spans(3), memory.scoring)),
        ("first_rows", lambda: spans(0)),
        ("blocks", lambda: spans(4, memory.tables[:1].long())),
        ("blocks", lambda: spans(4, memory.tables[:2])),
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            call()
        assert raised.value.field == field
