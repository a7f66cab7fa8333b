"""Operators between the linear layers: RMS norms, rotary embedding with its angles, gates,
activations, and the cap on logits.

Numbers are rounded to the dtype where transformers' modules round them, so that a model gives the
same with either.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional
from torch.nn.functional import silu

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard_agent.ops import layouts, native


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    unit_offset: bool = False,
    rounded_last: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, sum): s = x + residual (x itself without one), and s / rms(s) * weight, both
    [rows, width].

    As transformers' LlamaRMSNorm: in float32, and rounded to x's dtype before the multiplication by
    `weight` [width]. With a `unit_offset`, as its Gemma2RMSNorm: s / rms(s) * (1 + weight), rounded
    once. `rounded_last`, as its GptOssRMSNorm: rounded once, behind the multiplication.
    """
    if weight.shape != x.shape[1:] or (residual is not None and residual.shape != x.shape):
        raise InvalidArgumentError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}: they must be [rows, width] and "
            "[width], and a "
            "residual shaped as x",
            field="x",
        )
    library = _library(x, weight, x if residual is None else residual)
    if library is None:
        summed = x if residual is None else x + residual
        wide = summed.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if unit_offset or rounded_last:
            return (wide * (weight.float() + unit_offset)).to(x.dtype), summed
        return weight * wide.to(x.dtype), summed
    normalised = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    library.edgeshard_rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        normalised.data_ptr(),
        summed.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        native.NORM_UNIT_OFFSET
        if unit_offset
        else native.NORM_ROUNDED_LAST
        if rounded_last
        else native.NORM_PLAIN,
        native.ELEMENTS[x.dtype],
    )
    return normalised, summed


def rotary_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q [rows, heads, head_dim] and k [rows, kv_heads, head_dim] in place, half-split style.

    `cos` and `sin` are [rows, rotary_dim], both halves equal, and rounded to q's dtype first, as
    transformers does; dimensions from rotary_dim on stay as they are. q and k may be views into
    packed q|k|v rows.
    """
    rotary_dim = cos.shape[-1]
    if (
        rotary_dim % 2
        or sin.shape != cos.shape
        or any(len(x) != len(cos) or x.shape[-1] < rotary_dim for x in (q, k))
    ):
        raise InvalidArgumentError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; for q {tuple(q.shape)} and k "
            f"{tuple(k.shape)} both "
            "must be [rows, an even number up to head_dim]",
            field="cos",
        )
    library = _library(cos, sin)
    for x in (q, k):
        rows, heads, head_dim = x.shape
        if (
            library is not None
            and x.is_cpu
            and x.dtype in native.ELEMENTS
            and x.stride(2) == 1
            and x.stride(1) == head_dim
        ):
            library.edgeshard_rotary(
                x.data_ptr(),
                x.stride(0),
                rows,
                heads,
                head_dim,
                native.ELEMENTS[x.dtype],
                cos.data_ptr(),
                sin.data_ptr(),
                rotary_dim,
                native.ELEMENTS[cos.dtype],
            )
        else:
            _rotate(x[..., :rotary_dim], cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    x.copy_(x * cos + turned * sin)


def swiglu(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, [rows, inner], from gate|up side by side, [rows, 2 * inner]."""
    out = _room_for_gated(gate_up, out)
    rows, inner = out.shape
    library = _library(gate_up, out)
    if library is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.mul(silu(gate), up, out=out)
    library.edgeshard_swiglu(
        gate_up.data_ptr(), out.data_ptr(), rows, inner, native.ELEMENTS[gate_up.dtype]
    )
    return out


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up in gelu's form with tanh, [rows, inner], from gate|up side by side, [rows, 2
    * inner]."""
    out = _room_for_gated(gate_up)
    rows, inner = out.shape
    library = _library(gate_up)
    if library is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up
    library.edgeshard_geglu(
        gate_up.data_ptr(), out.data_ptr(), rows, inner, native.ELEMENTS[gate_up.dtype]
    )
    return out


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), [rows, inner], from numbers of gate and up in turn,
    [rows, 2 * inner].

    The gate is at most `limit`, up within it on both sides. Rounded behind each operation, as in
    transformers' GptOssExperts.
    """
    out = _room_for_gated(gate_up)
    rows, inner = out.shape
    library = _library(gate_up)
    if library is None:
        gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    library.edgeshard_clamped_swiglu(
        gate_up.data_ptr(),
        out.data_ptr(),
        rows,
        inner,
        alpha,
        limit,
        native.ELEMENTS[gate_up.dtype],
    )
    return out


