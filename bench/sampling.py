"""What sampling takes of a step, by vocabulary, kind of text, dtype and parameters; and that it draws what it should.

"peaked" rows have logits falling with the logarithm of a token's rank, as a trained model's do; "flat" ones are normal
with deviation 2, where a nucleus is a fifth of the vocabulary. The native kernel and the reference in numpy take turns,
step by step. Times are for each row of a step of 16: median and shortest wall time, and the median processor time
(of all threads), which a busy machine changes least.

    python -m bench.sampling [--steps 40] [--vocabularies 151936]    JSON rows on stdout
    python -m bench.sampling --compare 1000000    draw so many tokens both ways, and count those that differ
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from edgeshard_agent.model.sampling import Sampler
from edgeshard_agent.ops import native, sampling_reference
from edgeshard_agent.ops.sampling import RequestSampler, sample_rows

from edgeshard.domain.requests.generation import Sampling

ROWS = 16
VOCABULARIES = (16_000, 151_936)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARAMETERS = {
    "greedy": Sampling(),
    "greedy, logprobs 20": Sampling(logprobs=True, top_logprobs=20),
    "greedy, penalty 1.2": Sampling(repetition_penalty=1.2),
    "greedy, frequency penalty 0.5": Sampling(frequency_penalty=0.5),
    "temperature 0.8": Sampling(temperature=0.8),
    "temperature 0.8, logprobs 20": Sampling(temperature=0.8, logprobs=True, top_logprobs=20),
    "temperature 0.8, penalty 1.2": Sampling(temperature=0.8, repetition_penalty=1.2),
    "temperature 0.8, frequency penalty 0.5": Sampling(temperature=0.8, frequency_penalty=0.5),
    "min_p 0.05": Sampling(temperature=0.8, min_p=0.05),
    "top_k 50": Sampling(temperature=0.8, top_k=50),
    "top_p 0.95": Sampling(temperature=0.8, top_p=0.95),
    "top_p 0.5": Sampling(temperature=0.8, top_p=0.5),
    "top_k 50, top_p 0.95": Sampling(temperature=0.8, top_k=50, top_p=0.95),
}
SEEN_EVERY = 300
"""Of the vocabulary so many tokens count as seen: some hundreds, as in a conversation."""
STEPS_A_REFERENCE = 4
"""The reference, which takes many times as long, has a turn after so many steps."""
COMPARED = ((1000, 0.7), (4096, 0.25), (16_000, 0.045), (151_936, 0.005))
"""Vocabularies, and the share of the draws compared that each has: the reference takes milliseconds for a large one."""


def made_logits(vocab_size: int, peaked: bool, seed: int = 0) -> torch.Tensor:
    """[ROWS, vocab_size], the same each time."""
    chance = np.random.default_rng(seed)
    if not peaked:
        return torch.from_numpy(2 * chance.standard_normal((ROWS, vocab_size), dtype=np.float32))
    by_rank = -2.2 * np.log(np.arange(1, vocab_size + 1))
    rows = [chance.permutation(by_rank + 0.5 * chance.standard_normal(vocab_size)) for _ in range(ROWS)]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


class Turns:
    """Steps of one batch, sampled by the native kernel and by the reference."""

    def __init__(self, logits: torch.Tensor, sampling: Sampling) -> None:
        self._logits = logits
        self._sampler = Sampler(logits.shape[1])
        for request in range(ROWS):
            seen = range(0, logits.shape[1], SEEN_EVERY)
            self._sampler.open(request, replace(sampling, seed=request), seen, seen)
        self._position = 0

    def step_s(self, is_native: bool) -> tuple[float, float]:
        """Wall time and processor time of the next step."""
        os.environ[native.SWITCH] = "1" if is_native else "0"
        self._position += 1
        wall, processor = time.perf_counter(), time.process_time()
        self._sampler.draw(self._logits, [(request, self._position) for request in range(ROWS)])
        return time.perf_counter() - wall, time.process_time() - processor


def measured(logits: torch.Tensor, sampling: Sampling, steps: int) -> dict[str, float]:
    """Milliseconds a row."""
    turns = Turns(logits, sampling)
    mine: list[tuple[float, float]] = []
    reference: list[tuple[float, float]] = []
    for step in range(steps + 1):
        mine.append(turns.step_s(is_native=True))
        if step % STEPS_A_REFERENCE == 0:
            reference.append(turns.step_s(is_native=False))
    del mine[0], reference[0]  # first calls make buffers
    figures: dict[str, float] = {}
    for name, times in (("native", mine), ("reference", reference)):
        wall, processor = zip(*times, strict=True)
        figures[f"{name}_ms"] = statistics.median(wall)
        figures[f"{name}_least_ms"] = min(wall)
        figures[f"{name}_processor_ms"] = statistics.median(processor)
    return {name: round(1e3 * taken / ROWS, 4) for name, taken in figures.items()}


def some_sampling(chance: np.random.Generator, vocab_size: int) -> Sampling:
    """Parameters of all kinds, penalties, a bias and logprobs sometimes."""
    return Sampling(
        temperature=float(chance.choice([0.1, 0.5, 0.8, 1.0, 1.5])),
        top_k=int(chance.choice([0, 0, 1, 20, 50, 500])),
        top_p=float(chance.choice([1, 1, 0.1, 0.5, 0.9, 0.95, 0.99])),
        min_p=float(chance.choice([0, 0, 0.02, 0.2])),
        repetition_penalty=float(chance.choice([1, 1, 0.8, 1.2])),
        presence_penalty=float(chance.choice([0, 0, 0.7])),
        frequency_penalty=float(chance.choice([0, 0, -0.3, 0.6])),
        logit_bias=((int(chance.integers(vocab_size)), float(chance.choice([-100, 2, 8]))),) * int(chance.integers(2)),
        seed=int(chance.integers(0, 2**64, dtype=np.uint64)),
        top_logprobs=int(chance.choice([0, 0, 0, 5])),
    )


def compared(vocab_size: int, count: int, seed: int) -> dict[str, object]:
    """Draws of which the native kernel and the reference give other tokens, and how far their logprobs are apart."""
    chance = np.random.default_rng(seed)
    differing, done, apart = 0, 0, 0.0
    while done < count:
        logits = made_logits(vocab_size, bool(chance.integers(2)), int(chance.integers(2**32)))
        logits = logits.to(DTYPES[str(chance.choice(list(DTYPES)))])
        seen = chance.integers(0, vocab_size, 50).tolist()
        samplers = [RequestSampler(some_sampling(chance, vocab_size), seen, vocab_size, seen) for _ in range(ROWS)]
        positions = chance.integers(0, 2**31, ROWS).tolist()
        found = sample_rows(logits, samplers, positions)
        for row, sampler, position, mine in zip(logits.double().numpy(), samplers, positions, found, strict=True):
            token = sampling_reference.drawn(row, sampler.sampling, sampler.seen, position, sampler.offsets)
            differing += mine.token != token
            if sampler.wants_logprobs:
                logprob, top = sampling_reference.logprobs(row, sampler.sampling, mine.token)
                differing += [best for best, _ in mine.top] != [best for best, _ in top]
                pairs = zip(mine.top, top, strict=True)
                apart = max(apart, abs(mine.logprob - logprob), *(abs(a - b) for (_, a), (_, b) in pairs))
        done += ROWS
    return {"vocabulary": vocab_size, "draws": done, "differing": differing, "logprobs_apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--compare", type=int, default=0, metavar="DRAWS")
    parser.add_argument("--kernels", choices=native.kernel_names(), help="instead of the best for this CPU")
    options = parser.parse_args()
    if options.kernels:
        native.use_kernels(options.kernels)
    for vocab_size, share in COMPARED if options.compare else ():
        print(json.dumps(compared(vocab_size, round(options.compare * share), vocab_size)), flush=True)
    for vocab_size in () if options.compare else options.vocabularies:
        for peaked in (True, False):
            for dtype in DTYPES:
                logits = made_logits(vocab_size, peaked).to(DTYPES[dtype])
                row = {"vocabulary": vocab_size, "logits": "peaked" if peaked else "flat", "dtype": dtype}
                for name, sampling in PARAMETERS.items():
                    for threads in options.threads:
                        torch.set_num_threads(threads)
                        figures = measured(logits, sampling, options.steps)
                        print(json.dumps({**row, "threads": threads, "sampling": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
