"""The steady rate: what a pipeline serves while another request begins whenever one ends. Pure.

C = m b requests run at once. Each sends its prompt in n chunks, n - 1 full ones and the rest, and then has g = G - 1
rounds of decoding. A step that carries a chunk carries decodes too; R0 and B0 are the round and the busiest station of
a step of b decodes alone, R1 and B1 those of a step with a full chunk as well, R2 and B2 with the rest, and
w = max(m, stages) steps are in flight at most. Then, with x1 = max(B1, R1 / w) and x2 = max(B2, R2 / w),

    T  = R1 + (n - 2) x1 + x2, or R2 for n = 1      seconds of a prompt, from its first chunk to its first token
    k  = 1 + (n - 1) / w                            rounds of decoding that go on beside it
    c0 = max(R0, m B0)                              seconds of a round without prompts

With u of the C requests decoding, a request ends every W seconds, in which each of the u goes on by g / u rounds:

    W = T + (g / u - k) c0                  where a prompt comes in only some of the rounds, g / u >= k
    W = T (g / u) / k                       otherwise
    u = C - T / W                           since T / W of them, on average, are at their prompts

No station is busy for longer than the time there is, and chunks follow each other no quicker than they can. With s0, s1
and s2 the seconds that a step takes any one station,

    W >= (n - 1) s1 + s2 + max(0, g / b - n) s0
    W >= (n - 1) x1 + x2

but where every step could carry a chunk, g / b < n, the rest of a prompt goes with the next one: n is then P / room,
the full chunks that it has tokens for, and no rest. The rate is G / W. It rises whenever a time shrinks.
(docs/papers.md#the-steady-rate)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeshard.planning.solvers.instance import Floats


@dataclass(frozen=True, slots=True)
class SteadyTimes:
    """[K] seconds of steps: R0 and B0 of decodes alone, R1 and B1 with a full chunk as well, R2 and B2 with the rest of
    a prompt; `station_s` is what a request asks of the busiest station."""

    round_s: Floats
    busiest_s: Floats
    full_round_s: Floats
    full_busiest_s: Floats
    rest_round_s: Floats
    rest_busiest_s: Floats
    station_s: Floats


@dataclass(frozen=True, slots=True)
class Chunks:
    """[K] n, and the full chunks and rests that a request asks of the pipeline: fewer where rests go with others."""

    count: Floats
    full: Floats
    rest: Floats

    @classmethod
    def of(cls, prompt_tokens: int, room: Floats, rounds: float, batch: int) -> Chunks:
        """Of prompts in steps with `room` tokens for them."""
        count = np.ceil(prompt_tokens / room)
        alone = rounds / batch >= count
        return cls(count, np.where(alone, count - 1, prompt_tokens / room), np.where(alone, 1.0, 0.0))


@dataclass(frozen=True, slots=True)
class Most:
    """[K] the largest n and m of a range of loads: with n, k rises and W falls, and with m, T does."""

    chunks: Floats
    micro_batches: Floats


@dataclass(frozen=True, slots=True)
class Steady:
    """[K] W and T in seconds, and C: `time_per_token_s` is the mean gap between two tokens of a request."""

    between_s: Floats
    prompt_s: Floats
    requests: Floats
    rounds: float

    @property
    def time_per_token_s(self) -> Floats:
        """A request is there for C W, and decodes when its prompt is done."""
        with np.errstate(invalid="ignore"):
            decoding_s = np.maximum(0.0, self.requests * self.between_s - self.prompt_s)
        return np.where(np.isinf(self.between_s), np.inf, decoding_s) / max(1.0, self.rounds)


def steady(
    times: SteadyTimes,
    requests: Floats,
    micro_batches: Floats,
    stages: int,
    chunks: Chunks,
    rounds: float,
    most: Most | None = None,
) -> Steady:
    """The steady state of K cuts of one number of stages: [K] C and m, and g rounds; with `most`, W is a lower bound
    for all loads up to it."""
    window = np.maximum(micro_batches, stages)
    turns = 1.0 + ((chunks.count if most is None else most.chunks) - 1) / window
    if most is not None:
        window = np.maximum(most.micro_batches, stages)
    full_s = np.maximum(times.full_busiest_s, times.full_round_s / window)
    rest_s = np.maximum(times.rest_busiest_s, times.rest_round_s / window)
    several_s = times.full_round_s + np.maximum(0.0, chunks.count - 2) * full_s + rest_s
    prompt_s = np.where(chunks.count > 1, several_s, times.rest_round_s)
    round_s = np.maximum(times.round_s, micro_batches * times.busiest_s)
    between_s = _between_s(requests, rounds, prompt_s, round_s, turns)
    least_s = np.maximum(times.station_s, chunks.full * full_s + chunks.rest * rest_s)
    return Steady(np.maximum(between_s, least_s), prompt_s, requests, rounds)


def _between_s(requests: Floats, rounds: float, prompt_s: Floats, round_s: Floats, beside: Floats) -> Floats:
    """W by T, c0 and k: where prompts come in some of the rounds, u is the root of a quadratic equation."""
    often_s = prompt_s * (rounds / beside + 1) / requests
    if not rounds:
        return often_s
    missing = np.isinf(prompt_s) | np.isinf(round_s)  # without a link there is no rate
    prompt_s, round_s = np.where(missing, 0.0, prompt_s), np.where(missing, 1.0, round_s)
    stall_s, decode_s = prompt_s - beside * round_s, rounds * round_s
    linear = decode_s + prompt_s - stall_s * requests
    root = np.sqrt(np.maximum(0.0, linear**2 + 4 * stall_s * requests * decode_s))
    decoding = 2 * requests * decode_s / (linear + root)
    seldom_s = stall_s + decode_s / decoding
    return np.where(missing, np.inf, np.where(rounds >= beside * decoding, seldom_s, often_s))
