"""What sampling takes of a step: 16 rows drawn on one thread, by vocabulary, kind of text and parameters.

"peaked" rows have logits falling with the logarithm of a token's rank, as a trained model's do; "flat" ones are normal
with deviation 2, where a nucleus is a fifth of the vocabulary. Times are processor time, the median of `--steps` steps.

    python -m bench.sampling [--steps 50]    JSON rows on stdout
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from edgeshard_agent.model.sampling import Sampler

from edgeshard.domain.generation import Sampling

ROWS = 16
VOCABULARIES = (16_000, 151_936)
PARAMETERS = {
    "greedy": Sampling(),
    "top_p 0.95": Sampling(temperature=0.8, top_p=0.95),
    "top_k 50": Sampling(temperature=0.8, top_k=50),
    "temperature 0.8": Sampling(temperature=0.8),
}


def made_logits(vocab_size: int, peaked: bool) -> torch.Tensor:
    """[ROWS, vocab_size], the same each time."""
    chance = np.random.default_rng(0)
    if not peaked:
        return torch.from_numpy(2 * chance.standard_normal((ROWS, vocab_size), dtype=np.float32))
    by_rank = -2.2 * np.log(np.arange(1, vocab_size + 1))
    rows = [chance.permutation(by_rank + 0.5 * chance.standard_normal(vocab_size)) for _ in range(ROWS)]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def step_s(logits: torch.Tensor, sampling: Sampling, steps: int) -> float:
    """Processor time of sampling one step."""
    sampler = Sampler(logits.shape[1])
    for request in range(ROWS):
        sampler.open(request, replace(sampling, seed=request), ())
    times = []
    for position in range(steps):
        before = time.process_time()
        sampler.sample(logits, [(request, position) for request in range(ROWS)])
        times.append(time.process_time() - before)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    for vocab_size in VOCABULARIES:
        for peaked in (True, False):
            logits = made_logits(vocab_size, peaked)
            for name, sampling in PARAMETERS.items():
                row = {"vocabulary": vocab_size, "rows": ROWS, "logits": "peaked" if peaked else "flat"}
                print(json.dumps({**row, "sampling": name, "step_s": round(step_s(logits, sampling, steps), 6)}))


if __name__ == "__main__":
    main()
