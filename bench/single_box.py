"""Engines for one node beside ours: the random Llama of `bench/random_llama.py` whole, bf16, on one core and on two.

Each measurement is a process of its own, pinned to as many cores as it has threads, without daemons or a client: ours
is a `StageModel` with all layers. All take turns within a round, and a row has the median of the rounds.

    python -m bench.single_box [--llama-cpp DIR] [--ik-llama PYTHON] [--rounds 3] [--cores 1,2] [-o FILE]

`DIR` has `llama-batched-bench`; `PYTHON` is one of an environment with `ik-llama-cpp-python`. JSON rows: `engine`,
`cores`, `streams`, `depth` (tokens of each prompt), and `tokens_per_s` of decoding without the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.llama_cpp import batched_bench, write_gguf
from bench.pages import with_trees
from bench.random_llama import CONFIG, RandomWeights
from bench.site_calls import write_rows
from bench.sizes import sized

NEW_TOKENS = 24
ROOMS = ("agent/edgeshard_agent/model", "agent/edgeshard_agent/ops")


@dataclass(frozen=True, slots=True)
class Shape:
    """So many streams, each behind a prompt of `depth` tokens."""

    streams: int
    depth: int


SHAPES = sized((Shape(1, 128), Shape(8, 128), Shape(16, 128), Shape(1, 4096)), (Shape(2, 16),))

Engine = Callable[[int, Shape], float]
"""(cores, shape) to tokens per second."""


def pinned(cores: int, command: Sequence[str]) -> Any:
    """The last JSON object that the command prints, run on the first of so many cores. Raises CalledProcessError where
    it fails."""
    whole = ["taskset", "-c", f"0-{cores - 1}", *command]
    lines = subprocess.run(whole, capture_output=True, text=True, check=True, timeout=600).stdout.splitlines()
    return json.loads([line for line in lines if line.startswith("{")][-1])


def ours(cores: int, shape: Shape) -> float:
    command = [sys.executable, "-m", "bench.single_box", "--stage", *map(str, (cores, shape.streams, shape.depth))]
    return float(pinned(cores, command)["tokens_per_s"])


def llama_cpp(folder: Path, model: Path) -> Engine:
    def measure(cores: int, shape: Shape) -> float:
        command = batched_bench(folder, model, cores, shape.depth, NEW_TOKENS, [shape.streams])
        return float(pinned(cores, command)["speed_tg"])

    return measure


def ik_llama(python: Path, model: Path) -> Engine:
    def measure(cores: int, shape: Shape) -> float:
        script = Path(__file__).with_name("ik_llama.py")
        numbers = map(str, (cores, shape.streams, shape.depth, NEW_TOKENS, CONFIG["vocab_size"]))
        return float(pinned(cores, [str(python), str(script), str(model), *numbers])["tokens_per_s"])

    return measure


def stage_rate(cores: int, shape: Shape) -> float:
    """Ours, in this process."""
    import torch

    from bench.engine_stage import DecodingStage
    from edgeshard.domain.models.model import LayerRange

    torch.set_num_threads(cores)
    layers = LayerRange(0, int(CONFIG["num_hidden_layers"]))
    with torch.inference_mode():
        stage = DecodingStage(layers, None, shape.streams, shape.depth, NEW_TOKENS)
        stage.decode(shape.streams, 0)  # the first steps after the prompt are slower
        return shape.streams / statistics.mean(stage.decode(shape.streams, 0))


def measure_all(engines: dict[str, Engine], cores: Sequence[int], rounds: int) -> list[dict[str, object]]:
    rates = defaultdict[tuple[str, int, Shape], list[float]](list)
    for number in range(rounds):
        for count in cores:
            for shape in SHAPES:
                for name, engine in engines.items():
                    rates[name, count, shape].append(engine(count, shape))
                    told = f"{number + 1}/{rounds} {name} on {count}, {shape}: {rates[name, count, shape][-1]:.1f}"
                    print(told, file=sys.stderr, flush=True)
    return [
        {
            "engine": name,
            "cores": count,
            "streams": shape.streams,
            "depth": shape.depth,
            "tokens_per_s": round(statistics.median(found), 1),
        }
        for (name, count, shape), found in rates.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR")
    parser.add_argument("--ik-llama", type=Path, metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument("--stage", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage is not None:
        cores, streams, depth = options.stage
        print(json.dumps({"tokens_per_s": stage_rate(cores, Shape(streams, depth))}))
        return 0
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-node-") as scratch:
        model = Path(scratch) / "model.gguf"
        engines: dict[str, Engine] = {"edgeshard": ours}
        if options.llama_cpp or options.ik_llama:
            write_gguf(model, RandomWeights())
        if options.llama_cpp:
            engines["llama.cpp"] = llama_cpp(options.llama_cpp.resolve(), model)
        if options.ik_llama:
            engines["ik_llama.cpp"] = ik_llama(options.ik_llama.absolute(), model)
        rows = with_trees(
            measure_all(engines, [int(count) for count in options.cores.split(",")], options.rounds), ROOMS
        )
    print("\n".join(json.dumps(row) for row in rows))
    write_rows(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
