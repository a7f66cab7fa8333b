"""A GGUF file over two nodes of one core each, next to llama.cpp's RPC backend with the same file.

The file is the random Llama of `bench/random_llama.py` in a mixture of llama-quantize. Each round
runs some streams over EdgeShard's two agents and then over two RPC servers, all with one thread. A
row has the medians of the rounds. Coordinator and client share the two cores with the agents.

    python -m bench.gguf_two_nodes [--llama-cpp DIR] [--mixture Q4_K_M] [--rounds N] [-o FILE]

Without a build of llama.cpp the file is Q8_0, and only EdgeShard is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.engine_others import tell, usable_llama_cpp
from bench.engine_site import NODES, PinnedSite, Setup
from bench.engine_streams import sample_of
from bench.gguf_mixtures import write_mixture
from bench.llama_cpp import LlamaCppRpc, head_format, write_gguf
from bench.one_core import Row, line
from bench.sizes import sized

STREAMS = sized((1, 8, 16), (1, 2))
PROMPT_TOKENS = sized(32, 8)
NEW_TOKENS = sized(64, 6)


async def ours(site: PinnedSite, setup: Setup, streams: int) -> float:
    """Tokens per second of EdgeShard."""
    await site.warm_up(setup)
    return sample_of(await site.streams(setup, streams, PROMPT_TOKENS, NEW_TOKENS)).tokens_per_s


async def measure(
    model: Path, mixture: str, rounds: int, build: Path | None, scratch: Path
) -> list[Row]:
    """A row for each number of streams; default options except the cut."""
    head = head_format(model)
    rows = [Row(mixture, f"{streams} streams", head, head) for streams in STREAMS]
    setup = Setup(len(NODES), micro_batches=0)
    async with PinnedSite(scratch, model=model) as site:
        await site.deploy(setup)
        for _ in range(rounds):
            for row, streams in zip(rows, STREAMS, strict=True):
                row.turns.append(await ours(site, setup, streams))
            if build is not None:
                for row, rate in zip(
                    rows, await asyncio.to_thread(theirs, build, model), strict=True
                ):
                    row.llama_cpp_turns.append(rate)
    return rows


def theirs(build: Path, model: Path) -> Sequence[float]:
    """Tokens per second of llama.cpp, by STREAMS. Its servers run only for this round."""
    with LlamaCppRpc(build, model, range(len(NODES))) as servers:
        return [rate.tokens_per_s for rate in servers.rates(PROMPT_TOKENS, NEW_TOKENS, STREAMS)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="the folder of its ggml-rpc-server"
    )
    parser.add_argument("--mixture", default="Q4_K_M", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=sized(5, 1), metavar="N", help="default: %(default)s"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file for the JSON")
    options = parser.parse_args()
    build = usable_llama_cpp(options.llama_cpp)
    mixture = options.mixture if build is not None else "Q8_0"
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-gguf-") as folder:
        scratch = Path(folder)
        tell(f"writing the file as {mixture}")
        write_gguf(scratch / "bf16.gguf")
        model = scratch / "model.gguf"
        write_mixture(build, scratch / "bf16.gguf", mixture, model)
        rows = asyncio.run(measure(model, mixture, options.rounds, build, scratch))
    for row in rows:
        print(line(row))
    if options.output:
        figures = [{**asdict(row), "ratio": row.ratio} for row in rows]
        options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
