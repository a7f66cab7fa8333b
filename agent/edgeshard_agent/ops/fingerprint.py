"""A short hash of the bits that this node computes, for comparison with other nodes.

If two nodes have the same one, a layer of a family in our own blocks gives the same bits on both
(docs/kernels.md, Numbers). Compilers and processors give one hash; two kinds of kernels have their
own (docs/decisions/kernels.md#choice-one-set-of-bits).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch

from edgeshard.domain.models.dtypes import BLOCK_FORMATS
from edgeshard_agent.ops import native
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.block_formats import BlockWeight
from edgeshard_agent.ops.elementwise import (
    clamped_swiglu,
    gated_head_norm,
    geglu,
    gelu,
    quick_gelu,
    rms_norm,
    rotary_,
    rotary_angles,
    sigmoid_gate,
    softcap,
    swiglu,
)
from edgeshard_agent.ops.kv_arena import NativeArena, PanelArena
from edgeshard_agent.ops.kv_int4 import PAGE, Int4Arena
from edgeshard_agent.ops.linear import ROW_DTYPES, PackedLinear
from edgeshard_agent.ops.quantize import PLAIN_SCHEMES, Scheme
from edgeshard_agent.ops.recurrent import (
    SpanStates,
    delta_gates,
    gated_delta_rule,
    short_convolution,
)
from edgeshard_agent.ops.routing import route

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 13
"""One more than the kernels compute together."""
_HEAD_DIM = 80
_PAST = 600
"""Positions: past two edges between tiles of keys."""
_RANDOM_ROWS = 64
_SLOTS = -(-(_PAST + _ROWS) // PAGE) * PAGE


def bits_fingerprint() -> str:
    """Sixteen hexadecimal digits; "" where there are no native kernels, for then bits depend on the
    batch, too."""
    if not native.native_available():
        return ""
    digest = hashlib.blake2b(digest_size=8)
    with torch.inference_mode():
        for output in _outputs():
            digest.update(output.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _outputs() -> Iterator[torch.Tensor]:
    """Outputs of every operator on fixed inputs."""
    for scheme in PLAIN_SCHEMES:
        layer = PackedLinear.pack(_made(97, 192), scheme)
        for dtype in ROW_DTYPES[scheme]:
            yield layer(_made(_ROWS, 192).to(dtype))
    yield from _random_linears()
    for kind in BLOCK_FORMATS:
        layer = PackedLinear.pack_blocks(BlockWeight.random(97, 512, kind))
        for dtype in ROW_DTYPES[Scheme(kind)]:
            yield layer(_made(_ROWS, 512).to(dtype))
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
        yield gelu(wide * 4)
        yield quick_gelu(wide * 4)
        yield softcap(wide * 4, 2.5)
        yield from _routed(wide[:, :60].contiguous() * 4)
        for kv_dtype in _DTYPES:
            yield from _attended(dtype, PanelArena(_SLOTS, 1, _HEAD_DIM, kv_dtype))
        yield from _attended(dtype, Int4Arena(_SLOTS, 1, _HEAD_DIM))


def _angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a rotary embedding, at positions up to 2^24."""
    positions = torch.arange(_ROWS) ** 2 * 116_508
    frequencies = torch.arange(_HEAD_DIM // 2, 0, -1).float() ** 2 / (_HEAD_DIM // 2) ** 2
    return rotary_angles(positions, frequencies, 1.0, torch.float32)


def _random_linears() -> Iterator[torch.Tensor]:
    """Products of integers with random weights and rows. A few of so many numbers lie next to the
    middle of two integers, and a fused sum rounds them to the other one."""
    rows, weight = _random(_RANDOM_ROWS, 512), _random(64, 512)
    for scheme in (Scheme.INT8, Scheme.INT4, Scheme.INT2):
        layer = PackedLinear.pack(weight, scheme)
        for dtype in _DTYPES:
            yield layer(rows.to(dtype))


def _routed(logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Experts and shares by softmax, and by sigmoid in groups."""
    yield from route(logits, 6)
    yield from route(logits, 6, _made(60), sigmoid=True, scale=2.5, groups=5, kept_groups=2)


def _attended(dtype: torch.dtype, arena: NativeArena) -> Iterator[torch.Tensor]:
    """Attention of some tokens behind a long past, and of one token alone."""
    past = torch.arange(_PAST)
    arena.write(past, _made(_PAST, 1, _HEAD_DIM), _made(_PAST, 1, _HEAD_DIM).flip(0))
    table = torch.arange(_SLOTS // PAGE, dtype=torch.int32).unsqueeze(0)
    packed = _made(_ROWS, 5, _HEAD_DIM).to(dtype)
    query = packed[:, :3]
    key = packed[:, 3:4]
    value = packed[:, 4:]
    rotary_(query, key, *_angles())
    for scoring in (Scoring(0.1), Scoring(0.1, window=300, softcap=2.0)):
        for rows in (_ROWS, 1):
            length = torch.tensor([_PAST + rows], dtype=torch.int32)
            spans = SpanTables(table, length, torch.tensor([0, rows], dtype=torch.int32), PAGE)
            yield attend(query[:rows], key[:rows], value[:rows], arena, spans, scoring)


def _advanced(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The gated delta rule with what lies around it, of tokens of one request: a key head and two
    value heads."""
    spans = SpanStates(
        torch.tensor([0], dtype=torch.int32), torch.tensor([0, _ROWS], dtype=torch.int32)
    )
    width = 4 * _HEAD_DIM
    tails = _made(1, 3, width).to(dtype)
    mixed = short_convolution(
        _made(_ROWS, width).to(dtype), _made(width, 4).to(dtype), tails, spans
    )
    query, key = (mixed[:, at : at + _HEAD_DIM].unsqueeze(1) for at in (0, _HEAD_DIM))
    value = mixed[:, 2 * _HEAD_DIM :].view(_ROWS, 2, _HEAD_DIM)
    opening, decaying = (_made(_ROWS, 4) * 4).to(dtype).chunk(2, dim=1)
    gates = delta_gates(opening, decaying, _made(2), _made(2).flip(0))
    states = _made(1, 2, _HEAD_DIM, _HEAD_DIM)
    outputs = gated_delta_rule(query, key, value, *gates, states, spans)
    yield from (mixed, *gates, states)
    yield gated_head_norm(
        outputs, _made(_ROWS, 2 * _HEAD_DIM).to(dtype), _made(_HEAD_DIM).to(dtype), 1e-6
    )


def _made(*shape: int) -> torch.Tensor:
    """Numbers in [-1, 1) by integer arithmetic, so that they are the same on every node."""
    count = torch.Size(shape).numel()
    scattered = torch.arange(1, count + 1, dtype=torch.int64) * 2_654_435_761 % (1 << 24)
    return (scattered.double() / (1 << 23) - 1.0).float().view(shape)


def _random(*shape: int) -> torch.Tensor:
    """Numbers near a normal distribution: sums of four random integers of 16 bits, by splitmix64.
    Exact in float32."""
    mixed = np.arange(1, torch.Size(shape).numel() + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(bits)) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    parts = mixed.view(np.uint16).reshape(-1, 4).astype(np.int64)
    centred = parts.sum(1) - 2 * 0xFFFF
    return torch.from_numpy(centred.astype(np.float32) / np.float32(1 << 16)).view(shape)
