"""How fast a stage with int4 weights decodes at a long context, with keys and values of 4 bits and in bfloat16.

    python -m bench.kv_int4 --positions 4096 --streams 1,8 --pairs 5

The two take turns, a few steps each. Keys and values are zeros: what they are does not change how long it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from bench.random_llama import TIED_CONFIG, RandomWeights
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

BLOCK_TOKENS = 16
clock: Callable[[], float] = time.perf_counter
KINDS = (KvFormat.BFLOAT16, KvFormat.INT4)


def filled(stage: StageModel, kept: KvFormat, streams: int, positions: int, steps: int) -> KvPool:
    """A pool in which each stream has so many positions, with room for its steps."""
    blocks, shape = -(-(positions + steps) // BLOCK_TOKENS), stage.shape
    memory = KvMemory(kept, blocks * streams, BLOCK_TOKENS)
    pool = KvPool(stage.layers, memory, shape.kv_heads, shape.head_dim, "cpu", scratch=False)
    grants = tuple(
        KvGrant(stream, 0, tuple(range(stream * blocks, (stream + 1) * blocks))) for stream in range(streams)
    )
    spans = tuple(Span(stream, 0, positions) for stream in range(streams))
    pool.commit(pool.check(StepPlan(grants=grants, spans=spans)))
    return pool


def decode(stage: StageModel, pool: KvPool, streams: int, steps: int) -> float:
    """Tokens a second of a stream, over the steps, each of which goes on where the last ended."""
    stage.pool = pool
    began = clock()
    for _ in range(steps):
        spans = tuple(
            Span(stream, pool.table(stream).length, 1, sample=True, sampling=Sampling()) for stream in range(streams)
        )
        stage.execute(StepPlan(spans=spans), np.ones(streams, dtype=np.int64))
    return steps / (clock() - began)


def compare(stage: StageModel, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    steps = options.steps * (options.pairs + 1)
    pools = {kept: filled(stage, kept, streams, options.positions, steps) for kept in KINDS}
    speeds: dict[KvFormat, list[float]] = {kept: [] for kept in KINDS}
    for turn in range(options.pairs + 1):
        for kept, pool in pools.items():
            speed = decode(stage, pool, streams, options.steps)
            if turn:  # the first warms up
                speeds[kept].append(speed)
    ratios = [small / whole for whole, small in zip(*speeds.values(), strict=True)]
    return {
        "streams": streams,
        "tokens_per_s": {str(kept): round(statistics.median(found), 2) for kept, found in speeds.items()},
        "kv_bytes": {str(kept): pool.bytes_capacity for kept, pool in pools.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: for a machine that others use too")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock = time.thread_time
    torch.set_num_threads(options.threads)
    config = TIED_CONFIG | {"max_position_embeddings": 2 * options.positions}
    stage = StageModel.with_kv(
        StageWeights.load(
            RandomWeights(config=config),
            config,
            LayerRange(0, config["num_hidden_layers"]),
            dtype=DType.BFLOAT16,
            device="cpu",
            quantisation=Quantisation.INT4,
        ),
        KvMemory(DType.BFLOAT16, 1, BLOCK_TOKENS),
    )
    rows = [compare(stage, int(streams), options) for streams in options.streams.split(",")]
    what = {"positions": options.positions, "threads": options.threads, "load": os.getloadavg()[0]}
    print(json.dumps({"benchmark": "kv_int4", **what, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
