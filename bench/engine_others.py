"""The engines for comparison: `transformers.generate` and, if there is a build, llama.cpp's RPC
backend."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.engine_cases import DECODING, PROMPTS, Plan
from bench.engine_rows import LLAMA_CPP, TRANSFORMERS, Rows
from bench.engine_site import NODES
from bench.engine_streams import Arrival, Sample, Stream, sample_of
from bench.engine_worker import Worker
from bench.llama_cpp import LlamaCppRpc, is_build, write_gguf


def transformers_sample(
    worker: Worker, streams: int, prompt_tokens: int, new_tokens: int
) -> Sample:
    worker.ask({"streams": 1, "prompt_tokens": 16, "new_tokens": 2})  # warms up
    answer = worker.ask(
        {"streams": streams, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    )
    arrivals = tuple(Arrival(at) for at in answer["arrivals_s"])
    return sample_of([Stream(answer["began_s"], arrivals)] * streams)


class Others:
    """The engines for comparison, each running while the `with` lasts."""

    def __init__(self, transformers: Worker, llama_cpp: LlamaCppRpc | None) -> None:
        self._transformers, self._llama_cpp = transformers, llama_cpp

    async def measure(self, plan: Plan, rows: Rows) -> None:
        tokens = plan.prompt_tokens, plan.new_tokens
        for streams in plan.transformers_streams:
            sample = await asyncio.to_thread(
                transformers_sample, self._transformers, streams, *tokens
            )
            rows.add_other(TRANSFORMERS, streams, plan.prompt_tokens, sample)
            tell(f"transformers x{streams}: {sample.tokens_per_s:.1f} tok/s")
        if self._llama_cpp is None:
            return
        await self._measure_llama_cpp(*tokens, plan.streams, rows, DECODING)

    async def measure_long(self, prompt_tokens: int, new_tokens: int, rows: Rows) -> None:
        """One stream after a long prompt."""
        if self._llama_cpp is not None:
            await self._measure_llama_cpp(prompt_tokens, new_tokens, (1,), rows, PROMPTS)

    async def _measure_llama_cpp(
        self, prompt_tokens: int, new_tokens: int, streams: Sequence[int], rows: Rows, section: str
    ) -> None:
        assert self._llama_cpp is not None
        for rate in await asyncio.to_thread(
            self._llama_cpp.rates, prompt_tokens, new_tokens, streams
        ):
            each_s = rate.streams / rate.tokens_per_s
            sample = Sample(rate.tokens_per_s, each_s, rate.prompt_s)
            rows.add_other(LLAMA_CPP, rate.streams, prompt_tokens, sample, section)
            tell(f"llama.cpp-rpc x{rate.streams} p{prompt_tokens}: {rate.tokens_per_s:.1f} tok/s")


@contextmanager
def others(scratch: Path, llama_cpp: Path | None) -> Iterator[Others]:
    with ExitStack() as stack:
        worker = stack.enter_context(Worker(0, "transformers", str(scratch / "model")))
        servers = None
        if llama_cpp is not None:
            write_gguf(scratch / "model.gguf")
            servers = stack.enter_context(
                LlamaCppRpc(llama_cpp, scratch / "model.gguf", range(len(NODES)))
            )
        worker.receive()
        yield Others(worker, servers)


def usable_llama_cpp(folder: Path | None) -> Path | None:
    """None, with the reason on stderr, if rows of llama.cpp have to be left out."""
    if folder is None:
        tell("llama.cpp is left out: give --llama-cpp DIR")
    elif not is_build(folder):
        tell(f"llama.cpp is left out: {folder} has no ggml-rpc-server and llama-batched-bench")
    elif importlib.util.find_spec("gguf") is None:
        tell("llama.cpp is left out: the package gguf, which writes its weights, is not installed")
    else:
        return folder.resolve()
    return None


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
