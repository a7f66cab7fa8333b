"""How fast one core decodes a hybrid of Qwen3.5's shape, compared with transformers and a Llama of
its size.

The model is that of Qwen3.5-0.8B (752 M parameters, random): three layers in four have a gated
delta rule. Everything runs in one process with one thread on one core, and takes turns within every
round. The fastest steps are compared. The memory's rate is that of reading as many bytes as the
model has, once.

    python -m bench.hybrids [--quick] [-o FILE]     JSON on stdout, or in FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from bench.random_llama import CONFIG, RandomWeights
from bench.sizes import sized
from edgeshard.domain.deployments.guesses import MOST_GUESSES
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

LAYERS = sized(24, 4)
HYBRID: dict[str, Any] = CONFIG | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": sized(1024, 128),
    "intermediate_size": sized(3584, 256),
    "num_hidden_layers": LAYERS,
    "num_attention_heads": sized(8, 2),
    "num_key_value_heads": sized(2, 1),
    "head_dim": sized(256, 64),
    "vocab_size": sized(248_320, 512),
    "tie_word_embeddings": True,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * (LAYERS // 4),
    "linear_num_key_heads": sized(16, 2),
    "linear_num_value_heads": sized(16, 2),
    "linear_key_head_dim": sized(128, 32),
    "linear_value_head_dim": sized(128, 32),
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
# Its layers differ from the hybrid's only in the mixer, so that the size is nearly the same.
LLAMA = CONFIG | {
    key: HYBRID[key]
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings")
}
LLAMA |= {
    "intermediate_size": sized(4352, 320),
    "num_attention_heads": sized(16, 4),
    "num_key_value_heads": sized(8, 2),
}
CONTEXT, STEPS = sized((128, 16), (16, 8))
PROMPT = sized(512, 32)
STREAMS = (1, 8)
GUESSES = (1, 3, MOST_GUESSES)
_BLOCK = 16


class Engine:
    """A model of ours whose requests all decode together, each after `CONTEXT` tokens."""

    def __init__(self, config: dict[str, Any], quantisation: str | None = None) -> None:
        self._vocab = config["vocab_size"]
        chosen = None if quantisation is None else Quantisation(quantisation)
        layers = LayerRange(0, config["num_hidden_layers"])
        weights = StageWeights.load(
            RandomWeights(config),
            config,
            layers,
            dtype=DType.BFLOAT16,
            device="cpu",
            quantisation=chosen,
        )
        self.bytes = weights.modules.parameter_bytes
        self._blocks = -(-(max(PROMPT, CONTEXT) + STEPS) // _BLOCK)
        memory = KvMemory(
            DType.BFLOAT16,
            self._blocks * max(STREAMS),
            _BLOCK,
            slots=max(STREAMS),
            guess_slots=MOST_GUESSES,
        )
        self._model = StageModel.with_kv(weights, memory)

    def prompt_s(self, tokens: int, requests: int = 1) -> float:
        """Seconds of `requests` prompts, one after the other, each from its beginning."""
        began, has_states = time.perf_counter(), bool(self._model.pool.states.slots)
        for request in range(requests):
            blocks = tuple(range(request * self._blocks, (request + 1) * self._blocks))
            grant = KvGrant(request, 0, blocks, slot=request if has_states else None)
            span = Span(request, 0, tokens, sample=True, sampling=Sampling())
            self._model.execute(StepPlan((request,), (grant,), (span,)), self._tokens(tokens))
        return time.perf_counter() - began

    def step_s(self, streams: int) -> float:
        """Seconds of the fastest of some steps."""
        self.prompt_s(CONTEXT, streams)
        taken = []
        for step in range(STEPS):
            spans = tuple(
                Span(request, CONTEXT + step, 1, sample=True) for request in range(streams)
            )
            began = time.perf_counter()
            self._model.execute(StepPlan(spans=spans), self._tokens(streams))
            taken.append(time.perf_counter() - began)
        return min(taken)

    def guessed_s(self, guesses: int) -> float:
        """Seconds of the fastest step of one request with `guesses` guesses, the first half of them
        right."""
        self.prompt_s(CONTEXT)
        taken, first = [], CONTEXT
        while first + 1 + guesses <= CONTEXT + STEPS:
            spans = (Span(0, first, 1 + guesses, sample=True, guesses=guesses),)
            began = time.perf_counter()
            self._model.execute(StepPlan(spans=spans), self._tokens(1 + guesses))
            taken.append(time.perf_counter() - began)
            first += 1 + guesses // 2
        return min(taken)

    def _tokens(self, count: int) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self._vocab, count)


class Theirs:
    """The same shape in transformers, in bfloat16."""

    def __init__(self) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as module
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

        config = Qwen3_5TextConfig(
            **{key: value for key, value in HYBRID.items() if key != "architectures"}
        )
        with torch.device("meta"):
            model: Any = module.Qwen3_5ForCausalLM(config)
        self._model: Any = model.to(torch.bfloat16).to_empty(device="cpu").eval()
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            tensor.data.fill_(1.0 if "norm" in name or "inv_freq" in name else 0.01)

    def step_s(self, streams: int) -> float:
        ids = torch.ones((streams, CONTEXT), dtype=torch.long)
        cache = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
        taken = []
        for _ in range(STEPS):
            began = time.perf_counter()
            cache = self._model(ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
            taken.append(time.perf_counter() - began)
        return min(taken)


def memory_s(size: int) -> Callable[[], float]:
    """Seconds of reading `size` bytes."""
    memory = torch.ones(size // 4)

    def read() -> float:
        began = time.perf_counter()
        memory.sum()
        return time.perf_counter() - began

    return read


def measure(rounds: int) -> dict[str, float]:
    hybrid = Engine(HYBRID)
    small = Engine(HYBRID, "int4")
    llama = Engine(LLAMA)
    theirs = Theirs()
    contenders: dict[str, Callable[[], float]] = {
        "memory_s": memory_s(hybrid.bytes),
        **{f"bf16_x{streams}_s": partial(hybrid.step_s, streams) for streams in STREAMS},
        **{f"transformers_x{streams}_s": partial(theirs.step_s, streams) for streams in STREAMS},
        **{f"bf16_guesses{guesses}_s": partial(hybrid.guessed_s, guesses) for guesses in GUESSES},
        "int4_x1_s": lambda: small.step_s(1),
        "llama_x1_s": lambda: llama.step_s(1),
        "prompt_s": lambda: hybrid.prompt_s(PROMPT),
        "llama_prompt_s": lambda: llama.prompt_s(PROMPT),
    }
    best: dict[str, float] = {}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, run in contenders.items():
                best[name] = min(best.get(name, float("inf")), run())
    return best | {
        "bytes": hybrid.bytes,
        "llama_bytes": llama.bytes,
        "of_memorys_rate": best["memory_s"] / best["bf16_x1_s"],
        "times_transformers_x1": best["transformers_x1_s"] / best["bf16_x1_s"],
        "times_transformers_x8": best["transformers_x8_s"] / best["bf16_x8_s"],
        "int4_times_bf16": best["bf16_x1_s"] / best["int4_x1_s"],
        "prompts_of_llamas_rate": best["llama_prompt_s"]
        / llama.bytes
        / best["prompt_s"]
        * hybrid.bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    report = json.dumps(measure(1 if options.quick else 5), indent=1)
    if options.output is None:
        print(report)
    else:
        options.output.write_text(report, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