def _room_for_gated(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`out` or memory for it, [rows, inner]."""
    rows, width = gate_up.shape
    if width % 2 or (out is not None and out.shape != (rows, width // 2)):
        raise InvalidArgumentError(
            f"gate_up is {tuple(gate_up.shape)}; it must be [rows, 2 * inner], and out [rows, "
            "inner]",
            field="gate_up",
        )
    return (
        torch.empty((rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        if out is None
        else out
    )


def gated_head_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x / rms(x) * weight * silu(gate), [rows, heads, width], of x as it is and a gate [rows, heads
    * width].

    As transformers' Qwen3_5RMSNormGated: rounded to the dtype before either multiplication, and at
    the end.
    """
    rows, heads, width = x.shape
    if gate.shape != (rows, heads * width) or weight.shape != (width,):
        raise InvalidArgumentError(
            f"x is {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)}; they "
            "must be "
            "[rows, heads, width], [rows, heads * width] and [width]",
            field="gate",
        )
    library = _library(x, weight) if gate.dtype is x.dtype and gate.stride(1) == 1 else None
    if library is None:
        normed, _ = rms_norm(x.reshape(-1, width), weight, eps)
        return (normed.view(x.shape) * silu(gate.reshape(x.shape).float())).to(x.dtype)
    out = torch.empty_like(x)
    library.edgeshard_gated_head_norm(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        width,
        eps,
        native.ELEMENTS[x.dtype],
    )
    return out


def sigmoid_gate(values: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """values * sigmoid(gate), both [rows, width]; `values` may be written over."""
    if values.shape != gate.shape:
        raise InvalidArgumentError(
            f"values are {tuple(values.shape)}, gate {tuple(gate.shape)}; they must be alike",
            field="gate",
        )
    library = _library(values) if gate.dtype is values.dtype and gate.stride(1) == 1 else None
    if library is None:
        return values * torch.sigmoid(gate)
    rows, width = values.shape
    library.edgeshard_sigmoid_gate(
        values.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        rows,
        width,
        native.ELEMENTS[values.dtype],
    )
    return values


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 0.0,
    groups: int = 1,
    gate_first: bool = True,
) -> torch.Tensor:
    """[rows, width] in gate's dtype: x silu(gate), over the root mean square of its group of the
    row, times `weight`.

    Without `gate_first` silu(gate) multiplies what the norm gives, without a `weight` [width] there
    is no norm. `x` [rows, width] is float32, as all numbers up to the end, and is overwritten;
    `gate` may be a view into wider rows. Raises InvalidArgumentError where shapes do not fit.
    """
    rows, width = x.shape
    fits = (
        gate.shape == x.shape
        and (weight is None or weight.shape == (width,))
        and width % groups == 0
    )
    if not fits or x.dtype is not torch.float32:
        raise InvalidArgumentError(
            f"x is {tuple(x.shape)} {x.dtype}, gate {tuple(gate.shape)}: both must be [rows, "
            "width], x in float32, "
            f"weight [width], and width a multiple of {groups} groups",
            field="x",
        )
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    library = _library(gate[:1], *(() if weight is None else (weight,)))
    if library is None or not x.is_contiguous():
        opened = gate.float() / (1 + (-gate.float()).exp())
        product = x * opened if gate_first else x
        if weight is not None:
            grouped = product.view(rows, groups, -1)
            grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
            product = grouped.view(rows, width) * weight.float()
        return (product if gate_first else product * opened).to(gate.dtype)
    out = torch.empty(x.shape, dtype=gate.dtype)
    call = layouts.GatedNormStruct(
        x=x.data_ptr(),
        gate=gate.data_ptr(),
        weight=None if weight is None else weight.data_ptr(),
        out=out.data_ptr(),
        gate_stride=gate.stride(0),
        eps=eps,
        rows=rows,
        width=width,
        groups=groups,
        gate_first=gate_first,
        element=native.ELEMENTS[gate.dtype],
    )
    library.edgeshard_gated_norm(ctypes.addressof(call), torch.get_num_threads())
    return out


def _library(first: torch.Tensor, *others: torch.Tensor) -> ctypes.CDLL | None:
    """The native kernels where they take these: contiguous, on the CPU, of one dtype they know."""
    if first.dtype not in native.ELEMENTS:
        return None
    for tensor in (first, *others):
        if tensor.dtype is not first.dtype or not tensor.is_cpu or not tensor.is_contiguous():
            return None
    return native.active()


def rotary_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines, sines), both [T, 2 * pairs] in `dtype` with equal halves, of integer `positions`
    [T].

    `frequencies` [pairs] are float32, in radians from one position to the next. Angles, cosines and
    sines are rounded to float32, multiplied by `scaling`, and rounded to `dtype`, as in
    transformers. The kernels reduce angles exactly up to 2^26 radians.
    """
    library = (
        native.active()
        if positions.is_cpu and frequencies.is_cpu and dtype in native.ELEMENTS
        else None
    )
    if library is None:
        half = torch.outer(positions.to(torch.float32), frequencies)
        angles = torch.cat((half, half), dim=-1)
        return angles.cos().mul_(scaling).to(dtype), angles.sin().mul_(scaling).to(dtype)
    places = positions.to(torch.int64).contiguous()
    turns = frequencies.contiguous()
    cos = torch.empty((len(places), 2 * len(turns)), dtype=dtype)
    sin = torch.empty_like(cos)
    call = layouts.AnglesStruct(
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
