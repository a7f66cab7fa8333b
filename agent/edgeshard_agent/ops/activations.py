"""Activations of whole rows, and the cap on logits.

Numbers are rounded to the dtype where transformers' modules round them.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from edgeshard_agent.ops import native

_QUICK_GELU_SLOPE = 1.702


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x (1 + erf(x / sqrt 2)) / 2, of x's shape and dtype."""
    result = _activated(x, native.ACTIVATION_GELU)
    return functional.gelu(x) if result is None else result


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x), of x's shape and dtype."""
    result = _activated(x, native.ACTIVATION_QUICK_GELU)
    return x * torch.sigmoid(_QUICK_GELU_SLOPE * x) if result is None else result


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(x / cap), of x's shape and dtype."""
    result = _activated(x, native.ACTIVATION_SOFTCAP, cap)
    return torch.tanh(x / cap) * cap if result is None else result


def _activated(x: torch.Tensor, activation: int, cap: float = 0.0) -> torch.Tensor | None:
    """The activation by the native kernels; None if they do not take `x`."""
    library = native.active() if x.is_cpu and x.dtype in native.ELEMENTS and x.dim() else None
    if library is None:
        return None
    width = x.shape[-1]
    rows = x.reshape(-1, width) if width else x.reshape(0, 0)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    library.edgeshard_activate(
        rows.data_ptr(),
        rows.stride(0),
        out.data_ptr(),
        len(rows),
        width,
        activation,
        cap,
        native.ELEMENTS[x.dtype],
    )
    return out
