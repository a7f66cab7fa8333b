"""The demo model quantised as others do it, written as their checkpoints: rounding to the nearest,
nothing clever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Quantised:
    """A checkpoint's tensors for one matrix, by the ends of names, and the numbers that they
    encode."""

    parts: Parts
    means: torch.Tensor


Quantise = Callable[[torch.Tensor], Quantised]


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, columns * bits / 32] of values [rows, columns] of 0 and more, the first
    lowest."""
    each = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    joined = (values.long().view(len(values), -1, each) << shifts).sum(-1)
    return torch.where(joined >= 2**31, joined - 2**32, joined).to(torch.int32)


def rounded(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric values [rows, columns] and scales [rows, groups]."""
    grouped = weight.view(len(weight), -1, group)
    scales = (grouped.abs().amax(-1) / (2 ** (bits - 1) - 1)).to(dtype)
    values = (
        (grouped / scales.float()[..., None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )
    return values.view(weight.shape), scales


def asymmetric(
    weight: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and zero points of 0 and more, scales in float16: (value - zero) * scale."""
    grouped = weight.view(len(weight), -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    values = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return values.view(weight.shape), zeros, scales


def spread(of_groups: torch.Tensor, columns: int) -> torch.Tensor:
    return of_groups.float().repeat_interleave(columns // of_groups.shape[1], 1)


def pack_quantised(bits: int, group: int, dtype: torch.dtype) -> Quantise:
    def quantise(weight: torch.Tensor) -> Quantised:
        values, scales = rounded(weight, bits, group, dtype)
        parts = {
            "weight_packed": words(values + 2 ** (bits - 1), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        return Quantised(parts, values * spread(scales, weight.shape[1]))

    return quantise


def pack_asymmetric(weight: torch.Tensor) -> Quantised:
    values, zeros, scales = asymmetric(weight, 4, 64)
    parts = {
        "weight_packed": words(values, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": words(zeros.T.contiguous(), 4).T.contiguous(),
    }
    columns = weight.shape[1]
    return Quantised(parts, (values - spread(zeros, columns)) * spread(scales, columns))


def int_quantised(weight: torch.Tensor) -> Quantised:
    values, scales = rounded(weight, 8, weight.shape[1], torch.bfloat16)
    return Quantised(
        {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales.float()
    )


def awq(weight: torch.Tensor) -> Quantised:
    values, zeros, scales = asymmetric(weight, 4, 64)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(part: torch.Tensor) -> torch.Tensor:  # [groups or inputs, outputs]
        return words(part.reshape(len(part), -1, 8)[..., order].reshape(part.shape), 4)

    parts = {
        "qweight": interleaved(values.T),
        "qzeros": interleaved(zeros.T),
        "scales": scales.T.contiguous(),
    }
    columns = weight.shape[1]
    return Quantised(parts, (values - spread(zeros, columns)) * spread(scales, columns))


def gptq(bits: int, symmetric: bool, zero_offset: int = 1, shuffled: bool = False) -> Quantise:
    def quantise(weight: torch.Tensor) -> Quantised:
        columns, group = weight.shape[1], 64
        index = torch.arange(columns) // group
        order = (
            torch.randperm(columns, generator=torch.Generator().manual_seed(0))
            if shuffled
            else None
        )
        base = weight if order is None else weight[:, order]
        if symmetric:
            values, scales = rounded(base, bits, group, torch.float16)
            values = values + 2 ** (bits - 1)
            zeros = torch.full(scales.shape, float(2 ** (bits - 1)))
        else:
            values, zeros, scales = asymmetric(base, bits, group)
            zeros = zeros.clamp(min=zero_offset)
        means = (values - spread(zeros, columns)) * spread(scales, columns)
        if order is not None:
            back = order.argsort()
            values = values[:, back]
            means = means[:, back]
            index = index[back]
        parts = {
            "qweight": words(values, bits).T.contiguous(),
            "qzeros": words(zeros.T.contiguous() - zero_offset, bits),
            "scales": scales.T.contiguous(),
            "g_idx": index.to(torch.int32),
        }
        return Quantised(parts, means)

    return quantise


def fp8(block: int | None, name: str, dtype: torch.dtype = torch.float32) -> Quantise:
    def quantise(weight: torch.Tensor) -> Quantised:
        rows, columns = weight.shape
        high, wide = (block, block) if block else (1, columns)
        scales = torch.zeros(-(-rows // high), -(-columns // wide))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                part = weight[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
                scales[row, column] = part.abs().max() / 448
        scales = scales.to(dtype)
        whole = (
            scales.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        )
        values = (weight / whole).to(torch.float8_e4m3fn)
        return Quantised({"weight": values, name: scales}, values.float() * whole)

    return quantise


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns] of four bits, exponents + 127 for each 32 of a row, and the numbers
    that they mean."""
    grouped = weight.view(len(weight), -1, 32)
    exponent = torch.floor(torch.log2(grouped.abs().amax(-1).clamp(min=1e-12))) - 2
    scaled = grouped / torch.exp2(exponent)[..., None]
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    codes = nearest + 8 * (scaled < 0)
    means = FP4[nearest] * scaled.sign() * torch.exp2(exponent)[..., None]
    return codes.view(weight.shape), (exponent + 127).to(torch.uint8), means.view(weight.shape)


def mxfp4(weight: torch.Tensor) -> Quantised:
    codes, exponents, means = fp4(weight)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return Quantised({"weight_packed": packed, "weight_scale": exponents}, means)


def nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of four bits, two a byte. Float8 scales for each 16 numbers of a row; the common scale,
    which multiplies. Then the numbers that they encode."""
    grouped = weight.view(len(weight), -1, 16)
    together = weight.abs().max() / (6 * 448)
    scales = (grouped.abs().amax(-1) / 6 / together).to(torch.float8_e4m3fn)
    whole = scales.float() * together
    scaled = grouped / whole.clamp(min=1e-30)[..., None]
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).view(weight.shape)
    means = (FP4[nearest] * scaled.sign() * whole[..., None]).view(weight.shape)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), scales, together, means


def compressed_nvfp4(weight: torch.Tensor) -> Quantised:
    """As compressed-tensors has it: the scale of all divides."""
    packed, scales, together, _ = nvfp4(weight)
    whole = scales.float() / (1 / together)
    shape = (len(weight), -1, 16)
    codes = torch.stack((packed & 15, packed >> 4), -1).long().view(shape)
    means = torch.cat((FP4, -FP4))[codes] * whole[..., None]
    parts = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": (1 / together).view(1),
    }
    return Quantised(parts, means.view(weight.shape))


def modelopt_nvfp4(weight: torch.Tensor) -> Quantised:
    packed, scales, together, means = nvfp4(weight)
    return Quantised({"weight": packed, "weight_scale": scales, "weight_scale_2": together}, means)


def settings_of(method: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, **more}


FORMATS: dict[str, tuple[dict[str, Any], Quantise, bool]] = {
    "compressed-tensors int4": (
        settings_of("compressed-tensors"),
        pack_quantised(4, 32, torch.bfloat16),
        True,
    ),
    "compressed-tensors int4 of 128": (
        settings_of("compressed-tensors"),
        pack_quantised(4, 128, torch.float16),
        True,
    ),
    "compressed-tensors int4 asymmetric": (
        settings_of("compressed-tensors"),
        pack_asymmetric,
        True,
    ),
    "compressed-tensors int8": (
        settings_of("compressed-tensors"),
        pack_quantised(8, 128, torch.bfloat16),
        True,
    ),
    "compressed-tensors int8 by row": (settings_of("compressed-tensors"), int_quantised, True),
    "compressed-tensors fp8": (settings_of("compressed-tensors"), fp8(None, "weight_scale"), False),
    "compressed-tensors mxfp4": (settings_of("compressed-tensors"), mxfp4, True),
    "compressed-tensors nvfp4": (settings_of("compressed-tensors"), compressed_nvfp4, False),
    "modelopt nvfp4": (settings_of("modelopt", quant_algo="NVFP4"), modelopt_nvfp4, False),
    "awq": (settings_of("awq", bits=4, version="gemm"), awq, True),
    "gptq int4": (settings_of("gptq", bits=4), gptq(4, symmetric=True), True),
    "gptq int4 v2": (
        settings_of("gptq", bits=4, checkpoint_format="gptq_v2"),
        gptq(4, False, zero_offset=0),
        True,
    ),
    "gptq int4 in another order": (
        settings_of("gptq", bits=4),
        gptq(4, True, shuffled=True),
        False,
    ),
    "gptq int8": (settings_of("gptq", bits=8), gptq(8, symmetric=True), True),
    "fp8 in blocks": (
        settings_of("fp8", weight_block_size=[128, 128]),
        fp8(128, "weight_scale_inv"),
        False,
    ),
}
"""By name: the config.json values, how a matrix is made, and whether EdgeShard keeps its numbers
exactly."""
