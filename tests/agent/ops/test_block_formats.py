"""Matrices in llama.cpp's block formats: their numbers, their packed bytes, and the products of the
kernels."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from edgeshard_agent.ops.block_formats import BlockWeight, block_rows, layout_of, pack_blocks
from edgeshard_agent.ops.linear import ROW_GROUP, PackedLinear
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.ops.quantize import quantize_activation
from numpy.typing import NDArray

from edgeshard.domain.models.dtypes import BLOCK_FORMATS, IntegerFormat
from tests.agent.ops.conftest import FALLBACK

COLUMNS = 768
KINDS = [pytest.param(kind, id=kind.value) for kind in BLOCK_FORMATS]


_MINIMA = {"q4_k": (2,), "q5_k": (2,), "q4_1": (2,), "q5_1": (2,), "q2_k": (82,)}
_FACTORS = {"q6_k": 208, "q2_k": 80, "q3_k": 108, "tq1_0": 52, "tq2_0": 64}
_WITHOUT = ("iq1_m", "mxfp4", "nvfp4")
"""Formats whose blocks have no float16 factor in two bytes side by side."""


def made(kind: IntegerFormat, rows: int, seed: int = 3) -> BlockWeight:
    """Random blocks whose factors are of either sign and of several sizes."""
    layout, generator = layout_of(kind), torch.Generator().manual_seed(seed)
    weight = BlockWeight.random(rows, COLUMNS, kind)
    blocks = weight.data.view(-1, layout.stored_bytes).clone()
    at = () if kind in _WITHOUT else (_FACTORS.get(kind, 0), *_MINIMA.get(kind, ()))
    for first in at:
        factors = torch.randn(len(blocks), generator=generator) * 1e-3
        blocks[:, first : first + 2] = factors.half().unsqueeze(-1).view(torch.uint8)
    if kind == "mxfp4":
        blocks[:, 0] = torch.randint(108, 118, (len(blocks),), generator=generator).to(torch.uint8)
    return BlockWeight(blocks.view(rows, -1), kind, COLUMNS)


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(9)).to(dtype)


def _numbers(kind: IntegerFormat, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers by the `gguf` package; by their definition, one by one, in the formats that it
    does not read."""
    if kind not in ("q1_0", "q2_0", "int4_zeros"):
        return gguf.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
    layout, found = layout_of(kind), []
    for block in data.reshape(-1, layout.stored_bytes):
        scale = block[:2].view(np.float16).astype(np.float32)
        packed = block[3 if kind == "int4_zeros" else 2 :]
        for place in range(layout.inputs):
            if kind == "q1_0":
                value = 2 * (int(packed[place // 8]) >> place % 8 & 1) - 1
            elif kind == "q2_0":
                value = (int(packed[place // 4]) >> 2 * (place % 4) & 3) - 1
            else:
                value = (int(packed[place % 16]) >> 4 * (place // 16) & 15) - int(block[2])
            found.append(scale * np.float32(value))
    return np.array(found, np.float32).reshape(len(data), -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "blocks"), [(40, 3), (1, 1)])
def test_numbers_are_bit_for_bit_those_of_the_gguf_package(
    kind: IntegerFormat, rows: int, blocks: int
) -> None:
    layout = layout_of(kind)
    shape = (rows, blocks * layout.stored_bytes)
    data = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    found = BlockWeight(torch.from_numpy(data), kind, blocks * layout.inputs).dequantize().numpy()
    with np.errstate(all="ignore"):
        expected = _numbers(kind, data)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    found, expected = np.nan_to_num(found, nan=0.0), np.nan_to_num(expected, nan=0.0)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5, 32, 70])
def test_packed_rows_are_the_numbers_bit_for_bit(kind: IntegerFormat, rows: int) -> None:
    weight = made(kind, rows)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(2))
    packed = pack_blocks(weight)
    assert torch.equal(block_rows(packed, kind, COLUMNS, order), weight.dequantize()[order])
    assert packed.numel() == kind.matrix_bytes(-(-rows // 32) * 32, COLUMNS)
    assert packed.numel() <= 1.05 * weight.nbytes * (-(-rows // 32) * 32) / rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_numbers(
    kind: IntegerFormat, dtype: torch.dtype, kernels: str
) -> None:
    weight = made(kind, 70)
    x = inputs(13, dtype)
    bias = torch.linspace(-1, 1, 70)
    found = PackedLinear.pack_blocks(weight, bias)(x)
    rounded = x.float() if kernels == FALLBACK else quantize_activation(x, ROW_GROUP)
    numbers = weight.dequantize().double()
    expected = rounded.double() @ numbers.T + bias.double()
    terms = rounded.double().abs() @ numbers.abs().T + bias.double().abs()
    bound = 2e-6 if dtype is torch.float32 else 2.0**-8
    assert bool(((found.double() - expected).abs() <= bound * terms + 1e-9).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_any_batch(kind: IntegerFormat, kernels: str) -> None:
    layer, x = PackedLinear.pack_blocks(made(kind, 70)), inputs(100)
    together = layer(x)
    for count in (1, 2, 3, 4, 5, 7, 13, 97):
        found = layer(x[:count])
        if kernels == FALLBACK:
            assert torch.allclose(found, together[:count], atol=1e-3)
        else:
            assert torch.equal(found, together[:count])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(kind: IntegerFormat, bad: float, kernels: str) -> None:
    x = inputs(3)
    x[1, 300] = bad
    found = PackedLinear.pack_blocks(made(kind, 70))(x)
    assert bool(found[[0, 2]].isfinite().all()) and not bool(found[1].isfinite().any())


@pytest.mark.parametrize(
    "kind", [IntegerFormat.Q4_K, IntegerFormat.IQ3_S, IntegerFormat.INT4_ZEROS]
)
@pytest.mark.skipif(not native_available(), reason="the fallback has no packed bytes")
def test_packed_bytes_of_rows_that_fill_no_panel_are_adopted(kind: IntegerFormat) -> None:
    layer = PackedLinear.pack_blocks(made(kind, 70))
    assert layer.form is not None
    adopted = PackedLinear.adopt(layer.form, layer.packed_memory, None)
    assert torch.equal(adopted(inputs(3)), layer(inputs(3)))


@pytest.mark.skipif(not native_available(), reason="the fallback has no address")
def test_layers_that_continue_give_the_outputs_of_each() -> None:
    x = inputs(5)
    weights = [
        made(kind, rows) for kind, rows in ((IntegerFormat.Q4_K, 64), (IntegerFormat.Q6_K, 40))
    ]
    parts = [PackedLinear.pack_blocks(weight) for weight in weights]
    parts.append(PackedLinear.pack(torch.randn(10, COLUMNS), "fp32"))
    expected = torch.cat([part(x) for part in parts], dim=1)
    parts[1].continue_with(parts[2])
    parts[0].continue_with(parts[1])
    assert torch.equal(parts[0](x), expected) and parts[0].outputs == 114
    assert torch.equal(parts[0].copied()(x), expected[:, :64]), "a copy is of its own outputs"
