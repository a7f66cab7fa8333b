"""How fast one stage that holds a whole model decodes on one core, beside `transformers.generate`.

The 316 M-parameter random Llama (`bench/random_llama.py`) runs as one StageModel with bf16, int8 and int4 weights and
by transformers in bf16, all in this process, on one thread pinned to one core, in turns. With --tied it is the tied one
of 596 M, a quarter of which is the LM head. A run decodes its tokens for
1, 8 and 16 streams behind a prompt each; its rate is streams / median step, without the first token. The report has the
median of the runs, their ratios to transformers and to bf16, and where the time of a step goes. Times are of the
thread's own processor time with --cpu-time: on a shared machine that leaves out what others do on the core, though not
on its cache.

    python -m bench.decode [--rounds 5] [--tokens 16] [--cpu-time]    JSON on stdout
    python -m bench.decode --tied --schemes bf16,int8,int4,int4-head-int4 --streams 1 --without-transformers
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from edgeshard_agent.model import blocks
from edgeshard_agent.model.attention import attention
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.fused import FusedModules
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.native import native_available

from bench.random_llama import CONFIG, TIED_CONFIG, RandomWeights
from bench.sizes import sized
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

STREAMS = (1, 8, 16)
PROMPT_TOKENS = sized(128, 16)
BLOCK_TOKENS = 16
TRANSFORMERS = "transformers"

clock: Callable[[], float] = time.perf_counter

Decoder = Callable[[int, int], list[float]]
"""(streams, tokens) to the seconds of each step but the first."""


def stage_of(weights: RandomWeights, scheme: str, tokens: int, config: dict[str, Any] = CONFIG) -> StageModel:
    """All layers in one stage; `scheme` is bf16 or a `Quantisation`."""
    blocks_per_stream = -(-(PROMPT_TOKENS + tokens + 1) // BLOCK_TOKENS)
    return StageModel.with_kv(
        StageWeights.load(
            weights,
            config,
            LayerRange(0, config["num_hidden_layers"]),
            dtype=DType.BFLOAT16,
            device="cpu",
            quantisation=None if scheme == "bf16" else Quantisation(scheme),
        ),
        KvMemory(DType.BFLOAT16, blocks_per_stream * max(STREAMS), BLOCK_TOKENS),
    )


def prompts(streams: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(streams).integers(0, CONFIG["vocab_size"], (streams, PROMPT_TOKENS))


def prefill(stage: StageModel, streams: int, tokens: int) -> list[int]:
    """Each stream's prompt alone, for `tokens` steps of decoding after it; the first token of each."""
    blocks_per_stream = -(-(PROMPT_TOKENS + tokens + 1) // BLOCK_TOKENS)
    stage.reset()
    first = []
    for stream, prompt in enumerate(prompts(streams)):
        grant = KvGrant(stream, 0, tuple(range(stream * blocks_per_stream, (stream + 1) * blocks_per_stream)))
        span = Span(stream, 0, PROMPT_TOKENS, sample=True, sampling=Sampling())
        output = stage.execute(StepPlan(grants=(grant,), spans=(span,)), prompt)
        first.append(output.tokens[0].token)
    return first


def decode(stage: StageModel, last: list[int], tokens: int) -> list[float]:
    """Decode all streams together from their last tokens on; seconds of each step."""
    times = []
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + tokens):
        began = clock()
        spans = tuple(Span(stream, position, 1, sample=True) for stream in range(len(last)))
        output = stage.execute(StepPlan(spans=spans), np.array(last, dtype=np.int64))
        last = [token.token for token in output.tokens]
        times.append(clock() - began)
    return times


def stage_decoder(stage: StageModel) -> Decoder:
    return lambda streams, tokens: decode(stage, prefill(stage, streams, tokens), tokens)


def transformers_decoder(weights: RandomWeights, config: dict[str, Any] = CONFIG) -> Decoder:
    """The same weights (not copied) under `generate`, greedy."""
    from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**config))
    tied = config["tie_word_embeddings"]
    model.load_state_dict(weights.tensors, assign=True, strict=not tied)
    if tied:
        model.tie_weights()
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config)  # its frequencies are not in the checkpoint
    model.eval()

    def generate(streams: int, tokens: int) -> list[float]:
        stamps: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            stamps.append(clock())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.from_numpy(prompts(streams))
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens + 1,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([stamp]),
        )
        return [later - earlier for earlier, later in itertools.pairwise(stamps)]

    return generate


