"""How fast the CPU's compute operators are, beside torch's own: one thread on one core.

A pass runs the four matrices of a decoder block (hidden 1024, 16 heads, 8 KV heads of 64, inner 2816) in many copies,
so that weights come from memory and not from a cache, as they do when a model decodes. The contenders take turns within
every round, and what is compared are the fastest rounds (another process on the machine only ever adds time).

    python -m bench.kernels [--quick] [-o FILE]     JSON on stdout, or in FILE

Rows of `op` "linear": `weights_gb_per_s` is bytes of weights and scales read, `gflop_per_s` counts two operations for a
weight and row, `ratio_to_torch` is how many times faster than `torch.nn.functional.linear` in bfloat16 (`scheme` fp32:
in float32). Other rows: one call, beside the same in torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.ops import native
from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.elementwise import rms_norm, swiglu
from edgeshard_agent.ops.kv_arena import PanelArena
from edgeshard_agent.ops.linear import PackedLinear
from edgeshard_agent.ops.quantize import Scheme
from torch.nn.functional import linear, scaled_dot_product_attention

from bench.sizes import sized

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = sized((1024, 16, 8, 64, 2816), (128, 4, 2, 64, 256))
SHAPES = (((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
COPIES = sized(16, 1)
BLOCK_TOKENS = 16
CONTEXTS = sized((128, 1024, 4096), (16, 32))
CHUNK_CONTEXTS = sized((512, 1024, 4096), (16, 32))
SCHEMES = dict.fromkeys((Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4, Scheme.INT2), torch.bfloat16)
Contenders = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class LinearRow:
    op: str
    scheme: str
    rows: int
    seconds: float
    weights_gb_per_s: float
    gflop_per_s: float
    ratio_to_torch: float


@dataclass(frozen=True, slots=True)
class CallRow:
    op: str
    rows: int
    context: int
    microseconds: float
    ratio_to_torch: float


def fastest(contenders: Contenders, rounds: int) -> dict[str, float]:
    """CPU seconds of each contender's fastest turn; they run one after another in each round."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def linear_rows(row_counts: tuple[int, ...], rounds: int) -> list[LinearRow]:
    generator = torch.Generator().manual_seed(0)
    plain = [(torch.randn(shape, generator=generator) * 0.05).bfloat16() for _ in range(COPIES) for shape in SHAPES]
    packed = {scheme: [PackedLinear.pack(weight, scheme) for weight in plain] for scheme in SCHEMES}
    multiplications = sum(weight.numel() for weight in plain)
    results = []
    for rows in row_counts:
        inputs = {k: torch.randn(rows, k, generator=generator).bfloat16() for k in (HIDDEN, INNER)}

        def run_torch(inputs: Mapping[int, torch.Tensor] = inputs) -> None:
            for weight in plain:
                linear(inputs[weight.shape[1]], weight)

        contenders: dict[str, Callable[[], object]] = {"torch": run_torch}
        for scheme, layers in packed.items():

            def run_packed(layers: list[PackedLinear] = layers, inputs: Mapping[int, torch.Tensor] = inputs) -> None:
                for layer in layers:
                    layer(inputs[layer.in_features])

            contenders[scheme] = run_packed
        seconds = fastest(contenders, rounds if rows <= 64 else max(2, rounds // 3))
        weight_bytes = {"torch": 2 * multiplications}
        weight_bytes |= {scheme: sum(layer.nbytes for layer in layers) for scheme, layers in packed.items()}
        for name, taken in seconds.items():
            results.append(
                LinearRow(
                    op="linear",
                    scheme="torch bf16" if name == "torch" else name,
                    rows=rows,
                    seconds=taken,
                    weights_gb_per_s=weight_bytes[name] / taken / 1e9,
                    gflop_per_s=2 * multiplications * rows / taken / 1e9,
                    ratio_to_torch=seconds["torch"] / taken,
                )
            )
    return results


def call_rows(rounds: int) -> list[CallRow]:
    results = []
    for rows in (1, 8):
        x, weight = torch.randn(rows, HIDDEN).bfloat16(), torch.ones(HIDDEN).bfloat16()
        gate_up = torch.randn(rows, 2 * INNER).bfloat16()
        pairs: list[tuple[str, int, Callable[[], object]]] = [
            ("rms_norm with residual", 0, lambda x=x, weight=weight: rms_norm(x, weight, 1e-5, x)),  # type: ignore[misc]
            ("swiglu", 0, lambda gate_up=gate_up: swiglu(gate_up)),  # type: ignore[misc]
        ]
        for context in CONTEXTS:
            pairs.append(("attention", context, _attention(rows, context)))
        for name, context, call in pairs:
            contenders = {
                "native": _repeated(call, native_kernels=True),
                "torch": _repeated(call, native_kernels=False),
            }
            if context:
                contenders["torch"] = _repeated(_contiguous_attention(rows, context), native_kernels=False)
            seconds = fastest(contenders, rounds)
            ratio = seconds["torch"] / seconds["native"]
            results.append(CallRow(name, rows, context, seconds["native"] / _REPEATS * 1e6, ratio))
    return results


_REPEATS = 20
_CHUNK = sized(512, 16)


def _repeated(call: Callable[[], object], native_kernels: bool) -> Callable[[], None]:
    def run() -> None:
        os.environ[native.SWITCH] = "1" if native_kernels else "0"
        for _ in range(_REPEATS):
            call()
        os.environ[native.SWITCH] = "1"

    return run


def _attention(requests: int, context: int, tokens: int = 1) -> Callable[[], object]:
    """Attention of the last `tokens` of the `context` positions of each request, whose blocks lie anywhere in the pool,
    as in one that was used for long."""
    slots = requests * context
    arena = PanelArena(slots, KV_HEADS, HEAD_DIM, torch.bfloat16)
    keys, values = (torch.randn(slots, KV_HEADS, HEAD_DIM) for _ in range(2))
    arena.write(torch.arange(slots), keys, values)
    tables = torch.randperm(slots // BLOCK_TOKENS).view(requests, -1).int()
    edges = torch.arange(0, requests * tokens + 1, tokens, dtype=torch.int32)
    spans = SpanTables(tables, torch.full((requests,), context, dtype=torch.int32), edges, BLOCK_TOKENS)
    packed = torch.randn(requests * tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
    query, key, value = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    scoring = Scoring(HEAD_DIM**-0.5)
    return lambda: attend(query, key, value, arena, spans, scoring)


def _contiguous_attention(rows: int, context: int) -> Callable[[], object]:
    """torch's own, on keys that lie in one piece: what it would cost without pages."""
    query = torch.randn(rows, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM).bfloat16()
    keys = torch.randn(rows, context, KV_HEADS, HEAD_DIM).bfloat16().transpose(1, 2)
    values = torch.randn(rows, context, KV_HEADS, HEAD_DIM).bfloat16().transpose(1, 2)
    return lambda: scaled_dot_product_attention(query, keys, values, scale=HEAD_DIM**-0.5)


def chunk_rows(rounds: int) -> list[CallRow]:
    """The last `_CHUNK` tokens of a prompt of `context`, beside torch's own under a mask, over keys in one piece."""
    results = []
    for context in CHUNK_CONTEXTS:
        native_call = _attention(1, context, _CHUNK)
        query = torch.randn(_CHUNK, HEADS, HEAD_DIM).bfloat16()
        keys, values = (torch.randn(context, KV_HEADS, HEAD_DIM).bfloat16() for _ in range(2))
        mask = torch.full((_CHUNK, context), -torch.inf).triu(context - _CHUNK + 1).bfloat16()
        heads, seen_keys, seen_values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, keys, values))
        torch_call = partial(
            scaled_dot_product_attention, heads, seen_keys, seen_values, attn_mask=mask, enable_gqa=True
        )
        seconds = fastest({"native": native_call, "torch": torch_call}, rounds)
        ratio = seconds["torch"] / seconds["native"]
        results.append(CallRow("attention of a chunk", _CHUNK, context, seconds["native"] * 1e6, ratio))
    return results


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {"cpu": model, "kernels": native.kernel_names(), "torch": torch.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer row counts and rounds: half a minute")
    parser.add_argument("-o", "--output", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    if not native.native_available():
        print("bench.kernels: there are no native kernels to measure", file=sys.stderr)
        return 1
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    counts, rounds = ((1, 8), sized(5, 1)) if arguments.quick else ((1, 2, 4, 8, 16, 32, 64, 128, 256, 512), 15)
    with torch.inference_mode():
        measured: list[LinearRow | CallRow] = [
            *linear_rows(counts, rounds),
            *call_rows(5 * rounds),
            *chunk_rows(rounds),
        ]
    text = json.dumps({"machine": machine(), "rows": [asdict(row) for row in measured]}, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
