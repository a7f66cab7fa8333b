"""Which request samples how, and the tokens of a step. How a token is chosen is in `edgeshard_agent.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.generation import Sampling, TokenLogprob
from edgeshard.domain.step import SampledToken
from edgeshard_agent.ops import RequestSampler, require_finite, sample_rows


class Sampler:
    """The samplers of the last stage's requests."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._requests: dict[int, RequestSampler] = {}

    def __contains__(self, request: int) -> bool:
        return request in self._requests

    def check(self, sampling: Sampling, seen_tokens: Sequence[int]) -> None:
        """Raise InvalidArgumentError for parameters out of range or a seen token that is not in the vocabulary."""
        sampling.validate()
        if seen_tokens and not (min(seen_tokens) >= 0 and max(seen_tokens) < self._vocab_size):
            raise InvalidArgumentError(
                f"seen_tokens holds an id outside the vocabulary of {self._vocab_size}", field="seen_tokens"
            )

    def open(self, request: int, sampling: Sampling, seen_tokens: Sequence[int]) -> None:
        self._requests[request] = RequestSampler(sampling, seen_tokens, self._vocab_size)

    def close(self, request: int) -> None:
        self._requests.pop(request, None)

    def top_logprobs(self, request: int) -> int:
        """How many of the likeliest tokens a request asked for."""
        return self._requests[request].sampling.top_logprobs

    def sample(self, logits: torch.Tensor, wanted: Sequence[tuple[int, int]]) -> tuple[SampledToken, ...]:
        """A token for each (request, position), from its row of `logits` [R, vocab].

        Raises InternalError when a row has no finite largest value: the model's arithmetic broke.
        """
        samplers = [self._requests[request] for request, _ in wanted]
        if not logits.is_cpu and all(sampler.is_plain_greedy for sampler in samplers):
            require_finite(logits)
            tokens = logits.argmax(dim=-1).tolist()
            return tuple(SampledToken(*place, token) for place, token in zip(wanted, tokens, strict=True))
        chosen = sample_rows(logits.cpu(), samplers, [position for _, position in wanted])
        for sampler, row in zip(samplers, chosen, strict=True):
            sampler.note(row.token)
        return tuple(
            SampledToken(*place, row.token, row.logprob, tuple(TokenLogprob(*entry) for entry in row.top))
            for place, row in zip(wanted, chosen, strict=True)
        )
