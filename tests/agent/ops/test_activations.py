"""Activations, the cap on logits, angles and routing against their definitions written out in
torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from edgeshard_agent.ops.elementwise import gelu, quick_gelu, rotary_angles, softcap
from edgeshard_agent.ops.routing import route
from torch.nn import functional

from edgeshard.domain.errors import InvalidArgumentError

DTYPES = [torch.float32, torch.bfloat16]
LONGEST_CONTEXT = 1 << 24


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def capped(x: torch.Tensor) -> torch.Tensor:
    return softcap(x, 3.0)


REFERENCES: list[
    tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
] = [
    (gelu, functional.gelu),
    (quick_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    (capped, lambda x: torch.tanh(x / 3.0) * 3.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 512])
@pytest.mark.parametrize(("ours", "theirs"), REFERENCES, ids=["gelu", "quick_gelu", "softcap"])
def test_an_activation_is_that_of_transformers(
    ours: Callable[[torch.Tensor], torch.Tensor],
    theirs: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    dtype: torch.dtype,
    kernels: str,
) -> None:
    view = made(5, 2 * width, dtype=dtype)[:, width:] * 4
    tolerance = 2e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(ours(view), theirs(view), rtol=tolerance, atol=tolerance)
    assert ours(view.unsqueeze(0)).shape == (1, 5, width)


def test_gelu_keeps_a_nan_and_the_ends(kernels: str) -> None:
    result = gelu(torch.tensor([float("nan"), 100.0, -100.0, 0.0]))
    assert result[0].isnan()
    assert result[1:].tolist() == [100.0, 0.0, 0.0]


def test_angles_are_the_nearest_floats_up_to_the_longest_context(kernels: str) -> None:
    if kernels == "torch":
        return  # its last bits depend on the processor
    generator = torch.Generator().manual_seed(1)
    far = torch.randint(0, LONGEST_CONTEXT, (3000,), generator=generator)
    positions = torch.cat((torch.arange(3000), far, torch.tensor([LONGEST_CONTEXT])))
    frequencies = torch.cat((torch.ones(1), torch.rand(20, generator=generator) ** 4))
    cos, sin = rotary_angles(positions, frequencies, 1.0, torch.float32)
    angles = torch.outer(positions.float(), frequencies).double()
    assert torch.equal(cos, angles.cos().float().repeat(1, 2))
    assert torch.equal(sin, angles.sin().float().repeat(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_are_scaled_before_they_are_rounded(dtype: torch.dtype, kernels: str) -> None:
    positions = torch.arange(100)
    frequencies = torch.tensor([1.0, 0.01])
    cos, sin = rotary_angles(positions, frequencies, 1.3, dtype)
    half = torch.outer(positions.float(), frequencies)
    tolerance = 3e-7 if dtype is torch.float32 else 2**-8
    for result, expected in ((cos, half.cos() * 1.3), (sin, half.sin() * 1.3)):
        torch.testing.assert_close(
            result, expected.repeat(1, 2).to(dtype), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [4, 60, 128])
def test_shares_by_softmax(experts: int, dtype: torch.dtype, kernels: str) -> None:
    logits = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(row)) for row in range(40)]
    )
    logits = (logits / 16).to(dtype)  # exact in either dtype, and no two of a row are equal
    chosen, shares = route(logits, 3, scale=2.0)
    best = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(3, dim=-1)
    assert torch.equal(chosen, best.indices)
    torch.testing.assert_close(
        shares, 2.0 * best.values / best.values.sum(-1, keepdim=True), rtol=1e-6, atol=0
    )
    _, raw = route(logits, 3, normalised=False)
    torch.testing.assert_close(raw, best.values, rtol=1e-6, atol=1e-30)


def test_shares_by_sigmoid_in_groups(kernels: str) -> None:
    logits, correction = made(50, 24) * 3, made(24, seed=1)
    chosen, shares = route(logits, 4, correction, sigmoid=True, groups=6, kept_groups=2)
    scores = torch.sigmoid(logits)
    ranked = (scores + correction).view(50, 6, 4)
    best_groups = ranked.topk(2, dim=-1).values.sum(-1).topk(2, dim=-1).indices
    for row in range(50):
        allowed = [4 * int(group) + i for group in best_groups[row] for i in range(4)]
        order = sorted(allowed, key=lambda expert: -float(ranked.view(50, 24)[row, expert]))
        assert chosen[row].tolist() == order[:4]
    expected = scores.gather(1, chosen)
    torch.testing.assert_close(shares, expected / expected.sum(-1, keepdim=True), rtol=1e-6, atol=0)


def test_of_equal_scores_the_first_experts_are_chosen(kernels: str) -> None:
    if kernels == "torch":
        return  # which of them torch takes is not defined
    logits = torch.zeros(40, 64, dtype=torch.bfloat16)
    logits[:, 50] = 1.0
    assert route(logits, 4)[0].tolist() == [[50, 0, 1, 2]] * 40


@pytest.mark.parametrize("options", [{"count": 9}, {"count": 0}, {"count": 2, "groups": 3}])
def test_a_choice_that_does_not_fit_is_refused(options: dict[str, Any], kernels: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        route(torch.zeros(1, 8), **options)
    assert refused.value.field == "count"
