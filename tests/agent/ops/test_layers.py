"""RMS norm, rotary embedding, the gated activation and paged attention against the definition written out in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from edgeshard_agent.ops import paged_attention, rms_norm, rotary_, swiglu
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from edgeshard.domain.errors import InvalidArgumentError

DTYPES = [torch.float32, torch.bfloat16]
# One unit in the last place of a number near 1, twice: sums in another order may round the other way.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 100, 1024])
def test_rms_norm_is_transformers(width: int, dtype: torch.dtype, kernels: str) -> None:
    x, residual = made(5, width, dtype=dtype) * 3, made(5, width, seed=1, dtype=dtype)
    module = LlamaRMSNorm(width, eps=1e-5)
    module.weight.data = made(width, seed=2, dtype=dtype)
    normalised, summed = rms_norm(x, module.weight.data, 1e-5, residual)
    assert torch.equal(summed, x + residual)
    close(normalised, module(x + residual).detach())
    normalised, summed = rms_norm(x, module.weight.data, 1e-5)
    assert torch.equal(summed, x)
    close(normalised, module(x).detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angle_dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (80, 20), (6, 6)])
def test_rotary_is_transformers(
    head_dim: int, rotary_dim: int, angle_dtype: torch.dtype, dtype: torch.dtype, kernels: str
) -> None:
    half = made(3, rotary_dim // 2, seed=1)
    angles = torch.cat((half, half), dim=-1)
    cos, sin = angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)
    packed = made(3, 9, head_dim, dtype=dtype)
    before = packed.clone()
    query, key = packed[:, :4], packed[:, 4:6]
    rotary_(query, key, cos, sin)
    for now, then in ((query, before[:, :4]), (key, before[:, 4:6])):
        turned = then[..., :rotary_dim].transpose(0, 1).unsqueeze(0)
        expected, _ = apply_rotary_pos_emb(turned, turned, cos.to(dtype).unsqueeze(0), sin.to(dtype).unsqueeze(0))
        close(now[..., :rotary_dim], expected[0].transpose(0, 1))
        assert torch.equal(now[..., rotary_dim:], then[..., rotary_dim:])
    assert torch.equal(packed[:, 6:], before[:, 6:]), "the values beside q and k were touched"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 17, 2816])
def test_swiglu(inner: int, dtype: torch.dtype, kernels: str) -> None:
    gate_up = made(4, 2 * inner, dtype=dtype) * 10
    close(swiglu(gate_up), silu(gate_up[:, :inner]) * gate_up[:, inner:])


def test_swiglu_at_the_ends_of_its_range(kernels: str) -> None:
    gate = torch.tensor([[-1000.0, -88.0, 0.0, 88.0, 1000.0, float("nan")]])
    result = swiglu(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(result, silu(gate), rtol=1e-5, atol=1e-30, equal_nan=True)


class Pages:
    """Arenas of random numbers, four requests of different lengths and their new tokens."""

    def __init__(self, kv_heads: int, heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.block_tokens, blocks = 16, 60
        self.keys = made(blocks * self.block_tokens, kv_heads, head_dim, seed=1, dtype=kv_dtype)
        self.values = made(blocks * self.block_tokens, kv_heads, head_dim, seed=2, dtype=kv_dtype)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3))
        self.tables = order[:48].view(4, 12).int()
        self.lengths = torch.tensor([1, 17, 100, 192], dtype=torch.int32)
        self.query = made(4, heads, head_dim, seed=4, dtype=dtype)
        self.new_keys = made(4, kv_heads, head_dim, seed=5, dtype=dtype)
        self.new_values = made(4, kv_heads, head_dim, seed=6, dtype=dtype)
        self.scale = head_dim**-0.5

    def attend(self, window: int = 0, softcap: float = 0.0, rows: slice = slice(None)) -> torch.Tensor:
        return paged_attention(
            self.query[rows],
            self.keys,
            self.values,
            self.tables[rows],
            self.lengths[rows],
            self.block_tokens,
            self.scale,
            window,
            softcap,
            self.new_keys[rows],
            self.new_values[rows],
        )

    def expected(self, row: int, window: int, softcap: float) -> torch.Tensor:
        """The definition, in float64, for one request whose new token has been written."""
        length = int(self.lengths[row])
        first = max(0, length - window) if window else 0
        positions = torch.arange(first, length)
        slots = self.tables[row].long()[positions // self.block_tokens] * self.block_tokens
        slots += positions % self.block_tokens
        heads, kv_heads = self.query.shape[1], self.keys.shape[1]
        keys = self.keys[slots].double().repeat_interleave(heads // kv_heads, dim=1)
        values = self.values[slots].double().repeat_interleave(heads // kv_heads, dim=1)
        query = self.query[row].double()
        if not softcap:
            return scaled_dot_product_attention(
                query.unsqueeze(1), keys.transpose(0, 1), values.transpose(0, 1), scale=self.scale
            ).squeeze(1)
        scores = torch.tanh(torch.einsum("hd,thd->ht", query, keys) * self.scale / softcap) * softcap
        return torch.einsum("ht,thd->hd", torch.softmax(scores, -1), values)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (0, 5.0), (1, 0.0), (500, 2.0)])
@pytest.mark.parametrize("shape", [(8, 16, 64), (1, 7, 128), (12, 12, 80), (2, 4, 20), (1, 2, 512)])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(a, b) for a in DTYPES for b in (*DTYPES, torch.float16)])
def test_attention_over_pages(
    shape: tuple[int, int, int],
    window: int,
    softcap: float,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    kernels: str,
) -> None:
    kv_heads, heads, head_dim = shape
    pages = Pages(kv_heads, heads, head_dim, dtype, kv_dtype)
    untouched = pages.keys.clone()
    result = pages.attend(window, softcap)
    for row in range(4):
        close(result[row], pages.expected(row, window, softcap).to(dtype))
        last = int(pages.lengths[row]) - 1
        slot = int(pages.tables[row, last // 16]) * 16 + last % 16
        assert torch.equal(pages.keys[slot], pages.new_keys[row].to(kv_dtype))
        assert torch.equal(pages.values[slot], pages.new_values[row].to(kv_dtype))
        untouched[slot] = pages.keys[slot]
    assert torch.equal(pages.keys, untouched), "wrote beside the new tokens"


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_row_alone_equals_the_row_in_the_batch(dtype: torch.dtype, kernels: str) -> None:
    pages = Pages(8, 16, 64, dtype, dtype)
    together = pages.attend()
    for row in range(4):
        assert torch.equal(pages.attend(rows=slice(row, row + 1))[0], together[row])


def test_attention_refuses_blocks_and_lengths_outside(kernels: str) -> None:
    for change in ("block", "negative block", "length", "no length"):
        pages = Pages(2, 4, 64, torch.float32, torch.float32)
        if change == "block":
            pages.tables[2, 3] = 60
        elif change == "negative block":
            pages.tables[2, 3] = -1
        else:
            pages.lengths[2] = 193 if change == "length" else 0
        before = pages.keys.clone()
        with pytest.raises(InvalidArgumentError, match="row 2") as raised:
            pages.attend()
        assert raised.value.field == "block_tables"
        assert torch.equal(pages.keys, before)


def test_attention_does_not_look_at_blocks_beyond_the_length(kernels: str) -> None:
    pages = Pages(2, 4, 64, torch.float32, torch.float32)
    expected = pages.attend()
    pages.tables[0, 1:] = -1
    assert torch.equal(pages.attend(), expected)


def test_shapes_that_do_not_fit_are_refused(kernels: str) -> None:
    x, weight = made(2, 8), made(8)
    pages = Pages(2, 4, 64, torch.float32, torch.float32)
    memory = (pages.keys, pages.values, pages.tables, pages.lengths)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("x", lambda: rms_norm(x, made(7), 1e-5)),
        ("x", lambda: rms_norm(x, weight, 1e-5, made(3, 8))),
        ("gate_up", lambda: swiglu(made(2, 7))),
        ("gate_up", lambda: swiglu(x, made(2, 8))),
        ("cos", lambda: rotary_(made(2, 1, 8), made(2, 1, 8), made(2, 10), made(2, 10))),
        ("cos", lambda: rotary_(made(2, 1, 8), made(2, 1, 8), made(3, 8), made(3, 8))),
        ("cos", lambda: rotary_(made(2, 1, 8), made(3, 1, 8), made(2, 8), made(2, 8))),
        ("cos", lambda: rotary_(made(2, 1, 8), made(2, 1, 4), made(2, 8), made(2, 8))),
        (
            "keys",
            lambda: paged_attention(made(4, 3, 64), *memory, 16, 1.0),
        ),
        (
            "keys",
            lambda: paged_attention(made(4, 4, 32), *memory, 16, 1.0),
        ),
        (
            "block_tables",
            lambda: paged_attention(pages.query, pages.keys, pages.values, pages.tables.long(), pages.lengths, 16, 1.0),
        ),
    ]
    for field, call in cases:
        with pytest.raises(InvalidArgumentError) as raised:
            call()
        assert raised.value.field == field
