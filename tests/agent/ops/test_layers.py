"""RMS norms, rotary embedding, gates and paged attention against the definition written out in
torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from edgeshard_agent.ops.elementwise import (
    clamped_swiglu,
    gated_head_norm,
    geglu,
    rms_norm,
    rotary_,
    sigmoid_gate,
    swiglu,
)
from torch.nn.functional import gelu, silu
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from edgeshard.domain.errors import InvalidArgumentError

DTYPES = [torch.float32, torch.bfloat16]
# One unit in the last place of a number near 1, twice: sums in another order may round the other
# way.
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
@pytest.mark.parametrize("width", [1, 100, 1024])
def test_rms_norm_with_a_unit_offset_is_transformers(
    width: int, dtype: torch.dtype, kernels: str
) -> None:
    x, residual = made(5, width, dtype=dtype) * 3, made(5, width, seed=1, dtype=dtype)
    module = Gemma2RMSNorm(width, eps=1e-5)
    module.weight.data = made(width, seed=2, dtype=dtype)
    normalised, summed = rms_norm(x, module.weight.data, 1e-5, residual, unit_offset=True)
    assert torch.equal(summed, x + residual)
    close(normalised, module(x + residual).detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 1024])
def test_rms_norm_that_is_rounded_last_is_transformers(
    width: int, dtype: torch.dtype, kernels: str
) -> None:
    x, residual = made(5, width, dtype=dtype) * 3, made(5, width, seed=1, dtype=dtype)
    for module in (GptOssRMSNorm(width, eps=1e-5), Gemma4RMSNorm(width, eps=1e-5)):
        module.weight.data = made(width, seed=2, dtype=dtype)
        normalised, summed = rms_norm(x, module.weight.data, 1e-5, residual, rounded_last=True)
        assert torch.equal(summed, x + residual)
        close(normalised, module(x + residual).detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (3, 24), (4, 128)])
def test_gated_head_norm_is_transformers(
    heads: int, width: int, dtype: torch.dtype, kernels: str
) -> None:
    x = made(5, heads, width, dtype=dtype) * 3
    packed = made(5, 2 * heads * width, seed=1, dtype=dtype) * 4
    gate = packed[:, heads * width :]
    module = Qwen3_5RMSNormGated(width, eps=1e-6)
    module.weight.data = made(width, seed=2, dtype=dtype)
    before = x.clone()
    close(
        gated_head_norm(x, gate, module.weight.data, 1e-6),
        module(x, gate.reshape(x.shape)).detach(),
    )
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 512])
def test_sigmoid_gate(width: int, dtype: torch.dtype, kernels: str) -> None:
    values, packed = made(4, width, dtype=dtype), made(4, width + 3, seed=1, dtype=dtype) * 10
    gate = packed[:, 3:]
    expected = values * torch.sigmoid(gate)
    close(sigmoid_gate(values, gate), expected)


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
        expected, _ = apply_rotary_pos_emb(
            turned, turned, cos.to(dtype).unsqueeze(0), sin.to(dtype).unsqueeze(0)
        )
        close(now[..., :rotary_dim], expected[0].transpose(0, 1))
        assert torch.equal(now[..., rotary_dim:], then[..., rotary_dim:])
    assert torch.equal(packed[:, 6:], before[:, 6:]), "the values beside q and k were touched"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 17, 2816])
def test_swiglu(inner: int, dtype: torch.dtype, kernels: str) -> None:
    gate_up = made(4, 2 * inner, dtype=dtype) * 10
    close(swiglu(gate_up), silu(gate_up[:, :inner]) * gate_up[:, inner:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 17, 2816])
def test_geglu(inner: int, dtype: torch.dtype, kernels: str) -> None:
    gate_up = made(4, 2 * inner, dtype=dtype) * 4
    close(geglu(gate_up), gelu(gate_up[:, :inner], approximate="tanh") * gate_up[:, inner:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 17, 2880])
def test_clamped_swiglu_is_transformers(inner: int, dtype: torch.dtype, kernels: str) -> None:
    theirs = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=2, intermediate_size=2))
    gate_up = made(4, 2 * inner, dtype=dtype) * 5
    assert gate_up.abs().max() > theirs.limit or inner == 1
    close(clamped_swiglu(gate_up, theirs.alpha, theirs.limit), theirs._apply_gate(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_a_row_do_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, kernels: str
) -> None:
    if kernels == "torch":
        return  # with two threads gelu of these rows in float32 has other bits than of each alone
    gate_up = made(129, 2000, dtype=dtype)
    clamped = partial(clamped_swiglu, alpha=1.7, limit=2.0)
    gates: list[Callable[[torch.Tensor], torch.Tensor]] = [swiglu, geglu, clamped]
    for gate in gates:
        assert torch.equal(gate(gate_up), torch.cat([gate(row.unsqueeze(0)) for row in gate_up]))


def test_gates_at_the_ends_of_their_range(kernels: str) -> None:
    gate = torch.tensor([[-1e30, -1000.0, -88.0, 0.0, 88.0, 1000.0, 1e30, float("nan")]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    torch.testing.assert_close(
        geglu(gate_up), gelu(gate, approximate="tanh"), rtol=1e-5, atol=1e-6, equal_nan=True
    )
    clamped = gate.clamp(max=7.0)
    found = clamped_swiglu(torch.stack((gate, torch.ones_like(gate)), dim=2).flatten(1), 1.0, 7.0)
    torch.testing.assert_close(
        found, 2 * clamped * torch.sigmoid(clamped), rtol=1e-5, atol=1e-6, equal_nan=True
    )


def test_swiglu_at_the_ends_of_its_range(kernels: str) -> None:
    gate = torch.tensor([[-1000.0, -88.0, 0.0, 88.0, 1000.0, float("nan")]])
    result = swiglu(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(result, silu(gate), rtol=1e-5, atol=1e-30, equal_nan=True)


def test_shapes_that_do_not_fit_are_refused(kernels: str) -> None:
    x, weight = made(2, 8), made(8)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("x", lambda: rms_norm(x, made(7), 1e-5)),
        ("x", lambda: rms_norm(x, weight, 1e-5, made(3, 8))),
        ("gate", lambda: gated_head_norm(made(2, 3, 4), made(2, 8), made(4), 1e-5)),
        ("gate", lambda: sigmoid_gate(made(2, 8), made(2, 4))),
        ("gate_up", lambda: swiglu(made(2, 7))),
        ("gate_up", lambda: swiglu(x, made(2, 8))),
        ("gate_up", lambda: geglu(made(2, 7))),
        ("gate_up", lambda: clamped_swiglu(made(2, 7), 1.0, 1.0)),
        ("cos", lambda: rotary_(made(2, 1, 8), made(2, 1, 8), made(2, 10), made(2, 10))),
        ("cos", lambda: rotary_(made(2, 1, 8), made(2, 1, 8), made(3, 8), made(3, 8))),
        ("cos", lambda: rotary_(made(2, 1, 8), made(3, 1, 8), made(2, 8), made(2, 8))),
        ("cos", lambda: rotary_(made(2, 1, 8), made(2, 1, 4), made(2, 8), made(2, 8))),
    ]
    for field, call in cases:
        with pytest.raises(InvalidArgumentError) as raised:
            call()
        assert raised.value.field == field
