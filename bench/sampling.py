"""What sampling takes of a step, by vocabulary, kind of text, dtype and parameters; and that it draws what it should.

"peaked" rows have logits falling with the logarithm of a token's rank, as a trained model's do; "flat" ones are normal
with deviation 2, where a nucleus is a fifth of the vocabulary. The native kernel and the reference in numpy take turns,
step by step. Times are wall time for each row of a step of 16: medians, and the shortest, which a busy machine changes
least.

    python -m bench.sampling [--steps 40] [--threads 1 2]    JSON rows on stdout
    python -m bench.sampling --compare 1000000               draw so many tokens both ways, and count those that differ
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from edgeshard_agent.model.sampling import Sampler
from edgeshard_agent.ops import RequestSampler, draws, native, sample_rows

from edgeshard.domain.generation import Sampling

ROWS = 16
VOCABULARIES = (16_000, 151_936)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARAMETERS = {
    "greedy": Sampling(),
    "greedy, logprobs 20": Sampling(logprobs=True, top_logprobs=20),
    "greedy, penalty 1.2": Sampling(repetition_penalty=1.2),
    "temperature 0.8": Sampling(temperature=0.8),
    "temperature 0.8, logprobs 20": Sampling(temperature=0.8, logprobs=True, top_logprobs=20),
    "temperature 0.8, penalty 1.2": Sampling(temperature=0.8, repetition_penalty=1.2),
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


@contextmanager
def without_kernels(monkeypatched: bool = True) -> Iterator[None]:
    raise NotImplementedError


def main() -> None:
    pass
