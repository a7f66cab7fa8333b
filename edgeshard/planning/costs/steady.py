"""The steady rate: what a pipeline serves while another request begins whenever one ends. Pure.

C = m b requests run at once. Each sends its prompt in n chunks, n - 1 full ones and the rest, and
then has g = G - 1 rounds of decoding. A step that carries a chunk carries decodes too. R0 and B0
are the round and the busiest station of a step with only b decodes. R1 and B1 are those of a step
with a full chunk as well, R2 and B2 with the rest. At most w = max(m, stages) steps are in flight.
Then, with x1 = max(B1, R1 / w) and x2 = max(B2, R2 / w),

    T  = R1 + (n - 2) x1 + x2, or R2 for n = 1     seconds from a prompt's first chunk to its token
    k  = 1 + (n - 1) / w                           rounds of decoding in the meantime
    c0 = max(R0, m B0)                             seconds of a round without prompts
    fj = j (n - 1) s1 + j s2 + max(0, m k - j n) s0
                                                   seconds of a station in rounds with j prompts
    t  = max(T, f1)                                seconds of these rounds, for the busiest station

Here s0, s1 and s2 are the seconds that the steps take any one station. If u of the C requests
decode, a request ends every W seconds, in which each of the u advances by g / u rounds:

    W = t + (g / u - k) c0                  if a prompt comes in only some of the rounds, g / u >= k
    W = t (g / u) / k                       otherwise
    u = C - T / W                           since on average T / W of them process their prompts

There are then u / g prompts of one chunk in a round on average, but a whole number in each. A round
takes what lies on the line between max(T, fj) of the two neighbouring j. No station is busy for
longer than the time there is, and chunks follow each other no quicker than they can:

    W >= (n - 1) s1 + s2 + max(0, g / b - n) s0
    W >= (n - 1) x1 + x2

If every step could carry a chunk, g / b < n, the rest of a prompt goes with the next one. Then n is
P / room, the full chunks that it has tokens for, without a rest. The rate is G / W. It rises
whenever a time shrinks. (docs/papers.md#the-steady-rate)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from edgeshard.planning.solvers.instance import Floats
from edgeshard.planning.solvers.walks import Booleans

MOST_TOGETHER = 8
"""Prompts in a round up to which their whole numbers are examined."""


@dataclass(frozen=True, slots=True)
class SteadyTimes:
    """[K] seconds of steps: R0 and B0 of decodes only, R1 and B1 with a full chunk as well, R2 and
    B2 with the rest of a prompt. `station_s` is a request's time on the busiest station.
    `together_s` [J, K] is f1, f2 and so on of the busiest."""

    round_s: Floats
    busiest_s: Floats
    full_round_s: Floats
    full_busiest_s: Floats
    rest_round_s: Floats
    rest_busiest_s: Floats
    station_s: Floats
    together_s: Floats


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """[K] n, and the full chunks and rests of a request: fewer if rests go with others."""

    count: Floats
    full: Floats
    rest: Floats

    @property
    def single(self) -> Booleans:
        """Whether a prompt is one chunk, with which no other prompt's goes."""
        return np.asarray((self.count == 1) & (self.rest > 0))

    @classmethod
    def of(cls, prompt_tokens: int, room: Floats, rounds: float, batch: int) -> PromptChunks:
        """The chunks of prompts in steps with `room` tokens for them."""
        count = np.ceil(prompt_tokens / room)
        alone = rounds / batch >= count
        return cls(
            count, np.where(alone, count - 1, prompt_tokens / room), np.where(alone, 1.0, 0.0)
        )


@dataclass(frozen=True, slots=True)
class Most:
    """[K] the largest n and m of a range of loads: with n, k rises and W falls, and with m, T
    does."""

    chunks: Floats
    micro_batches: Floats


