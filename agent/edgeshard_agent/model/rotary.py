"""The frequencies of rotary embeddings, for our own blocks:
docs/papers/agent.md#rotary-frequencies.

A pair of dimensions i of `dims` turns by theta^(-2i/dims) radians from one position to the next.
Methods that extend the context beyond the one of the first training make the slow ones slower.

Powers and logarithms are computed in decimal, which rounds them correctly, and everything else by
single IEEE operations. So the bits are the same on every machine. A C library's `pow` and `log` do
not guarantee that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from functools import cache

import torch
from torch import nn

from edgeshard.architectures.rope import Rotation


class RotaryFrequencies(nn.Module):
    """The frequencies [dims / 2] in float32, the factor of cosines and sines, and the factors of
    queries, by layer type."""

    def __init__(self, rotations: Mapping[str, Rotation]) -> None:
        super().__init__()
        self._scaling: dict[str, float] = {}
        self._rotations = dict(rotations)
        for kind, rotation in rotations.items():
            frequencies, self._scaling[kind] = rotary_frequencies(rotation)
            self.register_buffer(_buffer(kind), frequencies, persistent=False)

    def of(self, kind: str) -> tuple[torch.Tensor, float]:
        """The frequencies and the factor of layers of this type; "" if all layers have the same."""
        return self.get_buffer(_buffer(kind)), self._scaling[kind]

    def query_factors(self, positions: torch.Tensor, kind: str) -> torch.Tensor | None:
        """The factors of queries at `positions` [T], [T] in float64; None if all of them are 1.

        On a CPU the logarithms come from a table of `_log`. Elsewhere they are torch's, in float64.
        """
        rotation = self._rotations[kind]
        if not rotation.growth:
            return None
        trained = rotation.options["original_max_position_embeddings"]
        on_cpu = is_on_cpu(positions)
        if on_cpu and int(positions.max()) < trained:  # elsewhere a step reads nothing back
            return None
        passed = torch.div(positions, trained, rounding_mode="floor").long()
        if on_cpu:
            table = [_log(1.0 + count) for count in range(int(passed.max()) + 1)]
            logarithms = torch.tensor(table, dtype=torch.float64)[passed]
        else:
            logarithms = torch.log1p(passed.double())
        return 1.0 + rotation.growth * logarithms


def is_on_cpu(positions: torch.Tensor) -> bool:
    """Whether a step may read `positions` back without a wait."""
    return positions.is_cpu


def _buffer(kind: str) -> str:
    return f"{kind}_inv_freq" if kind else "inv_freq"


def rotary_frequencies(rotation: Rotation) -> tuple[torch.Tensor, float]:
    """The frequencies [dims / 2] in float32, and the factor of cosines and sines."""
    steps = torch.arange(0, rotation.dims, 2, dtype=torch.float32) / rotation.dims
    periods = torch.tensor(
        [_power(rotation.theta, step) for step in steps.tolist()], dtype=torch.float32
    )
    return _BY_KIND[rotation.kind](rotation, periods)


_DIGITS = Context(prec=40)


@cache
def _log(value: float) -> float:
    """The natural logarithm, correctly rounded."""
    return float(Decimal(value).ln(_DIGITS))


def _power(base: float, exponent: float) -> float:
    """base^exponent, correctly rounded."""
    logarithm = Decimal(base).ln(_DIGITS)
    return float(_DIGITS.multiply(Decimal(exponent), logarithm).exp(_DIGITS))


def _default(rotation: Rotation, periods: torch.Tensor) -> tuple[torch.Tensor, float]:
    return 1.0 / periods, 1.0


def _linear(rotation: Rotation, periods: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Every position counts for a `factor`-th of one."""
    return 1.0 / periods / rotation.options["factor"], 1.0


def _proportional(rotation: Rotation, periods: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The first pairs of a head turn by their share of the whole head; the later pairs do not
    turn."""
    turning = int(rotation.options["partial_rotary_factor"] * rotation.dims // 2)
    frequencies = 1.0 / periods / rotation.options.get("factor", 1.0)
    frequencies[turning:] = 0.0
    return frequencies, 1.0


def _llama3(rotation: Rotation, periods: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Waves that went round often within the first context stay, the rare ones are stretched, those
    between blend."""
    options = rotation.options
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    frequencies = 1.0 / periods
    rounds = options["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept_share = ((rounds - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept_share + (1.0 - kept_share) / options["factor"]), 1.0


def _longrope(rotation: Rotation, periods: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Every pair of dimensions is slower by a factor of its own; a factor for all sharpens the
    scores."""
    options = rotation.options
    factors = torch.tensor(options["factors"], dtype=torch.float32)
    return 1.0 / (factors * periods), _longrope_scaling(options)


def _longrope_scaling(options: Mapping[str, float]) -> float:
    attention_factor = options.get("attention_factor")
    if attention_factor is not None:
        return attention_factor
    factor, trained = options["factor"], options["original_max_position_embeddings"]
    return 1.0 if factor <= 1 else math.sqrt(1.0 + _log(factor) / _log(trained))


def _yarn(rotation: Rotation, periods: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Frequencies as of `_llama3`, with a ramp over the dimensions instead of the rounds, and a
    factor that sharpens the scores."""
    options, dims = rotation.options, rotation.dims
    factor, trained = options["factor"], options["original_max_position_embeddings"]

    def dimension(rounds: float) -> float:
        """The dimension whose wave makes `rounds` turns within the first context."""
        return dims * _log(trained / (rounds * 2 * math.pi)) / (2 * _log(rotation.theta))

    first = dimension(options.get("beta_fast") or 32)
    last = dimension(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    # A ramp of no length would divide by zero.
    length = (last - first) or 0.001
    stretched = ((torch.arange(dims // 2, dtype=torch.float32) - first) / length).clamp(0.0, 1.0)
    frequencies = (1.0 - stretched) / periods + stretched / (factor * periods)
    return frequencies, _yarn_scaling(options, factor)


def _yarn_scaling(options: Mapping[str, float], factor: float) -> float:
    attention_factor = options.get("attention_factor")
    if attention_factor is not None:
        return attention_factor

    def scale(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * _log(factor) + 1.0

    over, under = options.get("mscale"), options.get("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)


_BY_KIND: dict[str, Callable[[Rotation, torch.Tensor], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
"""Those of `edgeshard.architectures.rope`."""
