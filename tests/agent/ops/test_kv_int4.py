"""Keys and values of 4 bits: how far they may be from what was written, and that all kernels write
the same bits."""

from __future__ import annotations

import pytest
import torch
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.kv_arena import check_int4, make_arena
from edgeshard_agent.ops.kv_int4 import LEAST_STEP, Int4Arena
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType, KvFormat

SLOTS = 64
DIMS = [16, 48, 64, 80, 128]


def by_group(numbers: torch.Tensor) -> torch.Tensor:
    groups: torch.Tensor = numbers.double().unflatten(-1, (-1, KvFormat.group(numbers.shape[-1])))
    return groups


def check_bound(given_numbers: torch.Tensor, found: torch.Tensor) -> None:
    numbers = by_group(given_numbers)
    allowed = 1.02 / 30 * (numbers.amax(-1, keepdim=True) - numbers.amin(-1, keepdim=True))
    assert ((by_group(found) - numbers).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", DIMS)
def test_what_is_read_is_near_what_was_written(head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(40, 3, head_dim, generator=generator)
    outlier = normal.clone()
    outlier[:, :, 3] *= 100
    for numbers in (
        normal,
        outlier,
        normal * 0.01 + 7,
        normal * 1e-30,
        normal * 1e30,
        torch.full_like(normal, -0.3),
    ):
        arena = Int4Arena(SLOTS, 3, head_dim)
        slots = torch.randperm(SLOTS, generator=generator)[:40]
        keys, values = numbers.to(dtype), numbers.flip(0).to(dtype)
        arena.write(slots, keys, values)
        found_keys, found_values = arena.read(slots)
        check_bound(keys, found_keys)
        check_bound(values, found_values)


@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=32, max_size=32),
    st.floats(-1000, 1000, width=32),
)
def test_any_group_is_within_the_bound(numbers: list[float], offset: float) -> None:
    group = torch.tensor(numbers, dtype=torch.float32) + offset
    # Below this a group counts as constant, or float32 itself is too coarse for what is read.
    if float(group.max() - group.min()) < max(20 * LEAST_STEP, 1e-3 * float(group.abs().max())):
        group = torch.full_like(group, offset)
    arena = Int4Arena(16, 1, 32)
    key = group.view(1, 1, 32)
    arena.write(torch.tensor([5]), key, key.flip(-1))
    keys, values = arena.read(torch.tensor([5]))
    check_bound(key, keys)
    check_bound(key.flip(-1), values)


def test_what_is_not_finite_stays_so() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        key = torch.ones(1, 1, 64)
        key[0, 0, 40] = bad
        arena = Int4Arena(16, 1, 64)
        arena.write(torch.tensor([0]), key, key)
        keys, _ = arena.read(torch.tensor([0]))
        assert not keys[..., 32:].isfinite().any()
        assert keys[..., :32].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", DIMS)
def test_all_kernels_write_the_bits_of_the_definition(
    head_dim: int, dtype: torch.dtype, kernels: str
) -> None:
    """Ties between two of the sixteen values, negative zeros and constants among them."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(48, 4, head_dim, generator=generator)
    rows[5] = torch.randint(0, 31, rows[5].shape, generator=generator) / 2
    rows[6] = -0.0
    rows[7] = 1.7
    rows[8] = torch.randn(head_dim) * 1e-36
    rows[9, :, ::3] = torch.nan
    packed = rows.to(dtype)
    query = packed[:, :2]
    keys = packed[:, 2:3]
    values = packed[:, 3:]
    expected = Int4Arena(SLOTS, 1, head_dim)
    found = make_arena(SLOTS, 1, head_dim, KvFormat.INT4, 16, "cpu")
    assert isinstance(found, Int4Arena)
    expected.write(torch.arange(48), keys, values)
    for first, end in ((0, 3), (3, 21), (21, 48)):
        spans = SpanTables(
            torch.arange(4, dtype=torch.int32).view(1, 4),
            torch.tensor([end], dtype=torch.int32),
            torch.tensor([0, end - first], dtype=torch.int32),
            16,
        )
        some = slice(first, end)
        attend(query[some], keys[some], values[some], found, spans, Scoring(1.0))
    for one, other in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.equal(one, other)


def test_bytes_of_a_token() -> None:
    assert [KvFormat.INT4.head_bytes(dim) for dim in (16, 64, 80, 128)] == [14, 44, 70, 88]
    assert [KvFormat(dtype).head_bytes(64) for dtype in DType] == [256, 128, 128]


@pytest.mark.parametrize(
    ("head_dim", "block_tokens", "device", "what"),
    [
        (64, 16, "cuda", "runs on the CPU"),
        (20, 16, "cpu", "multiple of 16"),
        (64, 8, "cpu", "whole pages"),
    ],
)
def test_what_cannot_be_of_4_bits_is_refused_by_name(
    head_dim: int, block_tokens: int, device: str, what: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=what) as raised:
        check_int4(head_dim, block_tokens, device)
    assert (raised.value.field, raised.value.reason) == ("kv_dtype", "UNSUPPORTED_KV_DTYPE")