class Stopwatches:
    """Seconds inside each operator of a stage, while it is on. What is left over is Python between them.

    The blocks then run operator by operator, which costs a few milliseconds more than the one native call of a step.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Stopwatches:
        for module, name in (
            (blocks, "rms_norm"),
            (blocks, "rotary_"),
            (blocks, "swiglu"),
            (attention, "attend"),
        ):
            self._wrap(module, name, lambda *_, label=name: label)
        self._replace(FusedModules, "_native_blocks", lambda *_: [])
        self._wrap(Projection, "forward", lambda projection, *_: f"linear {projection.rows}x{projection.columns}")
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def _wrap(self, owner: Any, name: str, label: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = clock()
            result = real(*arguments, **options)
            self.seconds[label(*arguments)] += clock() - began
            return result

        self._replace(owner, name, timed)

    def _replace(self, owner: Any, name: str, other: Any) -> None:
        real = getattr(owner, name)
        setattr(owner, name, other)
        self._undo.append(lambda: setattr(owner, name, real))


def profile(stage: StageModel, streams: int, tokens: int) -> dict[str, float]:
    """Milliseconds of a decode step by operator."""
    last = prefill(stage, streams, tokens)
    with Stopwatches() as watches:
        step = statistics.fmean(decode(stage, last, tokens))
    parts = {name: seconds / tokens for name, seconds in watches.seconds.items()}
    parts["outside the operators"] = step - sum(parts.values())
    return {name: round(1e3 * seconds, 3) for name, seconds in sorted(parts.items(), key=lambda item: -item[1])}


def measure(
    decoders: dict[str, Decoder], rounds: int, tokens: int, counts: Sequence[int] = STREAMS
) -> dict[tuple[str, int], list[float]]:
    """Tokens per second of every engine and number of streams, `rounds` times in turns."""
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for number in range(rounds):
        for streams, (name, decoder) in itertools.product(counts, decoders.items()):
            rate = streams / statistics.median(decoder(streams, tokens))
            rates[name, streams].append(rate)
            print(f"round {number + 1}/{rounds} {name} x{streams}: {rate:.1f} tok/s", file=sys.stderr)
    return rates


def report(rates: dict[tuple[str, int], list[float]]) -> list[dict[str, Any]]:
    """A row for each engine and number of streams. Ratios are taken within a round, then their median."""
    rows = []
    for (name, streams), own in rates.items():
        row: dict[str, Any] = {
            "engine": TRANSFORMERS if name == TRANSFORMERS else "edgeshard",
            "dtype": "bf16" if name == TRANSFORMERS else name,
            "streams": streams,
            "tokens_per_s": round(statistics.median(own), 2),
            "samples": [round(rate, 2) for rate in own],
        }
        for other in (TRANSFORMERS, "bf16"):
            if (other, streams) in rates and name != other:
                pairs = zip(own, rates[other, streams], strict=True)
                row[f"ratio_to_{other}"] = round(statistics.median(mine / theirs for mine, theirs in pairs), 3)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16, help="decode steps of a run")
    parser.add_argument("--core", type=int, default=0, help="the core this process is pinned to")
    parser.add_argument("--schemes", default="bf16,int8,int4")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--tied", action="store_true", help="the tied model of 596 M parameters")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="time by the thread's processor time")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock = time.thread_time
    os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    counts = [int(count) for count in options.streams.split(",")]
    config = TIED_CONFIG if options.tied else CONFIG
    weights = RandomWeights(config=config)
    stages = {scheme: stage_of(weights, scheme, options.tokens, config) for scheme in options.schemes.split(",")}
    decoders: dict[str, Decoder] = {scheme: stage_decoder(stage) for scheme, stage in stages.items()}
    with torch.inference_mode():
        if not options.without_transformers:
            decoders[TRANSFORMERS] = transformers_decoder(weights, config)
        rates = measure(decoders, options.rounds, options.tokens, counts)
        profiles = {
            scheme: {f"{streams} streams": profile(stage, streams, options.tokens) for streams in counts}
            for scheme, stage in stages.items()
        }
    result = {
        "benchmark": "decode",
        "parameters": sum(tensor.numel() for tensor in weights.tensors.values()),
        "parameter_bytes": {scheme: stage.parameter_bytes for scheme, stage in stages.items()},
        "clock": "thread" if options.cpu_time else "wall",
        "native_operators": native_available(),
        "prompt_tokens": PROMPT_TOKENS,
        "rows": report(rates),
        "milliseconds_per_step": profiles,
        "load_1_minute": os.getloadavg()[0],
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
