"""The numbers a draw is decided by: functions of (seed, position, token), whoever asks and with what else.

Source: Salmon et al., Parallel Random Numbers, SC 2011 (Philox4x64-10). The key is the seed; the counter's lowest word
counts blocks of four tokens from 1, and the next one is the position, so that the draws of two positions never meet.
numpy's generator gives the same numbers in a row from the first token on; here they can be had for a few tokens alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_HALF = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)


def every_uniform(seed: int, position: int, count: int) -> Floats:
    """[count] numbers in [0, 1), one for each token: about 5 ns each."""
    return np.random.Generator(np.random.Philox(key=seed, counter=position << 64)).random(count)


def some_uniforms(seeds: Words, positions: Words, tokens: Ids) -> Floats:
    """[N] numbers, the n-th for token n under seed n at position n; all [N].

    150 us and about 0.2 us for each: for few tokens of large vocabularies, and for many requests at once.
    """
    nothing = np.zeros_like(seeds)
    # The counter's words 0 and 2 are multiplied, 1 and 3 are mixed in; the rows of these arrays are such pairs.
    multiplied = np.stack([(tokens.astype(np.uint64) >> np.uint64(2)) + np.uint64(1), nothing])
    mixed_in = np.stack([positions, nothing])
    key = np.stack([seeds, nothing])
    for _ in range(_ROUNDS):
        high, low = _products(_MULTIPLIERS, multiplied)
        multiplied = high[::-1] ^ mixed_in ^ key
        mixed_in = low[::-1]
        key = key + _KEY_STEPS
    words = np.stack([multiplied[0], mixed_in[0], multiplied[1], mixed_in[1]])
    word = words[tokens & 3, np.arange(len(tokens))]
    uniform: Floats = (word >> np.uint64(11)) * 2.0**-53
    return uniform


def arrivals(uniform: Floats) -> Floats:
    """Positive numbers, exponentially distributed with rate 1, from uniform ones."""
    waited: Floats = np.negative(uniform)
    np.log1p(waited, out=waited)
    np.negative(waited, out=waited)
    return np.maximum(waited, np.finfo(np.float64).tiny, out=waited)


def _products(a: Words, b: Words) -> tuple[Words, Words]:
    """The high and the low words of the 128-bit products: numpy multiplies modulo 2^64 only."""
    a_low, a_high = a & _LOW_HALF, a >> _HALF
    b_low, b_high = b & _LOW_HALF, b >> _HALF
    upper = a_high * b_low + (a_low * b_low >> _HALF)
    lower = a_low * b_high + (upper & _LOW_HALF)
    return a_high * b_high + (upper >> _HALF) + (lower >> _HALF), a * b