@dataclass(frozen=True, slots=True)
class Steady:
    """[K] W, T and c0 in seconds, and C: `time_per_token_s` is the mean gap between two tokens of a
    request."""

    between_s: Floats
    prompt_s: Floats
    round_s: Floats
    requests: Floats
    rounds: float

    @property
    def time_per_token_s(self) -> Floats:
        """A request is there for C W, and decodes when its prompt is done; a second token would
        take it a round."""
        if not self.rounds:
            return self.round_s
        with np.errstate(invalid="ignore"):
            decoding_s = np.maximum(0.0, self.requests * self.between_s - self.prompt_s)
        return np.where(np.isinf(self.between_s), np.inf, decoding_s) / self.rounds


def steady(
    times: SteadyTimes,
    requests: Floats,
    micro_batches: Floats,
    stages: int,
    chunks: PromptChunks,
    rounds: float,
    most: Most | None = None,
) -> Steady:
    """The steady state of K cuts of one number of stages: [K] C and m, and g rounds; with `most`, W
    is a lower bound for all loads up to it, without the fj."""
    window = np.maximum(micro_batches, stages)
    turns = 1.0 + ((chunks.count if most is None else most.chunks) - 1) / window
    if most is not None:
        window = np.maximum(most.micro_batches, stages)
    full_s = np.maximum(times.full_busiest_s, times.full_round_s / window)
    rest_s = np.maximum(times.rest_busiest_s, times.rest_round_s / window)
    several_s = times.full_round_s + np.maximum(0.0, chunks.count - 2) * full_s + rest_s
    prompt_s = np.where(chunks.count > 1, several_s, times.rest_round_s)
    with_prompt_s = prompt_s if most is not None else np.maximum(prompt_s, times.together_s[0])
    round_s = np.maximum(times.round_s, micro_batches * times.busiest_s)
    between_s = (with_prompt_s * rounds / turns + prompt_s) / requests
    if rounds:
        if most is None:
            whole_s = _whole_s(np.maximum(prompt_s, times.together_s), requests, rounds, prompt_s)
            between_s = np.where(chunks.single, np.maximum(between_s, whole_s), between_s)
        with np.errstate(invalid="ignore"):  # all of them are infinite if a link is missing
            seldom_s = _period_s(
                with_prompt_s - turns * round_s, rounds * round_s, requests, prompt_s
            )
            between_s = np.where(
                rounds >= turns * (requests - prompt_s / seldom_s), seldom_s, between_s
            )
    least_s = np.maximum(times.station_s, chunks.full * full_s + chunks.rest * rest_s)
    return Steady(np.maximum(between_s, least_s), prompt_s, round_s, requests, rounds)


def _period_s(stall_s: Floats, decode_s: Floats, requests: Floats, prompt_s: Floats) -> Floats:
    """The larger root of C W^2 - (T + C stall + decode) W + stall T = 0.

    It follows from W = stall + decode / u and u = C - T / W.

    It is infinite if a link is missing.
    """
    missing = np.isinf(prompt_s) | np.isinf(decode_s)
    stall_s, decode_s, prompt_s = (
        np.where(missing, 1.0, one) for one in (stall_s, decode_s, prompt_s)
    )
    half = (prompt_s + requests * stall_s + decode_s) / (2 * requests)
    root = np.sqrt(np.maximum(0.0, half**2 - stall_s * prompt_s / requests))
    return np.where(missing, np.inf, half + root)


def _whole_s(together_s: Floats, requests: Floats, rounds: float, prompt_s: Floats) -> Floats:
    """W if rounds have one prompt or more: the largest by the lines between neighbours of max(T,
    fj) [J, K]."""
    whole_s = np.zeros_like(prompt_s)
    for number, (fewer_s, more_s) in enumerate(pairwise(together_s), 1):
        slope_s = more_s - fewer_s
        whole_s = np.maximum(
            whole_s, _period_s(slope_s, rounds * (fewer_s - number * slope_s), requests, prompt_s)
        )
    return whole_s
