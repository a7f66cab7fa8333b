"""A short hash of the bits that this node computes, to be compared with that of others.

Where two nodes have the same one, a layer of a family in our own blocks gives the same bits on both (docs/kernels.md,
Numbers). Instruction sets, compilers and versions of torch may each change the last bit of a sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.nn.functional import gelu, silu

from edgeshard_agent.ops import native
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.elementwise import (
    clamped_swiglu,
    gated_head_norm,
    geglu,
    rms_norm,
    rotary_,
    sigmoid_gate,
    swiglu,
)
from edgeshard_agent.ops.kv_arena import NativeArena, PanelArena
from edgeshard_agent.ops.kv_int4 import PAGE, Int4Arena
from edgeshard_agent.ops.linear import ROW_DTYPES, PackedLinear
from edgeshard_agent.ops.quantize import Scheme
from edgeshard_agent.ops.recurrent import SpanStates, delta_gates, gated_delta_rule, short_convolution

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 13
"""One more than the kernels compute together."""
_HEAD_DIM = 80
_PAST = 600
"""Positions: past two edges between tiles of keys."""
_SLOTS = -(-(_PAST + _ROWS) // PAGE) * PAGE


def bits_fingerprint() -> str:
    """Sixteen hexadecimal digits; "" where there are no native kernels, for then bits depend on the batch, too."""
    if not native.native_available():
        return ""
    digest = hashlib.blake2b(digest_size=8)
    with torch.inference_mode():
        for output in _outputs():
            digest.update(output.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _outputs() -> Iterator[torch.Tensor]:
    """Outputs of every operator on fixed inputs."""
    for scheme in Scheme:
        layer = PackedLinear.pack(_made(97, 192), scheme)
        for dtype in ROW_DTYPES[scheme]:
            yield layer(_made(_ROWS, 192).to(dtype))
    yield from _angles()
    for dtype in _DTYPES:
        wide = _made(_ROWS, 1000).to(dtype)
        yield from rms_norm(wide, _made(1000).to(dtype), 1e-5, wide.flip(0))
        yield rms_norm(wide, _made(1000).to(dtype), 1e-5, unit_offset=True)[0]
        yield rms_norm(wide, _made(1000).to(dtype), 1e-5, rounded_last=True)[0]
        yield swiglu(wide * 4)
        yield geglu(wide * 4)
        yield clamped_swiglu(wide * 4, 1.702, 2.0)
        yield sigmoid_gate(wide.flip(0).contiguous(), wide * 4)
        yield from _advanced(dtype)
        # What blocks leave to torch: other activations, norms in float32, a router's shares.
        yield gelu(wide)
        yield silu(wide)
        yield torch.rsqrt(wide.float().square().mean(-1, keepdim=True) + 1e-5)
        yield torch.softmax(wide[:, :60], dim=-1, dtype=torch.float32)
        for kept in _DTYPES:
            yield from _attended(dtype, PanelArena(_SLOTS, 1, _HEAD_DIM, kept))
        yield from _attended(dtype, Int4Arena(_SLOTS, 1, _HEAD_DIM))


def _angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a rotary embedding."""
    frequencies = 1.0 / (10_000.0 ** (torch.arange(0, _HEAD_DIM, 2, dtype=torch.float32) / _HEAD_DIM))
    half = torch.outer(torch.arange(0, 64 * _ROWS, 64, dtype=torch.float32), frequencies)
    angles = torch.cat((half, half), dim=-1)
    return angles.cos(), angles.sin()


def _attended(dtype: torch.dtype, arena: NativeArena) -> Iterator[torch.Tensor]:
    """Attention of some tokens behind a long past, and of one token alone."""
    past = torch.arange(_PAST)
    arena.write(past, _made(_PAST, 1, _HEAD_DIM), _made(_PAST, 1, _HEAD_DIM).flip(0))
    table = torch.arange(_SLOTS // PAGE, dtype=torch.int32).unsqueeze(0)
    packed = _made(_ROWS, 5, _HEAD_DIM).to(dtype)
    query, key, value = packed[:, :3], packed[:, 3:4], packed[:, 4:]
    rotary_(query, key, *_angles())
    for scoring in (Scoring(0.1), Scoring(0.1, window=300, softcap=2.0)):
        for rows in (_ROWS, 1):
            length = torch.tensor([_PAST + rows], dtype=torch.int32)
            spans = SpanTables(table, length, torch.tensor([0, rows], dtype=torch.int32), PAGE)
            yield attend(query[:rows], key[:rows], value[:rows], arena, spans, scoring)


def _advanced(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The gated delta rule with what lies around it, of tokens of one request: a key head and two value heads."""
    spans = SpanStates(torch.tensor([0], dtype=torch.int32), torch.tensor([0, _ROWS], dtype=torch.int32))
    width = 4 * _HEAD_DIM
    tails = _made(1, 3, width).to(dtype)
    mixed = short_convolution(_made(_ROWS, width).to(dtype), _made(width, 4).to(dtype), tails, spans)
    query, key = (mixed[:, at : at + _HEAD_DIM].unsqueeze(1) for at in (0, _HEAD_DIM))
    value = mixed[:, 2 * _HEAD_DIM :].view(_ROWS, 2, _HEAD_DIM)
    opening, decaying = (_made(_ROWS, 4) * 4).to(dtype).chunk(2, dim=1)
    gates = delta_gates(opening, decaying, _made(2), _made(2).flip(0))
    states = _made(1, 2, _HEAD_DIM, _HEAD_DIM)
    found = gated_delta_rule(query, key, value, *gates, states, spans)
    yield from (mixed, *gates, states)
    yield gated_head_norm(found, _made(_ROWS, 2 * _HEAD_DIM).to(dtype), _made(_HEAD_DIM).to(dtype), 1e-6)


def _made(*shape: int) -> torch.Tensor:
    """Numbers in [-1, 1) by integer arithmetic, so that they are the same on every node."""
    count = torch.Size(shape).numel()
    scattered = torch.arange(1, count + 1, dtype=torch.int64) * 2_654_435_761 % (1 << 24)
    return (scattered.double() / (1 << 23) - 1.0).float().view(shape)
