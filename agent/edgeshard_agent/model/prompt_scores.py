"""Log-probabilities of a prompt's own tokens: a slice of positions at a time, of whose logits little is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from edgeshard.domain.requests.generation import PROMPT_LOGPROBS_POSITIONS, PromptLogprobs, TokenLogprob
from edgeshard.domain.requests.step import Targets
from edgeshard_agent.ops.sampling import require_finite

SLICE_BYTES = 32 << 20
"""Limit of a slice's logits in fp32, which no plan counts: a vocabulary of 150,000 tokens has
slices of 55 positions.
"""
LEAST_POSITIONS = 16

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [R, width] to logits [R, vocab]."""


def slice_positions(vocab_size: int) -> int:
    """The number of positions that are scored at a time."""
    return min(PROMPT_LOGPROBS_POSITIONS, max(LEAST_POSITIONS, SLICE_BYTES // (4 * vocab_size)))


def score(
    head: Head, hidden: torch.Tensor, targets: Targets, top_count: int, vocab_size: int
) -> Iterator[PromptLogprobs]:
    """The targets with the `top_count` likeliest tokens in place of each, in slices.

    `hidden` [len(targets.tokens), width] are the states in front of them. Raises InternalError if a
    row of logits has no finite largest value.
    """
    size = slice_positions(vocab_size)
    for begin in range(0, len(targets.tokens), size):
        tokens = targets.tokens[begin : begin + size]
        logits = head(hidden[begin : begin + size]).float()
        require_finite(logits)
        sums = logits.logsumexp(dim=-1, keepdim=True)
        logprobs = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - sums
        yield PromptLogprobs(
            targets.position + begin, tuple(logprobs.squeeze(1).tolist()), _likeliest(logits, sums, top_count)
        )


def _likeliest(logits: torch.Tensor, sums: torch.Tensor, count: int) -> tuple[tuple[TokenLogprob, ...], ...]:
    if count == 0:
        return ((),) * len(logits)
    values, tokens = logits.topk(min(count, logits.shape[1]), dim=-1)
    rows = zip(tokens.tolist(), (values - sums).tolist(), strict=True)
    return tuple(tuple(map(TokenLogprob, *row)) for row in rows)
