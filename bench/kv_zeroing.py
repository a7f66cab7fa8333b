"""What zeroing KV blocks costs beside what is computed into them.

The 316 M-parameter random Llama (`bench/random_llama.py`) in one StageModel with int4 weights, whose steps are the
quickest, on one thread. Timed in turns, in milliseconds: a decode step of 1 and of 16 streams, a prompt of 128 tokens,
and zeroing the blocks that are granted for them: one block in each 16 steps of a stream, 8 for the prompt. `share` is
the part of the step, or of the prompt, that zeroing takes.

    python -m bench.kv_zeroing [--rounds 15]      JSON on stdout
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from bench.engine_stage import BLOCK_TOKENS, DecodingStage
from bench.random_llama import CONFIG
from bench.sizes import sized
from edgeshard.domain.models.dtypes import Quantisation
from edgeshard.domain.models.model import LayerRange

PROMPT_TOKENS = sized(128, 16)
TOKENS = 8
STREAMS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    layers = LayerRange(0, CONFIG["num_hidden_layers"])
    stage = DecodingStage(layers, Quantisation.INT4, STREAMS, PROMPT_TOKENS, TOKENS)
    pool = stage.model.pool
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for streams in (1, STREAMS):
            times[f"decode x{streams}"] += stage.decode(streams, 0)
        times["prompt"].append(stage.prompt_s())
        for count in (1, PROMPT_TOKENS // BLOCK_TOKENS):
            times[f"zero {count}"].append(timed(lambda count=count: pool._clear(range(count))))  # type: ignore[misc]
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    print(json.dumps(report(medians, pool.block_bytes), indent=1))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(medians_ms: dict[str, float], block_bytes: int) -> dict[str, object]:
    block, prompt = medians_ms["zero 1"], medians_ms[f"zero {PROMPT_TOKENS // BLOCK_TOKENS}"]
    shares = {
        f"decode x{streams}": streams * block / BLOCK_TOKENS / medians_ms[f"decode x{streams}"]
        for streams in (1, STREAMS)
    }
    shares["prompt"] = prompt / medians_ms["prompt"]
    return {
        "block_bytes": block_bytes,
        "ms": {name: round(value, 4) for name, value in medians_ms.items()},
        "share": {name: round(value, 6) for name, value in shares.items()},
    }


if __name__ == "__main__":
    main()
