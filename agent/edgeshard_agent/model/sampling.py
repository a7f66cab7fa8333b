"""Which request samples how, and the tokens of a step. How a token is chosen is in `edgeshard_agent.ops`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.generation import Guide, Sampling, TokenLogprob
from edgeshard.domain.step import GuideFailure, SampledToken
from edgeshard_agent.guides.guides import Guided, GuideError, Guides
from edgeshard_agent.ops import LikelyTokens, RequestSampler, require_finite, sample_rows

Wanted = tuple[int, int]
"""A request and the position that a token is for."""


class Sampler:
    """The samplers of the last stage's requests, and the matchers of those with a guide."""

    def __init__(self, vocab_size: int, guides: Guides | None = None) -> None:
        self._vocab_size = vocab_size
        self._guides = guides
        self._requests: dict[int, RequestSampler] = {}
        self._guided: dict[int, Guided | None] = {}
        """None where the model has no tokenizer."""

    def __contains__(self, request: int) -> bool:
        return request in self._requests

    def check(self, sampling: Sampling, seen_tokens: Sequence[int], answer: Sequence[int] = ()) -> None:
        """Raise InvalidArgumentError for parameters out of range or a token that is not in the vocabulary."""
        sampling.validate()
        biased = [token for token, _ in sampling.logit_bias]
        for name, tokens in (("seen_tokens", seen_tokens), ("answer_tokens", answer), ("logit_bias", biased)):
            if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
                raise InvalidArgumentError(
                    f"{name} holds an id outside the vocabulary of {self._vocab_size}", field=name
                )

    def open(self, request: int, sampling: Sampling, seen_tokens: Sequence[int], answer: Sequence[int] = ()) -> None:
        """`seen_tokens` are those that a repetition penalty counts; `answer` is the request's answer so far, as far as
        other penalties or a guide go by it."""
        self._requests[request] = RequestSampler(sampling, seen_tokens, self._vocab_size, answer)

    def open_guide(self, request: int, guide: Guide, answer: Sequence[int]) -> None:
        """The request's answer has these tokens, and goes on as its guide allows."""
        self._guided[request] = None if self._guides is None else self._guides.open(guide, answer)

    def close(self, request: int) -> None:
        self._requests.pop(request, None)
        guided = self._guided.pop(request, None)
        if guided is not None:
            guided.close()

    def close_all(self) -> None:
        """Forget every request."""
        for request in list(self._requests):
            self.close(request)

    def retire(self) -> None:
        """Nothing is sampled any more."""
        self.close_all()
        if self._guides is not None:
            self._guides.close()

    def top_logprobs(self, request: int) -> int:
        """How many of the likeliest tokens a request asked for."""
        return self._requests[request].sampling.top_logprobs

    def guided(
        self, logits: torch.Tensor, wanted: Sequence[Wanted]
    ) -> tuple[torch.Tensor, Sequence[Wanted], tuple[GuideFailure, ...]]:
        """Take the tokens that guides ban from their requests' rows of `logits` [R, vocab], and leave out the requests
        whose guides have no token. Raises InternalError as `sample` does."""
        if not any(request in self._guided for request, _ in wanted):
            return logits, wanted, ()
        require_finite(logits)  # before tokens are taken away: a row without any is then the guide's fault
        failures = tuple(self._guide(logits, wanted))
        if failures:
            failed = {failure.request for failure in failures}
            rows = [row for row, (request, _) in enumerate(wanted) if request not in failed]
            logits, wanted = logits[rows], [wanted[row] for row in rows]
        return logits, wanted, failures

    def _guide(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> Iterator[GuideFailure]:
        """Take from each row the tokens that its request's guide bans."""
        for row, (request, _) in zip(logits, wanted, strict=True):
            if request not in self._guided:
                continue
            guided = self._guided[request]
            if guided is None:
                yield GuideFailure(request, "the model was added without a tokenizer.json")
                continue
            try:
                banned = torch.from_numpy(guided.banned())
            except GuideError as error:
                yield GuideFailure(request, str(error))
                continue
            row.masked_fill_(banned.to(row.device), -math.inf)
            if not bool(torch.isfinite(row.amax())):
                yield GuideFailure(request, "the model gives no token that may follow any probability")

    def sample(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> tuple[SampledToken, ...]:
        """A token for each (request, position), from its row of `logits` [R, vocab].

        Raises InternalError when a row has no finite largest value: the model's arithmetic broke.
        """
        tokens = self._choose(logits, wanted)
        for token in tokens if self._guided else ():
            guided = self._guided.get(token.request)
            if guided is not None:
                guided.advance(token.token)
        return tokens

    def _choose(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> tuple[SampledToken, ...]:
        samplers = [self._requests[request] for request, _ in wanted]
        if not logits.is_cpu and all(sampler.is_plain_greedy for sampler in samplers):
            require_finite(logits)
            tokens = logits.argmax(dim=-1).tolist()
            return tuple(SampledToken(*place, token) for place, token in zip(wanted, tokens, strict=True))
        chosen = sample_rows(logits.cpu(), samplers, [position for _, position in wanted])
        for sampler, row in zip(samplers, chosen, strict=True):
            sampler.note(row.token)
        return tuple(
            SampledToken(*place, row.token, row.logprob, _allowed(row.top))
            for place, row in zip(wanted, chosen, strict=True)
        )


def _allowed(top: LikelyTokens) -> tuple[TokenLogprob, ...]:
    """Without those that a guide bans."""
    return tuple(TokenLogprob(token, logprob) for token, logprob in top if logprob > -math.inf)
