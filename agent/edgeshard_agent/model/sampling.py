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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard.domain.generation import Sampling, TokenLogprob
from edgeshard.domain.step import SampledToken
from edgeshard_agent.model.draws import Floats, Ids, arrivals, every_uniform, some_uniforms

_FEW = 128
"""Up to this fraction of the vocabulary, numbers for the candidates alone cost less than one for every token."""
_NUCLEUS_GUESS = 8.0
"""A nucleus is nearly always among the tokens not less likely than the likeliest by a factor of e^8."""
_BINS_A_NAT = 16
_BINS = 1024


@dataclass(frozen=True, slots=True)
class Draw:
    """A race for one request's position: `tokens`, and their probabilities up to a common factor."""

    seed: int
    position: int
    tokens: Ids
    probabilities: Floats


def winners(draws: Iterable[Draw], vocab_size: int) -> list[int]:
    """The token drawn by each; none depends on another. Each is decided before the next is asked for, if it can be."""
    tokens: list[int] = []
    few: dict[int, Draw] = {}
    for index, draw in enumerate(draws):
        if len(draw.tokens) * _FEW <= vocab_size:
            few[index] = draw
            tokens.append(-1)  # below, with the others that are few
        else:
            tokens.append(_first(draw, every_uniform(draw.seed, draw.position, vocab_size)[draw.tokens]))
    for index, uniform in zip(few, _together(list(few.values())), strict=True):
        tokens[index] = _first(few[index], uniform)
    return tokens


def _together(draws: Sequence[Draw]) -> list[Floats]:
    """The numbers of each one's tokens."""
    if not draws:
        return []
    counts = [len(draw.tokens) for draw in draws]
    seeds = np.array([draw.seed for draw in draws], dtype=np.uint64)
    positions = np.array([draw.position for draw in draws], dtype=np.uint64)
    tokens = np.concatenate([draw.tokens for draw in draws])
    uniform = some_uniforms(np.repeat(seeds, counts), np.repeat(positions, counts), tokens)
    return np.split(uniform, np.cumsum(counts)[:-1])


def _first(draw: Draw, uniform: Floats) -> int:
    return int(draw.tokens[(draw.probabilities / arrivals(uniform)).argmax()])


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

    def draw(self, logits: Floats, position: int) -> Draw:
        """What is to be drawn for `position` from its logits [vocab]."""
        if self._seen is not None:
            logits = penalised(logits, self._seen, self.sampling.repetition_penalty)
        return Draw(self.sampling.seed, position, *candidates(logits, self.sampling))


def penalised(logits: Floats, seen: npt.NDArray[np.bool_], penalty: float) -> Floats:
    """Logits of seen tokens divided by the penalty where positive, multiplied where negative (CTRL, section 4.1)."""
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def candidates(logits: Floats, sampling: Sampling) -> tuple[Ids, Floats]:
    """The tokens that may be drawn, in order of id, and their probabilities up to a common factor.

    Temperature first, 0 leaving the likeliest alone; then top-k (ties at the edge: all are kept); then top-p: the
    fewest likeliest tokens whose probabilities reach top_p, of equal ones those of lower id.
    """
    if sampling.temperature == 0:
        return np.array([logits.argmax()]), np.ones(1)
    scaled = logits - logits.max()
    scaled /= sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        tokens = np.flatnonzero(scaled >= _nth_largest(scaled, sampling.top_k))
        scaled = scaled[tokens]
    else:
        tokens = np.arange(len(scaled), dtype=np.int64)
    probabilities = np.exp(scaled)
    if sampling.top_p < 1:
        kept = _nucleus(scaled, probabilities, sampling.top_p)
        tokens, probabilities = tokens[kept], probabilities[kept]
    return tokens, probabilities


def _nth_largest(values: Floats, count: int) -> float:
    # Several times as fast as numpy's partition.
    return float(torch.from_numpy(values).topk(count, sorted=False).values.min())


def _nucleus(scaled: Floats, probabilities: Floats, top_p: float) -> Ids:
    """Indices of the nucleus in their order."""
    goal = top_p * probabilities.sum()
    likely = np.flatnonzero(scaled >= -_NUCLEUS_GUESS)
    if probabilities[likely].sum() >= goal:
        return likely[_cut(scaled[likely], probabilities[likely], goal)]
    return _cut(scaled, probabilities, goal)


def _cut(scaled: Floats, probabilities: Floats, goal: float) -> Ids:
    """Indices, in their order, of the fewest likeliest that reach the goal.

    Sorting a flat distribution over a large vocabulary would take many milliseconds. So tokens are put into bins by
    likelihood, and only those of the bin in which the goal is reached are sorted.
    """
    bins = np.minimum(scaled * -_BINS_A_NAT, _BINS - 1).astype(np.int64)
    reached = np.bincount(bins, weights=probabilities).cumsum()
    last = min(int(np.searchsorted(reached, goal)), len(reached) - 1)
    edge = np.flatnonzero(bins == last)
    edge = edge[np.argsort(-probabilities[edge], kind="stable")]
    before = reached[last - 1] if last else 0.0
    count = int(np.searchsorted(before + probabilities[edge].cumsum(), goal)) + 1
    kept = bins < last
    kept[edge[:count]] = True
    return np.flatnonzero(kept)


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def top_logprobs(logprobs: Floats, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` likeliest tokens, best first, equal ones in order of id."""
    if count == 0:
        return ()
    edge = _nth_largest(logprobs, count) if count < len(logprobs) else -np.inf
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
        if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
            raise InternalError("the model's logits are not finite; try another dtype", reason="LOGITS_NOT_FINITE")
        greedy: list[int] = []
        drawn: list[int] = []
        for row, (request, _) in enumerate(wanted):
            (greedy if self._requests[request].is_plain_greedy else drawn).append(row)
        tokens: dict[int, SampledToken] = {}
        if greedy:
            best = _rows(logits, greedy).argmax(dim=-1).tolist()
            tokens |= {row: SampledToken(*wanted[row], token) for row, token in zip(greedy, best, strict=True)}
        if drawn:
            rows = _rows(logits, drawn).to("cpu", torch.float32).numpy()
            tokens |= dict(zip(drawn, self._drawn(rows, [wanted[row] for row in drawn]), strict=True))
        return tuple(tokens[row] for row in range(len(wanted)))

    def _drawn(self, rows: npt.NDArray[np.float32], wanted: Sequence[tuple[int, int]]) -> list[SampledToken]:
        samplers = [self._requests[request] for request, _ in wanted]
        # One row in float64 at a time: it stays in the processor's cache from the first operation to the last.
        draws = (
            sampler.draw(row.astype(np.float64), position)
            for sampler, row, (_, position) in zip(samplers, rows, wanted, strict=True)
        )
        sampled = []
        for index, token in enumerate(winners(draws, self._vocab_size)):
            samplers[index].note(token)
            sampled.append(_told(samplers[index], rows[index], *wanted[index], token))
        return sampled


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _told(
    sampler: RequestSampler, row: npt.NDArray[np.float32], request: int, position: int, token: int
) -> SampledToken:
    """The token with the logprobs that its request asked for, from its row of logits [vocab]."""
    if not sampler.wants_logprobs:
        return SampledToken(request, position, token)
    logprobs = log_softmax(row.astype(np.float64))
    best = top_logprobs(logprobs, sampler.sampling.top_logprobs)
    return SampledToken(request, position, token, float(logprobs[token]), best)
