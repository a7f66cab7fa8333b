"""Weights in the order the native kernels read them (`Linear` in kernels.h), in memory that streams
fast."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import pad

from edgeshard.domain.models.dtypes import IntegerFormat
from edgeshard_agent.ops.huge_pages import WEIGHTS
from edgeshard_agent.ops.quantize import ELEMENTS_AT_ONCE, QuantizedWeight, Scheme, quantize_weight

PANEL = 32
_SCALES_BYTES = 2 * PANEL


def pack_float(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The bytes of a weight [out, in] as fp32 [panel][in][32] or bf16 [panel][in / 2][32][2]."""
    step, dtype = (1, torch.float32) if scheme is Scheme.FLOAT32 else (2, torch.bfloat16)
    missing = (0, -weight.shape[1] % step, 0, -weight.shape[0] % PANEL)
    padded = weight.to(dtype)
    if any(missing):  # pad copies even if it adds nothing
        padded = pad(padded, missing)
    panels = padded.view(-1, PANEL, padded.shape[1] // step, step).transpose(1, 2)
    packed = WEIGHTS.take((padded.numel() * padded.element_size(),), torch.uint8)
    packed.view(dtype).view(panels.shape).copy_(panels)
    return packed


def padded_inputs(scheme: Scheme, group: int, in_features: int) -> int:
    """Inputs of a row as it is packed: whole groups, or pairs of bfloat16."""
    step = group or (2 if scheme is Scheme.BFLOAT16 else 1)
    return -(-in_features // step) * step


def packed_size(scheme: Scheme, group: int, out_features: int, in_features: int) -> int:
    """Bytes of a packed weight [out, in]."""
    panels, padded = -(-out_features // PANEL), padded_inputs(scheme, group, in_features)
    if scheme.is_block_format:
        return IntegerFormat(scheme).matrix_bytes(panels * PANEL, in_features)
    if not scheme.is_quantized:
        return panels * PANEL * padded * (4 if scheme is Scheme.FLOAT32 else 2)
    values_bytes = PANEL * group * scheme.bits // 8
    return panels * (padded // group) * (_SCALES_BYTES + values_bytes)


def float_rows(
    packed: torch.Tensor, scheme: Scheme, in_padded: int, indices: torch.Tensor
) -> torch.Tensor:
    """Rows [n, in_padded] of what `pack_float` packed, by their indices [n]."""
    step, dtype = (1, torch.float32) if scheme is Scheme.FLOAT32 else (2, torch.bfloat16)
    panels = packed.view(dtype).view(-1, in_padded // step, PANEL, step)
    return panels[indices // PANEL, :, indices % PANEL].reshape(len(indices), in_padded)


def integer_rows(
    packed: torch.Tensor,
    scheme: Scheme,
    group: int,
    in_padded: int,
    half_scales: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Rows [n, in_padded] float32 of what `pack_quantized` packed as int8 or int4, by their indices
    [n]."""
    panels = packed.view(-1, in_padded // group, _SCALES_BYTES + PANEL * group * scheme.bits // 8)
    panel, row = indices // PANEL, indices % PANEL
    chunks = panels[..., _SCALES_BYTES:].unflatten(-1, (-1, PANEL, 4))[panel, :, :, row]
    scales = panels[..., :_SCALES_BYTES].unflatten(-1, (PANEL, 2))[panel, :, row].contiguous()
    if scheme is Scheme.INT8:
        values = chunks.to(torch.int16) - 128
    else:
        values = torch.cat((chunks & 15, chunks >> 4), -1).to(torch.int16) - 8
    by_group = scales.view(torch.float16 if half_scales else torch.bfloat16).float()
    numbers: torch.Tensor = values.flatten(2).float() * by_group
    return numbers.flatten(1)


def pack_quantized(
    weight: torch.Tensor | QuantizedWeight, scheme: Scheme, group: int
) -> torch.Tensor:
    """The bytes of a weight [out, in] as integers: for each panel and group its scales, then its
    values, unsigned.

    A few panels are rounded and packed at a time, so that what lies between takes no memory to
    speak of. Integers that there are already, in groups of this size, are not rounded; `scheme`
    holds their values.
    """
    out_features, in_features = matrix(weight).shape
    panels, groups = -(-out_features // PANEL), -(-in_features // group)
    values_bytes = PANEL * group * scheme.bits // 8
    packed = WEIGHTS.take((panels, groups, _SCALES_BYTES + values_bytes), torch.uint8)
    at_once = max(1, ELEMENTS_AT_ONCE // (PANEL * groups * group))
    for first in range(0, panels, at_once):
        rows = slice(first * PANEL, (first + at_once) * PANEL)
        if isinstance(weight, QuantizedWeight):
            part = replace(weight, values=weight.values[rows], scales=weight.scales[rows])
        else:
            part = quantize_weight(weight[rows], scheme, group)
        _pack_panels(part, scheme, packed[first : first + at_once])
    return packed.view(-1)


def matrix(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """The numbers or integers of a weight, in its shape."""
    return weight.values if isinstance(weight, QuantizedWeight) else weight


def _pack_panels(weight: QuantizedWeight, scheme: Scheme, packed: torch.Tensor) -> None:
    rows = -weight.values.shape[0] % PANEL
    scales = pad(weight.scales, (0, 0, 0, rows)).view(-1, PANEL, weight.scales.shape[1])
    panels, _, groups = scales.shape
    values = pad(weight.values, (0, 0, 0, rows)).view(panels, PANEL, groups, -1)
    if scheme is Scheme.INT8:
        unsigned = (values.to(torch.int16) + 128).to(torch.uint8).view(panels, PANEL, groups, -1, 4)
        chunks = unsigned.permute(0, 2, 3, 1, 4)
    elif scheme is Scheme.INT4:
        unsigned = (values + 8).to(torch.uint8).view(panels, PANEL, groups, -1, 2, 4)
        chunks = (unsigned[..., 0, :] | (unsigned[..., 1, :] << 4)).permute(0, 2, 3, 1, 4)
    else:
        # What pads the outputs is 0, which two bits cannot say: any value does there.
        unsigned = ((values + 3) >> 1).to(torch.uint8).view(panels, PANEL, groups, -1, 4, 4)
        pairs = unsigned[..., ::2, :] | (unsigned[..., 1::2, :] << 2)
        chunks = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).permute(0, 2, 3, 1, 4)
    packed[..., :_SCALES_BYTES] = scales.transpose(1, 2).contiguous().view(torch.uint8)
    packed[..., _SCALES_BYTES:] = chunks.reshape(panels, groups, -1)
