"""Packed linear layers: right within the rounding of their scheme, and the same for a row alone as
in a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from edgeshard_agent.ops import packing
from edgeshard_agent.ops.linear import PackedLinear
from edgeshard_agent.ops.native import kernel_names
from edgeshard_agent.ops.quantize import (
    PLAIN_SCHEMES,
    QuantizedWeight,
    Scheme,
    quantize_activation,
    quantize_weight,
)
from torch.nn.functional import linear, pad

from edgeshard.domain.errors import InvalidArgumentError

KERNELS = kernel_names()

# Fewer outputs than a panel, odd ones, inputs that are no whole pair or group, and a plain case.
SHAPES = [(1, 1), (5, 33), (48, 64), (100, 71), (257, 320)]


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dtype_of(scheme: Scheme) -> torch.dtype:
    return torch.bfloat16 if scheme is Scheme.BFLOAT16 else torch.float32


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_the_exact_product_to_1e_6_of_its_terms(
    shape: tuple[int, int], kernels: str
) -> None:
    """Not compared with torch in fp32: the bits of its products depend on how many threads it
    has."""
    weight = made(*shape)
    x = made(7, shape[1], seed=1)
    bias = made(shape[0], seed=2)
    exact = linear(x.double(), weight.double(), bias.double())
    terms = linear(x.abs().double(), weight.abs().double(), bias.abs().double())
    error = (PackedLinear.pack(weight, "fp32", bias)(x).double() - exact).abs()
    assert bool((error <= 1e-6 * terms).all()), float((error / terms).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_is_the_exact_product_rounded_once(shape: tuple[int, int], kernels: str) -> None:
    weight, x = made(*shape, dtype=torch.bfloat16), made(7, shape[1], seed=1, dtype=torch.bfloat16)
    result = PackedLinear.pack(weight, "bf16")(x)
    assert result.dtype is torch.bfloat16
    exact = linear(x.double(), weight.double())
    # Half a unit in the last of bfloat16's eight binary places, and what float32 sums lose where
    # terms cancel.
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("scheme", "group"),
    [("int8", None), ("int8", 128), ("int4", None), ("int4", 64), ("int2", None), ("int2", 128)],
)
def test_integers_are_the_product_of_the_rounded_operands(
    scheme: str, group: int | None, shape: tuple[int, int], dtype: torch.dtype, kernels: str
) -> None:
    weight = made(*shape)
    x = made(7, shape[1], seed=1, dtype=dtype)
    bias = made(shape[0], seed=2)
    packed = PackedLinear.pack(weight, scheme, bias, group)
    rounded_weight = quantize_weight(weight, Scheme(scheme), packed.group).dequantize()
    rounded_x = quantize_activation(pad(x, (0, -shape[1] % packed.group)), packed.group)
    expected = linear(rounded_x, rounded_weight, bias).to(dtype)
    # An activation halfway between two integers may go either way.
    slack = {torch.float32: 2e-3, torch.bfloat16: 2e-2}[dtype] * float(expected.abs().max())
    torch.testing.assert_close(packed(x), expected, rtol=0, atol=slack)


@pytest.mark.parametrize("shape", [(5, 32), (48, 64), (100, 320)])
@pytest.mark.parametrize(("scheme", "held"), [("int8", "int8"), ("int8", "int4"), ("int4", "int4")])
def test_stored_integers_are_multiplied_as_they_are(
    scheme: str, held: str, shape: tuple[int, int], kernels: str
) -> None:
    """Their float16 scales too, of either sign, the smallest and zero among them."""
    random = torch.Generator().manual_seed(0)
    low, high = {"int8": (-127, 128), "int4": (-8, 8)}[held]
    values = torch.randint(low, high, shape, generator=random).to(torch.int8)
    scales = made(shape[0], shape[1] // 32, seed=1).to(torch.float16)
    scales[0, 0] = 2.0**-24
    scales[1, 0] = -1023 * 2.0**-24
    scales[2, 0] = 0.0
    stored = QuantizedWeight(values, scales, 32, Scheme(held))
    x, bias = made(7, shape[1], seed=2), made(shape[0], seed=3)
    expected = linear(
        quantize_activation(x, 32).double(), stored.dequantize().double(), bias.double()
    ).float()
    # Sums are float32; a scale that lost a bit of its eleven would be off by 2e-4 of the terms and
    # more.
    result = PackedLinear.pack_stored(stored, scheme, bias)(x)
    terms = linear(x.abs(), stored.dequantize().abs(), bias.abs())
    small = result[:, :3] - bias[:3]
    assert bool(((result - expected).abs() <= 3e-6 * terms).all()), float(
        ((result - expected).abs() / terms).max()
    )
    assert shape[1] > 32 or (bool((small[:, :2] != 0).any()) and not bool(small[:, 2].any()))


@pytest.mark.parametrize(
    ("scheme", "group", "bound"),
    [
        ("int8", 64, 0.012),
        ("int4", 32, 0.11),
        ("int4", 64, 0.12),
        ("int2", 32, 0.33),
        ("int2", 64, 0.35),
    ],
)
def test_what_rounding_to_integers_costs(
    scheme: str, group: int, bound: float, kernels: str
) -> None:
    """Relative error of the outputs for normally distributed weights and activations."""
    weight, x = made(256, 512), made(16, 512, seed=1)
    exact = linear(x, weight)
    error = PackedLinear.pack(weight, scheme, group=group)(x) - exact
    assert bound / 2 < float(error.norm() / exact.norm()) < bound


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES)
def test_a_row_alone_equals_the_row_in_any_batch(scheme: Scheme, kernels: str) -> None:
    if kernels == "torch":
        pytest.skip("torch chooses its algorithm by the number of rows")
    packed = PackedLinear.pack(made(100, 200), scheme, made(100, seed=2))
    x = made(200, 200, seed=1, dtype=dtype_of(scheme))
    everything = packed(x)
    for row in (0, 63, 199):
        assert torch.equal(packed(x[row : row + 1])[0], everything[row])
    for rows in range(1, 65):
        assert torch.equal(packed(x[:rows]), everything[:rows]), rows


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES)
def test_threads_do_not_change_a_bit(scheme: Scheme, kernels: str) -> None:
    packed = PackedLinear.pack(made(500, 200), scheme)
    x = made(9, 200, seed=1, dtype=dtype_of(scheme))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3, 2, 5):
            torch.set_num_threads(count)
            results.append(packed(x))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        torch.testing.assert_close(
            result, results[0], rtol=0, atol=1e-4 if kernels == "torch" else 0
        )


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES)
def test_packing_is_work_for_one_thread(
    scheme: Scheme, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    for name in ("pack_float", "pack_quantized"):
        real = getattr(packing, name)

        def noting(*arguments: object, real: Callable[..., torch.Tensor] = real) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return real(*arguments)

        monkeypatch.setattr(packing, name, noting)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        layer = PackedLinear.pack(made(48, 64, dtype=dtype_of(scheme)), scheme)
        assert torch.get_num_threads() == 3, "the caller computes with as many threads as before"
        with pytest.raises(InvalidArgumentError):
            PackedLinear.pack(made(48, 64), scheme, made(47))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == ([1] if layer.native_address is not None else [])


def test_several_weights_give_their_outputs_side_by_side(kernels: str) -> None:
    weights = [made(40, 64), made(8, 64, seed=1), made(8, 64, seed=2)]
    bias, x = made(8, seed=3), made(3, 64, seed=4)
    joined = torch.cat([torch.zeros(40), bias, torch.zeros(8)])
    expected = torch.cat(
        [linear(x, weights[0]), linear(x, weights[1], bias), linear(x, weights[2])], dim=1
    )
    for biases in ([None, bias, None], [joined]):
        torch.testing.assert_close(
            PackedLinear.pack(weights, "fp32", biases)(x), expected, rtol=1e-5, atol=1e-5
        )
    with pytest.raises(InvalidArgumentError, match="bias must have 56 elements"):
        PackedLinear.pack(weights, "fp32", [bias])


def test_rows_and_out_may_be_views(kernels: str) -> None:
    packed = PackedLinear.pack(made(32, 64), "fp32")
    wide = made(6, 200, seed=1)
    expected = packed(wide[::2, 10:74].contiguous())
    out = torch.zeros(3, 50)
    assert packed(wide[::2, 10:74], out[:, 5:37]).data_ptr() == out[:, 5:37].data_ptr()
    torch.testing.assert_close(out[:, 5:37], expected, rtol=1e-5, atol=1e-5)
    assert not out[:, :5].any() and not out[:, 37:].any(), "wrote beside its columns"
    transposed = made(64, 3, seed=2).t()
    torch.testing.assert_close(
        packed(transposed), packed(transposed.contiguous()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES)
def test_no_rows_give_no_rows(scheme: Scheme, kernels: str) -> None:
    assert PackedLinear.pack(made(8, 64), scheme)(
        torch.empty(0, 64, dtype=dtype_of(scheme))
    ).shape == (0, 8)


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(scheme: Scheme, bad: float, kernels: str) -> None:
    packed = PackedLinear.pack(made(40, 64) + 3, scheme)
    x = torch.ones(2, 64, dtype=dtype_of(scheme))
    x[1, 5] = bad
    result = packed(x)
    assert result[0].isfinite().all()
    assert not result[1].isfinite().any()


def test_zeros_and_what_is_nearly_zero_give_zeros(kernels: str) -> None:
    for scheme in ("int8", "int4", "int2"):
        assert not PackedLinear.pack(torch.zeros(40, 64), scheme)(made(2, 64)).any()
        assert not PackedLinear.pack(made(40, 64), scheme)(torch.zeros(2, 64)).any()
        assert not PackedLinear.pack(made(40, 64) * 1e-39, scheme)(made(2, 64)).any()
        assert not PackedLinear.pack(made(40, 64), scheme)(made(2, 64) * 1e-39).any()


@pytest.mark.skipif(not KERNELS, reason="the fallback keeps integers of 4 bits in bytes")
def test_bytes_held() -> None:
    weight = made(64, 128)
    sizes = {scheme: PackedLinear.pack(weight, scheme).nbytes for scheme in PLAIN_SCHEMES}
    assert sizes == {
        "fp32": 64 * 128 * 4,
        "bf16": 64 * 128 * 2,
        "int8": 64 * (128 + 4),
        "int4": 64 * (64 + 8),
        "int2": 64 * (32 + 8),
    }


@pytest.mark.parametrize(
    ("field", "weight", "scheme", "options"),
    [
        ("scheme", made(4, 8), "int5", {}),
        ("group", made(4, 8), "int4", {"group": 48}),
        ("group", made(4, 8), "bf16", {"group": 32}),
        ("weight", [made(4, 8), made(4, 9)], "fp32", {}),
        ("weight", [], "fp32", {}),
        ("weight", made(8), "fp32", {}),
        ("bias", made(4, 8), "fp32", {"bias": made(5)}),
        ("bias", [made(4, 8), made(4, 8)], "fp32", {"bias": [made(4), made(3)]}),
    ],
)
def test_refuses_to_pack(
    field: str,
    weight: torch.Tensor | list[torch.Tensor],
    scheme: str,
    options: dict[str, object],
    kernels: str,
) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        PackedLinear.pack(weight, scheme, **options)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_refuses_what_does_not_fit(kernels: str) -> None:
    packed = PackedLinear.pack(made(4, 8), "bf16")
    x = made(2, 8, dtype=torch.bfloat16)
    elsewhere = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
    for bad in (
        made(2, 8),
        made(2, 9, dtype=torch.bfloat16),
        made(8, dtype=torch.bfloat16),
        x.half(),
        elsewhere,
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            packed(bad)
        assert raised.value.field == "x"
    for out in (
        torch.empty(2, 5, dtype=torch.bfloat16),
        torch.empty(2, 4),
        torch.empty(4, 2, dtype=x.dtype).t(),
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            packed(x, out)
        assert raised.value.field == "out"
