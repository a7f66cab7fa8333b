"""Tokens per second of a whole model on one core, compared with llama.cpp on the same core.

The random Llama of `bench/random_llama.py` runs in this process as one stage without a network
around it, and llama.cpp as `llama-batched-bench`. They take turns, and a row has the medians: of
one stream, of 8 streams, and of a prompt of 512 tokens. Weights are bf16, int8 and int4,
llama.cpp's are BF16, Q8_0 and Q4_0. The LM heads differ. Ours is int8 with both kinds of integers,
and llama.cpp keeps Q6_K in a Q4_0 model. Each row names the two.

    python -m bench.one_core [--llama-cpp DIR] [--library FILE] [--turns N] [-o FILE]

prints a table, and writes JSON to FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from bench.engine_others import usable_llama_cpp
from bench.engine_stage import DecodingStage
from bench.kernel_libraries import LibraryError, open_library
from bench.llama_cpp import QUANTISED, batched_bench, has_quantiser, quantise, write_gguf
from bench.random_llama import CONFIG
from bench.sizes import sized
from edgeshard.domain.models.dtypes import Quantisation
from edgeshard.domain.models.model import LayerRange

DTYPES = ("bf16", "int8", "int4")
STREAMS = (1, 8)
CONTEXT, STEPS = 16, sized(32, 2)
PROMPT_TOKENS = sized(512, 16)
WORKLOADS = (*(f"{n} stream{'s' if n > 1 else ''}" for n in STREAMS), f"prompt of {PROMPT_TOKENS}")
SECONDS = sized(2.0, 0.0)
"""How long a turn decodes."""


@dataclass(slots=True)
class Row:
    """Tokens per second of one measurement, each turn's; `what` is "1 stream", "8 streams" or
    "prompt of 512"."""

    dtype: str
    what: str
    head: str
    llama_cpp_head: str = ""
    turns: list[float] = field(default_factory=list)
    llama_cpp_turns: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.turns)

    @property
    def llama_cpp_tokens_per_s(self) -> float | None:
        return statistics.median(self.llama_cpp_turns) if self.llama_cpp_turns else None

    @property
    def ratio(self) -> float | None:
        """How many times llama.cpp's rate ours is."""
        theirs = self.llama_cpp_tokens_per_s
        return self.tokens_per_s / theirs if theirs else None


class LlamaCpp:
    """llama.cpp's model with weights of one dtype."""

    def __init__(self, build: Path, folder: Path, dtype: str) -> None:
        self._build = build
        self._model = folder / f"{dtype}.gguf"
        self.head = "BF16"
        if dtype != "bf16":
            self.head = quantise(build, folder / "bf16.gguf", dtype, self._model)

    def measure(self, core: int) -> list[float]:
        """Tokens per second of STREAMS and of the prompt."""
        return measure_llama_cpp(self._build, self._model, core)


def measure_llama_cpp(build: Path, model: Path, core: int) -> list[float]:
    """Tokens per second of STREAMS and of the prompt, by llama.cpp."""
    decoding = batched_bench(build, model, CONTEXT, STEPS, STREAMS, core=core)
    (prompt,) = batched_bench(build, model, PROMPT_TOKENS, 1, (1,), core=core)
    return [*(rate.tokens_per_s for rate in decoding), PROMPT_TOKENS / prompt.prompt_s]


def measure_ours(stage: DecodingStage) -> list[float]:
    """Tokens per second of STREAMS and of the prompt."""
    rates = [streams / statistics.median(stage.decode(streams, SECONDS)) for streams in STREAMS]
    rates.append(PROMPT_TOKENS / stage.prompt(PROMPT_TOKENS))
    return rates


def take_turns(
    rows: Sequence[Row], stage: DecodingStage, turns: int, theirs: Callable[[], list[float]] | None
) -> None:
    """Measure the stage and llama.cpp in turns, and add the rates to `rows` (one row for each of
    WORKLOADS)."""
    for _ in range(turns):
        for row, rate in zip(rows, measure_ours(stage), strict=True):
            row.turns.append(rate)
        if theirs is not None:
            for row, rate in zip(rows, theirs(), strict=True):
                row.llama_cpp_turns.append(rate)


def measure(dtype: str, turns: int, core: int, theirs: LlamaCpp | None) -> list[Row]:
    """The rows of one dtype."""
    quantisation = None if dtype == "bf16" else Quantisation(dtype)
    layers = LayerRange(0, int(CONFIG["num_hidden_layers"]))
    stage = DecodingStage(
        layers, max(STREAMS), CONTEXT, STEPS, max_prompt=PROMPT_TOKENS, quantisation=quantisation
    )
    head = "bf16" if quantisation is None else "int8"
    rows = [Row(dtype, name, head, theirs.head if theirs else "") for name in WORKLOADS]
    take_turns(rows, stage, turns, None if theirs is None else lambda: theirs.measure(core))
    return rows


def line(row: Row) -> str:
    """A row for a reader."""
    text = f"{row.dtype:<6}{row.what:<15}{row.tokens_per_s:>8.1f} tokens/s, head {row.head}"
    if row.ratio is not None:
        text += (
            f"; llama.cpp {row.llama_cpp_tokens_per_s:.1f}, head {row.llama_cpp_head}: "
            f"{row.ratio:.2f}x"
        )
    return text


def run(dtypes: Sequence[str], turns: int, core: int, build: Path | None) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-one-core-") as scratch:
        folder = Path(scratch)
        if build is not None:
            write_gguf(folder / "bf16.gguf")
        for dtype in dtypes:
            theirs = None
            if build is not None and (dtype not in QUANTISED or has_quantiser(build)):
                theirs = LlamaCpp(build, folder, dtype)
            for row in measure(dtype, turns, core, theirs):
                print(line(row), flush=True)
                rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="the folder of its llama-batched-bench"
    )
    parser.add_argument(
        "--library", type=Path, metavar="FILE", help="compiled kernels; default: the checkout's"
    )
    parser.add_argument(
        "--kernels", metavar="NAME", help="the library's instruction set; default: the best one"
    )
    parser.add_argument(
        "--dtypes", default=",".join(DTYPES), metavar="NAME,...", help="of the weights"
    )
    parser.add_argument(
        "--turns", type=int, default=sized(5, 1), metavar="N", help="default: %(default)s"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file for the JSON")
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    build = usable_llama_cpp(options.llama_cpp)
    try:
        library = open_library(options.library, options.kernels) if options.library else None
    except LibraryError as error:
        print(f"bench.one_core: {error}", file=sys.stderr)
        return 1
    with library.in_use() if library else nullcontext():
        rows = run(options.dtypes.split(","), options.turns, core, build)
    if options.output:
        figures = [
            {**asdict(row), "tokens_per_s": row.tokens_per_s, "ratio": row.ratio} for row in rows
        ]
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
