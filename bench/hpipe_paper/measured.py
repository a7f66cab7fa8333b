"""Figure 2 on this machine: the utilisation of one core by a block, by the length of a slice and by
the tokens before it.

Blocks of a random Llama in bfloat16 compute slices with the agent's kernels, on one thread. A
slice's utilisation is the block's operations over its time, as a part of the core's own FMA rate,
which is measured between the slices.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.measuring.machine_facts import processor_name
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops import native

from bench.random_llama import CONFIG, RandomWeights
from bench.sizes import sized
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange, attended_pairs
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

BLOCK_TOKENS = 16
LAYERS = LayerRange(1, sized(9, 3))
"""Without the embedding; their weights are more than a core's caches hold."""
LENGTHS = sized((*range(1, 25), 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024), (1, 6, 7))
LONG_SLICE = sized(128, 8)
CONTEXTS = sized((0, 512, 1024, 2048, 3072), (0, 32))
ROUNDS = sized(5, 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """Utilisations between 0 and 1: by a slice's tokens if no tokens precede it, and by the number
    of preceding tokens for a slice of `long_slice`.

    `read` is the part of the FMA rate that reading the weights once a slice allows, by a slice's
    tokens.
    """

    cpu: str
    kernels: str
    fma_gflop_per_s: float
    read_gb_per_s: float
    long_slice: int
    by_length: dict[int, float]
    by_context: dict[int, float]
    read: dict[int, float]


def measure() -> Measured:
    """The medians of ROUNDS rounds; all slices take turns in each. About a minute."""
    torch.set_num_threads(1)
    most = max(max(LENGTHS), max(CONTEXTS) + LONG_SLICE)
    with torch.inference_mode():
        stage = _Blocks(most)
        cases = [(0, length) for length in LENGTHS] + [
            (context, LONG_SLICE) for context in CONTEXTS
        ]
        found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
        rates = []
        reads = []
        for _ in range(ROUNDS):
            for case in cases:
                rates.append(native.fma_rate_gflop_per_s())
                found[case].append(operations(*case) / stage.slice_s(*case) / (1e9 * rates[-1]))
            reads.append(native.read_rate_gb_per_s())
    used = {case: statistics.median(parts) for case, parts in found.items()}
    fma = statistics.median(rates)
    read = statistics.median(reads)
    return Measured(
        cpu=processor_name(),
        kernels=native.kernel_names()[0],
        fma_gflop_per_s=fma,
        read_gb_per_s=read,
        long_slice=LONG_SLICE,
        by_length={length: used[0, length] for length in LENGTHS},
        by_context={context: used[context, LONG_SLICE] for context in CONTEXTS},
        read={length: min(1.0, length * read / fma) for length in LENGTHS},
    )


def operations(before: int, tokens: int) -> float:
    """Operations of a slice after `before` other tokens, in all of LAYERS: two for each weight,
    four for each channel of a pair.
    """
    hidden = CONFIG["hidden_size"]
    inner = CONFIG["intermediate_size"]
    heads = CONFIG["num_attention_heads"]
    width = heads * CONFIG["head_dim"]
    kv_width = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    weights = 2 * hidden * (width + kv_width) + 3 * hidden * inner
    pairs = attended_pairs(tokens, before)
    return len(LAYERS) * float(2 * weights * tokens + 4 * width * pairs)


class _Blocks:
    """LAYERS of the random Llama, with keys and values for one request of `most` tokens."""

    def __init__(self, most: int) -> None:
        weights = StageWeights.load(
            RandomWeights(layers=LAYERS),
            CONFIG,
            LAYERS,
            dtype=DType.BFLOAT16,
            device="cpu",
            quantisation=None,
        )
        blocks = -(-most // BLOCK_TOKENS)
        self._model = StageModel.with_kv(weights, KvMemory(DType.BFLOAT16, blocks, BLOCK_TOKENS))
        self._generator = torch.Generator().manual_seed(0)
        grant = KvGrant(0, 0, tuple(range(blocks)))
        self._model.execute(StepPlan(grants=(grant,)), None)
        self._held = 0

    def slice_s(self, before: int, tokens: int) -> float:
        """Seconds of this thread's processor time for a slice after the first `before` positions of
        the request."""
        if before > self._held:
            self._run(self._held, before - self._held)
        return self._run(before, tokens)

    def _run(self, before: int, tokens: int) -> float:
        hidden = torch.randn(tokens, CONFIG["hidden_size"], generator=self._generator).bfloat16()
        span = Span(0, before, tokens, sample=True, sampling=Sampling())
        began = time.thread_time()
        self._model.execute(StepPlan(spans=(span,)), hidden)
        self._held = before + tokens
        return time.thread_time() - began


def write(path: Path, measured: Measured) -> None:
    path.write_text(json.dumps(asdict(measured), indent=1) + "\n")


def read(path: Path) -> Measured:
    """Read the result of `write`."""
    values: dict[str, Any] = json.loads(path.read_text())
    for name in ("by_length", "by_context", "read"):
        values[name] = {int(key): value for key, value in values[name].items()}
    return Measured(**values)
