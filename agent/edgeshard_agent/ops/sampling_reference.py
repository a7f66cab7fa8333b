"""The choice of a token from logits, in numpy: the reference of the native kernel, which also runs
in its place.

A draw is a race: each token arrives after a time exponentially distributed with its probability as
rate, and the first one wins. A token's time depends on no other token's probability, so that a
difference in the last bits of the logits, as another batch or a recomputed prefix makes, changes
the winner only where two arrive at practically the same time. Looking up one number among summed
probabilities would pass such a difference on from token to token.

The times come of numbers that are functions of (seed, position, token), whoever asks and with what
else. Source: Salmon et al., Parallel Random Numbers, SC 2011 (Philox4x64-10). The key is the seed;
the counter's lowest word counts blocks of four tokens from 1, and the next one is the position, so
that the draws of two positions never meet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LikelyTokens = tuple[tuple[int, float], ...]
"""Tokens with their log-probabilities, best first."""

_NUCLEUS_GUESS = 8.0
"""A nucleus is nearly always among the tokens not less likely than the likeliest by a factor of
e^8."""
_BINS_A_NAT = 16
_BINS = 1024


class SamplingOptions(Protocol):
    """How a request's tokens are chosen: the options of that name of a generation, 0 or 1 being
    off."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def counts_answer(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def logprobs(self) -> bool: ...
    @property
    def top_logprobs(self) -> int: ...


