"""Decode attention beside the rate at which the same core reads weights: one thread on one core, bfloat16.

Keys and values of many layers, more than caches hold, are read in turn, as in a decode step; weights likewise. The
two take turns within every round.

    python -m bench.attention [--rounds 15]     JSON rows on stdout

A row: `rows` requests with one new token each, `context` positions deep, whose blocks lie `in order`, as a new pool
grants them, or `scattered` over all of it; `microseconds` of a layer, the median;
`kv_gb_per_s`, the bytes of keys and values over that time; `of_weights`, that rate over the rate of weights, the median
of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from edgeshard_agent.ops import native
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.kv_arena import PanelArena
from edgeshard_agent.ops.linear import PackedLinear
from edgeshard_agent.ops.quantize import Scheme

from bench.sizes import sized

BLOCK_TOKENS = 16
_BYTES = sized(200 << 20, 1 << 20)
_WIDTH = sized(2048, 128)


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Of one token's key and value in bfloat16."""
        return 4 * self.kv_heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} x {self.head_dim}"


SHAPES = (Shape(16, 8, 128), Shape(32, 8, 64))
POINTS = sized(((1, 128), (16, 128), (1, 4096), (8, 4096)), ((1, 32), (2, 64)))
IN_ORDER, SCATTERED = "in order", "scattered"


def filled(shape: Shape, slots: int) -> PanelArena:
    """An arena of random numbers."""
    arena = PanelArena(slots, shape.kv_heads, shape.head_dim, torch.bfloat16)
    keys, values = (torch.randn(slots, shape.kv_heads, shape.head_dim) for _ in range(2))
    arena.write(torch.arange(slots), keys, values)
    return arena


def step(
    shape: Shape, arena: PanelArena, requests: int, tokens: int, context: int, placing: str = SCATTERED
) -> Callable[[], torch.Tensor]:
    """Attention of the last `tokens` of the `context` positions of each of some requests."""
    blocks = context // BLOCK_TOKENS
    order = torch.arange if placing == IN_ORDER else torch.randperm
    tables = order(requests * blocks).view(requests, blocks).int()
    edges = torch.arange(0, requests * tokens + 1, tokens, dtype=torch.int32)
    spans = SpanTables(tables, torch.full((requests,), context, dtype=torch.int32), edges, BLOCK_TOKENS)
    packed = torch.randn(requests * tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim).bfloat16()
    query, key, value = packed.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    scoring = Scoring(shape.head_dim**-0.5)
    return lambda: attend(query, key, value, arena, spans, scoring)


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    before = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - before


def row(
    shape: Shape, rows: int, context: int, placing: str, weights: Sequence[Callable[[], object]], rounds: int
) -> dict[str, object]:
    layer_bytes = rows * context * shape.token_bytes
    layers = max(2, _BYTES // layer_bytes)
    calls = [step(shape, filled(shape, rows * context), rows, 1, context, placing) for _ in range(min(layers, 64))]
    weight_bytes = len(weights) * _WIDTH * _WIDTH * 2
    times, ratios = [], []
    for _ in range(rounds + 1):
        taken, read = seconds(calls), seconds(weights)
        times.append(taken / len(calls))
        ratios.append(layer_bytes / times[-1] / (weight_bytes / read))
    taken = statistics.median(times[1:])
    return {
        "shape": str(shape),
        "rows": rows,
        "context": context,
        "blocks": placing,
        "microseconds": round(taken * 1e6, 1),
        "kv_gb_per_s": round(layer_bytes / taken / 1e9, 1),
        "of_weights": round(statistics.median(ratios[1:]), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    if not native.native_available():
        print("bench.attention: there are no native kernels to measure", file=sys.stderr)
        return 1
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    x = torch.randn(1, _WIDTH).bfloat16()
    layers = [PackedLinear.pack(torch.randn(_WIDTH, _WIDTH).bfloat16(), Scheme.BFLOAT16) for _ in range(24)]
    weights = [lambda layer=layer: layer(x) for layer in layers]
    with torch.inference_mode():
        for shape in SHAPES:
            for rows, context in POINTS:
                for placing in (IN_ORDER, SCATTERED):
                    print(json.dumps(row(shape, rows, context, placing, weights, rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
