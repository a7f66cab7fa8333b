"""Does a profile say how long a stage takes? Layers timed one sort at a time against a stage timed as a whole.

A stage of random layers is run for real, before and after a profile of the same shape is measured, in the same process
and with the same threads. Predicted is the sum of the layers' fitted times; a decode step and a prefill are compared.

    python -m bench.profile_check [--layers 12] [--rounds 3] [--threads 1] [--quick] [--config config.json]    JSON
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.measuring.compute import Profiler
from edgeshard_agent.measuring.rotation import BLOCK_TOKENS, fill
from edgeshard_agent.model.adapters import build_modules
from edgeshard_agent.model.attention.kv import KvPool
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.model.weights.weights import StageWeights

from bench.sizes import sized
from edgeshard.architectures import parse_config
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.profile import LayerKind
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard.profiles.fit import fit_profile
from edgeshard.profiles.grid import FULL_GRID, QUICK_GRID

LLAMA_316M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": sized(1024, 128),
    "intermediate_size": sized(2816, 256),
    "num_hidden_layers": 24,
    "num_attention_heads": sized(16, 4),
    "num_key_value_heads": sized(8, 2),
    "vocab_size": sized(16_000, 512),
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DTYPE = DType.BFLOAT16
CONTEXT = 100
PROMPT = 128
STEPS = 40
PROMPTS = 3
KV_BLOCKS = 16


class Stage:
    """A stage in the middle of a model, of random layers."""

    def __init__(self, config: dict[str, Any], layers: int) -> None:
        self.shape = parse_config(config)
        first = max(1, (self.shape.layer_count - layers) // 2)
        held = LayerRange(first, first + layers)
        modules = build_modules(config, held, DTYPE, "cpu")
        fill(modules, DTYPE, "cpu")
        pool = KvPool(held, KV_BLOCKS, BLOCK_TOKENS, self.shape.kv_heads, self.shape.head_dim, DTYPE, "cpu")
        self._model = StageModel(StageWeights(self.shape, held, modules), pool)

    def decode(self) -> list[float]:
        """Seconds of decode steps around CONTEXT positions."""
        start = CONTEXT - STEPS // 2
        self._begin(start)
        return [self._timed(Span(1, start + number, 1)) for number in range(STEPS)]

    def prefill(self) -> list[float]:
        """Seconds of whole prompts of PROMPT tokens."""
        return [self._begin(PROMPT) for _ in range(PROMPTS)]

    def _begin(self, tokens: int) -> float:
        self._model.reset()
        return self._timed(Span(1, 0, tokens, sampling=Sampling()), (KvGrant(1, 0, tuple(range(KV_BLOCKS))),))

    def _timed(self, span: Span, grants: tuple[KvGrant, ...] = ()) -> float:
        hidden = torch.randn(span.token_count, self.shape.frame_width).to(TORCH_DTYPES[DTYPE])
        began = time.perf_counter()
        self._model.execute(StepPlan(grants=grants, spans=(span,)), hidden)
        return time.perf_counter() - began


def compare(config: dict[str, Any], layers: int, threads: int, quick: bool) -> dict[str, Any]:
    """One round: measured and predicted seconds, and their deviation."""
    stage = Stage(config, layers)
    stage.prefill()
    decode, prefill = stage.decode(), stage.prefill()
    profile = Profiler(config, DTYPE, "cpu", threads, QUICK_GRID if quick else FULL_GRID).run()
    decode, prefill = decode + stage.decode(), prefill + stage.prefill()
    fit = fit_profile(profile)
    (block,) = fit.of_kind(LayerKind.BLOCK)
    predicted = {"decode": layers * block.decode_s(1, CONTEXT), "prefill": layers * block.prefill_s(PROMPT)}
    measured = {"decode": statistics.median(decode), "prefill": statistics.median(prefill)}
    result: dict[str, Any] = {
        "step_overhead_s": fit.step_overhead_s,
        "processor_share": profile.processor_share,
    }
    half = len(decode) // 2
    result["decode_before_s"], result["decode_after_s"] = (
        statistics.median(part) for part in (decode[:half], decode[half:])
    )
    for phase, error in (("decode", block.decode.error), ("prefill", block.prefill.error)):
        result[phase] = {
            "measured_s": measured[phase],
            "predicted_s": predicted[phase],
            "deviation": predicted[phase] / measured[phase] - 1,
            "fit_error_median": error.median,
            "fit_error_max": error.max,
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = LLAMA_316M if options.config is None else json.loads(options.config.read_text(encoding="utf-8"))
    rounds = [compare(config, options.layers, options.threads, options.quick) for _ in range(options.rounds)]
    typical = {
        phase: statistics.median(abs(entry[phase]["deviation"]) for entry in rounds) for phase in ("decode", "prefill")
    }
    json.dump({"rounds": rounds, "median_absolute_deviation": typical}, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
