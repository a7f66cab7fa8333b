"""Cosines and sines of a rotary embedding."""

from __future__ import annotations

import ctypes

import torch

from edgeshard_agent.ops import native


def rotary_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines, sines), both [T, 2 * pairs] in `dtype` with equal halves, of integer `positions` [T].

    `frequencies` [pairs] are float32, in radians from one position to the next. Angles, cosines and sines are rounded
    to float32, multiplied by `scaling`, and rounded to `dtype`, as in transformers. The kernels reduce angles exactly
    up to 2^26 radians.
    """
    library = native.active() if positions.is_cpu and frequencies.is_cpu and dtype in native.ELEMENTS else None
    if library is None:
        half = torch.outer(positions.to(torch.float32), frequencies)
        angles = torch.cat((half, half), dim=-1)
        return angles.cos().mul_(scaling).to(dtype), angles.sin().mul_(scaling).to(dtype)
    places = positions.to(torch.int64).contiguous()
    turns = frequencies.contiguous()
    cos = torch.empty((len(places), 2 * len(turns)), dtype=dtype)
    sin = torch.empty_like(cos)
    call = native.AnglesStruct(
        positions=places.data_ptr(),
        frequencies=turns.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        rows=len(places),
        pairs=len(turns),
        scaling=scaling,
        element=native.ELEMENTS[dtype],
    )
    library.edgeshard_angles(ctypes.addressof(call))
    return cos, sin
