"""Calls of other operators for `bench.kernels`, each compared with torch's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from edgeshard_agent.ops import native
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.elementwise import rms_norm, swiglu
from edgeshard_agent.ops.kv_arena import PanelArena
from torch.nn.functional import scaled_dot_product_attention

from bench.kernel_libraries import TORCH, Library, measure
from bench.kernel_linear import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS
from bench.sizes import sized

BLOCK_TOKENS = 16
CONTEXTS = sized((128, 1024, 4096), (16, 32))
CHUNK_CONTEXTS = sized((512, 1024, 4096), (16, 32))
_REPEATS = 20
_CHUNK = sized(512, 16)


@dataclass(frozen=True, slots=True)
class CallRow:
    """One call of an operator; times are of the median and of the fastest turn."""

    op: str
    rows: int
    context: int
    library: str
    compiler: str
    kernels: str
    microseconds: float
    best_microseconds: float
    ratio_to_torch: float


def call_rows(libraries: Sequence[Library], limits_by: Library, rounds: int) -> list[CallRow]:
    """Operators of one token for each of 1 and 8 requests."""
    results = []
    for rows in (1, 8):
        for name, context, call, torch_call in _small_calls(rows):
            contenders = {TORCH: _repeated(torch_call, None)}
            for library in libraries:
                contenders[library.label] = _repeated(call, library)
            results += _rows_of(
                name, rows, context, contenders, libraries, limits_by, rounds, _REPEATS
            )
    return results


Call = Callable[[], object]


def _small_calls(rows: int) -> list[tuple[str, int, Call, Call]]:
    """Name, context, the operator and the same in torch."""
    x = torch.randn(rows, HIDDEN).bfloat16()
    weight = torch.ones(HIDDEN).bfloat16()
    gate_up = torch.randn(rows, 2 * INNER).bfloat16()
    norm = partial(rms_norm, x, weight, 1e-5, x)
    gated = partial(swiglu, gate_up)
    calls: list[tuple[str, int, Call, Call]] = [
        ("rms_norm with residual", 0, norm, norm),
        ("swiglu", 0, gated, gated),
    ]
    for context in CONTEXTS:
        calls.append(
            ("attention", context, _attention(rows, context), _contiguous_attention(rows, context))
        )
    return calls


def _rows_of(
    name: str,
    rows: int,
    context: int,
    contenders: dict[str, Callable[[], None]],
    libraries: Sequence[Library],
    limits_by: Library,
    rounds: int,
    repeats: int,
) -> list[CallRow]:
    turns = measure(contenders, rounds, limits_by)
    return [
        CallRow(
            op=name,
            rows=rows,
            context=context,
            library=library.name,
            compiler=library.compiler,
            kernels=library.kernels,
            microseconds=turns.median_s(library.label) / repeats * 1e6,
            best_microseconds=turns.best_s(library.label) / repeats * 1e6,
            ratio_to_torch=turns.median_s(TORCH) / turns.median_s(library.label),
        )
        for library in libraries
    ]


def _repeated(call: Call, library: Library | None, repeats: int = _REPEATS) -> Callable[[], None]:
    """The call some times by the kernels of a library, or by torch's operators without one."""

    def run() -> None:
        if library is None:
            os.environ[native.SWITCH] = "0"
            for _ in range(repeats):
                call()
            os.environ[native.SWITCH] = "1"
            return
        with library.in_use():
            for _ in range(repeats):
                call()

    return run


def _attention(requests: int, context: int, tokens: int = 1) -> Callable[[], object]:
    """Attention of the last `tokens` of the `context` positions of each request, whose blocks lie
    anywhere in the pool, as in one that was used for long."""
    slots = requests * context
    arena = PanelArena(slots, KV_HEADS, HEAD_DIM, torch.bfloat16)
    keys, values = (torch.randn(slots, KV_HEADS, HEAD_DIM) for _ in range(2))
    arena.write(torch.arange(slots), keys, values)
    tables = torch.randperm(slots // BLOCK_TOKENS).view(requests, -1).int()
    edges = torch.arange(0, requests * tokens + 1, tokens, dtype=torch.int32)
    spans = SpanTables(
        tables, torch.full((requests,), context, dtype=torch.int32), edges, BLOCK_TOKENS
    )
    packed = torch.randn(requests * tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
    query, key, value = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    scoring = Scoring(HEAD_DIM**-0.5)
    return lambda: attend(query, key, value, arena, spans, scoring)


def _contiguous_attention(rows: int, context: int) -> Callable[[], object]:
    """torch's own, on keys in one piece: the cost without pages."""
    query = torch.randn(rows, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM).bfloat16()
    keys = torch.randn(rows, context, KV_HEADS, HEAD_DIM).bfloat16().transpose(1, 2)
    values = torch.randn(rows, context, KV_HEADS, HEAD_DIM).bfloat16().transpose(1, 2)
    return lambda: scaled_dot_product_attention(query, keys, values, scale=HEAD_DIM**-0.5)


def chunk_rows(libraries: Sequence[Library], limits_by: Library, rounds: int) -> list[CallRow]:
    """The last `_CHUNK` tokens of a prompt of `context`; torch has a mask, and its keys in one
    piece."""
    results = []
    for context in CHUNK_CONTEXTS:
        call = _attention(1, context, _CHUNK)
        query = torch.randn(_CHUNK, HEADS, HEAD_DIM).bfloat16()
        keys = torch.randn(context, KV_HEADS, HEAD_DIM).bfloat16()
        values = torch.randn(context, KV_HEADS, HEAD_DIM).bfloat16()
        mask = torch.full((_CHUNK, context), -torch.inf).triu(context - _CHUNK + 1).bfloat16()
        heads, seen_keys, seen_values = (
            tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, keys, values)
        )
        torch_call = partial(
            scaled_dot_product_attention,
            heads,
            seen_keys,
            seen_values,
            attn_mask=mask,
            enable_gqa=True,
        )
        contenders = {TORCH: _repeated(torch_call, None, 1)}
        for library in libraries:
            contenders[library.label] = _repeated(call, library, 1)
        results += _rows_of(
            "attention of a chunk", _CHUNK, context, contenders, libraries, limits_by, rounds, 1
        )
    return results
