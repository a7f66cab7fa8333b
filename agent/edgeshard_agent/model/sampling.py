"""Choosing the next token from logits.

The draw for position p of a request is a function of (seed, p) alone: Philox keyed by the seed, its counter set by the
position. Nothing is remembered between draws, so a replay on another box, or beside other requests, draws the same.

The draw is a race: each token arrives after a time exponentially distributed with its probability as rate, and the
first one wins. A token's time depends on no other token's probability, so that a difference in the last bits of the
logits, as another batch or a recomputed prefix makes, changes the winner only where two arrive at practically the same
time. Looking up one number among summed probabilities would pass such a difference on from token to token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from edgeshard.errors import InternalError, InvalidArgumentError
from edgeshard.generation import Sampling, TokenLogprob
from edgeshard.step import SampledToken

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_NUCLEUS_GUESS = 1024


def arrivals(seed: int, position: int, count: int) -> Floats:
    """`count` positive numbers, exponentially distributed with rate 1; the i-th is a function of (seed, position, i).

    Source: Salmon et al., Parallel Random Numbers, SC 2011 (Philox).
    """
    # The position fills a high word of the counter, so the draws of two positions never meet.
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=position << 64)).random(count)
    waited: Floats = -np.log1p(-uniform)
    return np.maximum(waited, np.finfo(np.float64).tiny)


class RequestSampler:
    """One request's sampling parameters, and which tokens a repetition penalty counts as seen."""

    def __init__(self, sampling: Sampling, seen_tokens: Iterable[int], vocab_size: int) -> None:
        self.sampling = sampling
        self._seen: npt.NDArray[np.bool_] | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen = np.zeros(vocab_size, dtype=np.bool_)
            self._seen[np.fromiter(seen_tokens, dtype=np.int64)] = True

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the largest logit and nothing else is asked."""
        sampling = self.sampling
        return sampling.temperature == 0 and self._seen is None and not self.wants_logprobs

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.logprobs or self.sampling.top_logprobs > 0

    def note(self, token: int) -> None:
        """Count `token` as seen from now on."""
        if self._seen is not None:
            self._seen[token] = True

    def choose(self, logits: Floats, position: int) -> int:
        """The token for `position` from its logits [vocab]."""
        if self._seen is not None:
            logits = penalised(logits, self._seen, self.sampling.repetition_penalty)
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        tokens, probabilities = candidates(logits, self.sampling)
        times = arrivals(self.sampling.seed, position, len(logits))[tokens]
        return int(tokens[(probabilities / times).argmax()])


def penalised(logits: Floats, seen: npt.NDArray[np.bool_], penalty: float) -> Floats:
    """Logits of seen tokens divided by the penalty where positive, multiplied where negative (CTRL, section 4.1)."""
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def candidates(logits: Floats, sampling: Sampling) -> tuple[Ids, Floats]:
    """The tokens that may be drawn, and their probabilities up to a common factor.

    Temperature first, then top-k (ties at the edge: all are kept), then top-p: the fewest likeliest tokens whose
    probabilities reach top_p. Without top-p the tokens are in order of id, with it the likeliest is first.
    """
    scaled = (logits - logits.max()) / sampling.temperature
    tokens = np.arange(len(scaled), dtype=np.int64)
    if 0 < sampling.top_k < len(scaled):
        edge = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
        tokens = np.flatnonzero(scaled >= edge)
        scaled = scaled[tokens]
    probabilities = np.exp(scaled)
    if sampling.top_p < 1:
        order = _nucleus(probabilities, sampling.top_p)
        tokens, probabilities = tokens[order], probabilities[order]
    return tokens, probabilities


def _nucleus(probabilities: Floats, top_p: float) -> Ids:
    """Indices of the nucleus, likeliest first; equal ones in order of index."""
    goal = top_p * probabilities.sum()
    # Sorting a whole vocabulary takes milliseconds; the nucleus is nearly always among the likeliest few.
    if len(probabilities) > _NUCLEUS_GUESS:
        edge = np.partition(probabilities, -_NUCLEUS_GUESS)[-_NUCLEUS_GUESS]
        few = np.flatnonzero(probabilities >= edge)
        if probabilities[few].sum() >= goal:
            return few[_cut(probabilities[few], goal)]
    return _cut(probabilities, goal)


def _cut(probabilities: Floats, goal: float) -> Ids:
    order = np.argsort(-probabilities, kind="stable")
    reached = np.searchsorted(probabilities[order].cumsum(), goal, side="left")
    return order[: int(reached) + 1]


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def top_logprobs(logprobs: Floats, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` likeliest tokens, best first, equal ones in order of id."""
    if count == 0:
        return ()
    edge = np.partition(logprobs, -count)[-count] if count < len(logprobs) else -np.inf
    tokens = np.flatnonzero(logprobs >= edge)
    order = np.argsort(-logprobs[tokens], kind="stable")[:count]
    return tuple(TokenLogprob(int(token), float(logprobs[token])) for token in tokens[order])


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

    def sample(self, logits: torch.Tensor, wanted: Sequence[tuple[int, int]]) -> tuple[SampledToken, ...]:
        """A token for each (request, position), from its row of `logits` [R, vocab].

        Raises InternalError when a row has no finite largest value: the model's arithmetic broke.
        """
        largest, greedy = logits.max(dim=-1)
        if not bool(torch.isfinite(largest).all()):
            raise InternalError("the model's logits are not finite; try another dtype", reason="LOGITS_NOT_FINITE")
        tokens = [SampledToken(*each, best) for each, best in zip(wanted, greedy.tolist(), strict=True)]
        drawn = [row for row, (request, _) in enumerate(wanted) if not self._requests[request].is_plain_greedy]
        if drawn:
            # All at once from the device and into float64; the plain greedy rows stay where they are.
            rows = logits[drawn].to("cpu", torch.float32).numpy().astype(np.float64)
            for row, values in zip(drawn, rows, strict=True):
                request, position = wanted[row]
                tokens[row] = _sampled(self._requests[request], values, request, position)
        return tuple(tokens)


def _sampled(sampler: RequestSampler, values: Floats, request: int, position: int) -> SampledToken:
    token = sampler.choose(values, position)
    sampler.note(token)
    if not sampler.wants_logprobs:
        return SampledToken(request, position, token)
    logprobs = log_softmax(values)
    return SampledToken(
        request, position, token, float(logprobs[token]), top_logprobs(logprobs, sampler.sampling.top_logprobs)
    )
