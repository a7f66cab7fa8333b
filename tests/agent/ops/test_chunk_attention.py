"""Attention of several new tokens of one request over pages, against the definition and against itself."""

from __future__ import annotations

import pytest
import torch
from edgeshard_agent.ops import attention as attention_module
from edgeshard_agent.ops import chunk_attention, native, paged_attention

from edgeshard.domain.errors import InvalidArgumentError

DTYPES = [torch.float32, torch.bfloat16]
# As in test_layers.py.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
BLOCK_TOKENS = 16
LONGEST = 576


class Request:
    """A request's queries, keys and values, and an arena in which its shuffled blocks lie among others full of NaN."""

    def __init__(
        self, kv_heads: int, heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, length: int = LONGEST
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        # Side by side in a row, as the linear layer makes them.
        packed = torch.randn(length, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
        self.query, self.key, self.value = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
        blocks = -(-length // BLOCK_TOKENS)
        self.table = torch.randperm(2 * blocks, generator=generator)[:blocks].int()
        arena = (2 * blocks * BLOCK_TOKENS, kv_heads, head_dim)
        self.keys, self.values = (torch.full(arena, torch.nan, dtype=kv_dtype) for _ in range(2))
        self.scale = head_dim**-0.5

    def slots(self, first: int, end: int) -> torch.Tensor:
        positions = torch.arange(first, end)
        return self.table.long()[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS

    def extend(self, count: int, end: int, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        """The chunk of `count` tokens that ends at position `end`; what is before it must have been written."""
        new = slice(end - count, end)
        return chunk_attention(
            self.query[new],
            self.keys,
            self.values,
            self.table,
            end,
            BLOCK_TOKENS,
            self.scale,
            window,
            softcap,
            self.key[new],
            self.value[new],
        )

    def fill(self, end: int) -> None:
        slots = self.slots(0, end)
        self.keys[slots], self.values[slots] = self.key[:end].to(self.keys.dtype), self.value[:end].to(self.keys.dtype)

    def expected(self, count: int, end: int, window: int, softcap: float) -> torch.Tensor:
        """The definition, in float64."""
        group = self.query.shape[1] // self.key.shape[1]
        query = self.query[end - count : end].double().transpose(0, 1)
        keys, values = (
            part[:end].to(self.keys.dtype).double().repeat_interleave(group, dim=1).transpose(0, 1)
            for part in (self.key, self.value)
        )
        scores = query @ keys.mT * self.scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        distance = torch.arange(end - count, end).unsqueeze(1) - torch.arange(end)
        hidden = (distance < 0) | (distance >= (window or end))
        answer: torch.Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
        return answer.transpose(0, 1)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


LIMITS = [(0, 0.0), (20, 0.0), (300, 0.0), (1, 0.0), (0, 5.0), (40, 2.0)]
SHAPES = [(1, 7, 128), (3, 3, 80), (1, 1, 16), (1, 2, 256), (2, 4, 20), (1, 2, 512)]
CASES = [
    *(((2, 4, 64), limits, dtype, dtype) for limits in LIMITS for dtype in DTYPES),
    *((shape, (300, 0.0), dtype, dtype) for shape in SHAPES for dtype in DTYPES),
    *(((2, 4, 64), (0, 0.0), dtype, other) for dtype in DTYPES for other in (*DTYPES, torch.float16) if other != dtype),
]


@pytest.mark.parametrize(("shape", "limits", "dtype", "kv_dtype"), CASES)
def test_chunks_behind_any_past(
    shape: tuple[int, int, int], limits: tuple[int, float], dtype: torch.dtype, kv_dtype: torch.dtype, kernels: str
) -> None:
    request = Request(*shape, dtype, kv_dtype)
    end = 0
    for count in (2, 15, 100, 3, 139, 317):  # past one end of a tile of keys, up to another, and over a third
        end += count
        close(request.extend(count, end, *limits), request.expected(count, end, *limits))
    assert end == LONGEST
    written = request.slots(0, end)
    assert torch.equal(request.keys[written], request.key.to(kv_dtype))
    assert torch.equal(request.values[written], request.value.to(kv_dtype))
    assert request.keys.isnan().all(2).all(1).sum() == len(request.keys) - end, "wrote beside the request's slots"


def test_more_query_heads_than_a_block_has_rows(kernels: str) -> None:
    request = Request(1, 600, 16, torch.float32, torch.float32, length=9)
    close(request.extend(9, 9), request.expected(9, 9, 0, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (70, 0.0), (0, 3.0)])
def test_a_token_has_the_same_bits_in_any_chunk(window: int, softcap: float, dtype: torch.dtype, kernels: str) -> None:
    if kernels == "torch":
        pytest.skip("torch's operators do not promise it")
    request = Request(2, 6, 64, dtype, dtype)
    whole = request.extend(LONGEST, LONGEST, window, softcap)
    end = 0
    for count in (1, 2, 200, 53, 257, 63):
        end += count
        assert torch.equal(request.extend(count, end, window, softcap), whole[end - count : end])
    assert end == LONGEST


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_work_and_give_the_same_bits(threads: int, kernels: str) -> None:
    request = Request(2, 6, 64, torch.bfloat16, torch.bfloat16)
    alone = request.extend(LONGEST, LONGEST)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shared = request.extend(LONGEST, LONGEST)
    finally:
        torch.set_num_threads(before)
    if kernels == "torch":
        close(shared, alone)
    else:
        assert torch.equal(shared, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_of_one_token_is_a_decode(dtype: torch.dtype, kernels: str) -> None:
    request = Request(2, 6, 64, dtype, dtype)
    request.fill(300)
    chunk = request.extend(1, 300)
    decode = paged_attention(
        request.query[299:300],
        request.keys,
        request.values,
        request.table.unsqueeze(0),
        torch.tensor([300], dtype=torch.int32),
        BLOCK_TOKENS,
        request.scale,
    )
    close(chunk, decode)


def test_scores_far_apart(kernels: str) -> None:
    """Where one key takes all the weight, whether it comes first, later or last."""
    request = Request(1, 2, 64, torch.float32, torch.float32)
    request.key[::37] *= 300
    found, expected = request.extend(LONGEST, LONGEST), request.expected(LONGEST, LONGEST, 0, 0.0)
    # Scores of a thousand are known to 1e-4 in float32.
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-3)


@pytest.mark.skipif(not native.native_available(), reason="the native kernels are not built")
def test_what_a_processor_multiplies_runs_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_chunk_reference", None)
    for dtype in DTYPES:
        Request(2, 4, 64, dtype, dtype).extend(LONGEST, LONGEST)


@pytest.mark.parametrize(
    "change", ["block", "negative block", "length beyond the table", "no length", "more tokens than the length"]
)
def test_what_lies_outside_is_refused_before_anything_is_written(change: str, kernels: str) -> None:
    request = Request(2, 4, 64, torch.float32, torch.float32, length=100)
    query, new = request.query[:4], (request.key[:4], request.value[:4])
    length = {"length beyond the table": 113, "no length": 0, "more tokens than the length": 3}.get(change, 100)
    if "block" in change:
        request.table[3] = -1 if change == "negative block" else 14
    with pytest.raises(InvalidArgumentError) as raised:
        chunk_attention(
            query, request.keys, request.values, request.table, length, BLOCK_TOKENS, request.scale, 0, 0.0, *new
        )
    assert raised.value.field == "block_tables"
    assert request.keys.isnan().all() and request.values.isnan().all()


def test_shapes_that_do_not_fit_are_refused(kernels: str) -> None:
    request = Request(2, 4, 64, torch.float32, torch.float32, length=40)
    query, new = request.query[:4], (request.key[:4], request.value[:4])

    def attend(query: torch.Tensor, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return chunk_attention(
            query, request.keys, request.values, table, 40, BLOCK_TOKENS, request.scale, 0, 0.0, keys, values
        )

    for field, arguments in (
        ("keys", (query[:, :3], request.table, *new)),
        ("keys", (query[..., :32], request.table, *new)),
        ("block_tables", (query, request.table.long(), *new)),
        ("new", (query, request.table, new[0][:3], new[1])),
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            attend(*arguments)
        assert raised.value.field == field