class Offsets:
    """Numbers that are added to the logits of some tokens: their biases, less what tokens cost that
    the answer has.

    A token's offset is a function of how often the answer has it, whatever became of the request
    meanwhile.
    """

    def __init__(self, sampling: SamplingOptions, answer: Iterable[int]) -> None:
        self._sampling = sampling
        self._biases = dict(sampling.logit_bias)
        self._counts = Counter(answer if sampling.counts_answer else ())
        self._places: dict[int, int] = {}
        self._tokens = np.empty(0, np.int32)
        self._values = np.empty(0, np.float64)
        for token in self._biases.keys() | self._counts.keys():
            self._set(token)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Each one once."""
        return self._tokens[: len(self._places)]

    @property
    def values(self) -> Floats:
        """The offsets of `tokens`."""
        return self._values[: len(self._places)]

    def note(self, token: int) -> None:
        """The answer has `token` once more."""
        if self._sampling.counts_answer:
            self._counts[token] += 1
            self._set(token)

    def added(self, logits: Floats) -> Floats:
        moved = logits.copy()
        moved[self.tokens] += self.values
        return moved

    def _set(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            # Twice the room each time, so that it seldom moves.
            self._tokens = np.resize(self._tokens, 2 * place + 16)
            self._values = np.resize(self._values, 2 * place + 16)
        count = self._counts[token]
        cost = (
            self._sampling.presence_penalty + self._sampling.frequency_penalty * count
            if count
            else 0.0
        )
        self._tokens[place] = token
        self._values[place] = self._biases.get(token, 0.0) - cost


def uniforms(seed: int, position: int, count: int) -> Floats:
    """[count] numbers in [0, 1), one for each token: about 5 ns each."""
    return np.random.Generator(np.random.Philox(key=seed, counter=position << 64)).random(count)


def arrivals(uniform: Floats) -> Floats:
    """Positive numbers, exponentially distributed with rate 1, from uniform ones."""
    waited: Floats = np.negative(uniform)
    np.log1p(waited, out=waited)
    np.negative(waited, out=waited)
    return np.maximum(waited, np.finfo(np.float64).tiny, out=waited)


def drawn(
    logits: Floats,
    sampling: SamplingOptions,
    seen_flags: Flags | None,
    position: int,
    offsets: Offsets | None = None,
) -> int:
    """The token for `position` from its logits [vocab]; `seen_flags` [vocab] are the tokens that
    the repetition penalty counts. `offsets` are added behind it."""
    if seen_flags is not None:
        logits = penalised(logits, seen_flags, sampling.repetition_penalty)
    if offsets is not None:
        logits = offsets.added(logits)
    tokens, probabilities = candidates(logits, sampling)
    if len(tokens) == 1:
        return int(tokens[0])
    uniform = uniforms(sampling.seed, position, len(logits))[tokens]
    return int(tokens[(probabilities / arrivals(uniform)).argmax()])


def penalised(logits: Floats, seen_flags: Flags, penalty: float) -> Floats:
    """Logits of seen tokens divided by the penalty where positive, multiplied where negative (CTRL,
    section 4.1)."""
    return np.where(seen_flags, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def is_greedy(sampling: SamplingOptions) -> bool:
    """Whether the likeliest token is taken always, of equal ones that of the lowest id."""
    return sampling.temperature == 0 or sampling.top_p == 0


def reach(sampling: SamplingOptions) -> float:
    """The number added to the largest logit for the least logit that `min_p` keeps."""
    return sampling.temperature * math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf


def candidates(logits: Floats, sampling: SamplingOptions) -> tuple[Ids, Floats]:
    """The tokens that may be drawn, in order of id, and their probabilities up to a common factor.

    Temperature first, 0 leaving the likeliest alone, as top-p 0 does; then top-k (ties at the edge:
    all are kept) and min-p; then top-p: the fewest likeliest tokens whose probabilities reach
    top_p, of equal ones those of lower id.
    """
    if is_greedy(sampling):
        return np.array([logits.argmax()]), np.ones(1)
    tokens = np.arange(len(logits), dtype=np.int64)
    # -infinity is what a tiny temperature makes of all but the likeliest
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / sampling.temperature
    least = -math.inf
    if 0 < sampling.top_k < len(logits):
        least = _nth_largest(logits, sampling.top_k)
    if sampling.min_p > 0:
        least = max(least, float(logits.max()) + reach(sampling))
    if least > -math.inf:
        tokens = np.flatnonzero(logits >= least)
        scaled = scaled[tokens]
    probabilities = np.exp(scaled)
    if sampling.top_p < 1:
        nucleus = _nucleus(logits[tokens], scaled, probabilities, sampling.top_p)
        tokens, probabilities = tokens[nucleus], probabilities[nucleus]
    return tokens, probabilities


def _nth_largest(values: Floats, count: int) -> float:
    # Several times as fast as numpy's partition.
    return float(torch.from_numpy(values).topk(count, sorted=False).values.min())


def _nucleus(logits: Floats, scaled: Floats, probabilities: Floats, top_p: float) -> Ids:
    """Indices of the nucleus in their order."""
    goal = top_p * probabilities.sum()
    likely = np.flatnonzero(scaled >= -_NUCLEUS_GUESS)
    if probabilities[likely].sum() >= goal:
        return likely[_cut(logits[likely], scaled[likely], probabilities[likely], goal)]
    return _cut(logits, scaled, probabilities, goal)


def _cut(logits: Floats, scaled: Floats, probabilities: Floats, goal: float) -> Ids:
    """Indices, in their order, of the fewest likeliest that reach the goal.

    Sorting a flat distribution over a large vocabulary would take many milliseconds. So tokens are
    put into bins by likelihood, and only those of the bin in which the goal is reached are sorted.
    """
    bins = np.minimum(scaled * -_BINS_A_NAT, _BINS - 1).astype(np.int64)
    reached = np.bincount(bins, weights=probabilities).cumsum()
    last = min(int(np.searchsorted(reached, goal)), len(reached) - 1)
    edge = np.flatnonzero(bins == last)
    edge = edge[np.argsort(-logits[edge], kind="stable")]
    before = reached[last - 1] if last else 0.0
    count = int(np.searchsorted(before + probabilities[edge].cumsum(), goal)) + 1
    mask = bins < last
    mask[edge[:count]] = True
    return np.flatnonzero(mask)


def logprobs(logits: Floats, sampling: SamplingOptions, token: int) -> tuple[float, LikelyTokens]:
    """The token's log-probability by the model alone, and the `top_logprobs` likeliest, best first,
    then by id."""
    shifted = logits - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    count = min(sampling.top_logprobs, len(logits))
    if count == 0:
        return float(shifted[token]), ()
    tokens = np.flatnonzero(logits >= _nth_largest(logits, count))
    order = np.argsort(-logits[tokens], kind="stable")[:count]
    return float(shifted[token]), tuple((int(best), float(shifted[best])) for best in tokens[order])
