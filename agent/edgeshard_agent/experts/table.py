"""A forecast of the experts that a router will choose, from the choices in the two layers before.

It is EdgeMoE's predictor. There the table's key is the experts of both layers together. With many
experts most keys are never seen. So each expert of either layer has its own entry here, and entries
add up: log-odds that an expert is chosen. `bench/training/expert_learning.py` learns them from
recorded routing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeshard.domain.errors import InvalidArgumentError

Floats = NDArray[np.float32]
Choices = NDArray[np.int16]
"""[tokens, layers, chosen]: the experts that each token's routers chose, in the order of the text."""

Chosen = NDArray[np.int16]
"""[tokens, chosen]: the same of one layer."""

_BASE, _LAST, _EARLIER = "base", "last", "earlier"


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Log-odds that an expert is chosen: `base` [layers, experts], and the addends for each expert
    of the layer before, `last` [layers, experts before, experts], and of the one before that,
    `earlier`.

    Layers count mixtures only. Before the first one come the last two of the token before.
    """

    base: Floats
    last: Floats
    earlier: Floats

    @property
    def layers(self) -> int:
        return len(self.base)

    @property
    def experts(self) -> int:
        return len(self.base[0])

    def forecast(self, layer: int, last: Chosen | None, earlier: Chosen | None) -> Floats:
        """Probability [experts] that some token's router chooses each expert of a layer.

        `last` and `earlier` [tokens, chosen] are the choices of the tokens' routers in the two
        layers before; None if unknown.
        """
        odds = self.base[layer]
        if last is not None:
            odds = odds + self.last[layer, last].sum(1)
        if earlier is not None:
            odds = odds + self.earlier[layer, earlier].sum(1)
        single = probability(np.atleast_2d(odds))
        result: Floats = single[0] if len(single) == 1 else 1.0 - (1.0 - single).prod(0)
        return result

    def part(self, first: int, end: int) -> ExpertTable:
        """The table of some of the layers; choices of other layers are not known there."""
        if (first, end) == (0, self.layers):
            return self
        last, earlier = self.last[first:end].copy(), self.earlier[first:end].copy()
        last[:1] = 0.0
        earlier[:2] = 0.0
        return ExpertTable(self.base[first:end], last, earlier)

    @classmethod
    def even(cls, layers: int, experts: int) -> ExpertTable:
        """One that knows nothing: every expert is as likely as another."""
        square = np.zeros((layers, experts, experts), np.float32)
        return cls(np.full((layers, experts), -np.log(max(1, experts - 1)), np.float32), square, square)

    def values(self) -> dict[str, list[Any]]:
        """The table in the form stored next to the model, in hundredths."""
        parts = {_BASE: self.base, _LAST: self.last, _EARLIER: self.earlier}
        return {name: np.rint(100 * part).astype(int).tolist() for name, part in parts.items()}

    @classmethod
    def of_values(cls, values: Mapping[str, list[Any]], layers: int, experts: int) -> ExpertTable:
        """Raises InvalidArgumentError if they do not fit a model with this number of mixtures and experts."""
        shapes = {_BASE: (layers, experts), _LAST: (layers, experts, experts), _EARLIER: (layers, experts, experts)}
        parts: list[Floats] = []
        for name, shape in shapes.items():
            try:
                with np.errstate(over="ignore"):  # an infinity is refused below
                    part = np.array(values[name], dtype=np.float32) / np.float32(100)
            except (KeyError, TypeError, ValueError, OverflowError):
                part = np.zeros(0, dtype=np.float32)
            if part.shape != shape or not np.isfinite(part).all():
                raise InvalidArgumentError(f"expert table: {name} must be finite numbers of shape {shape}", field=name)
            parts.append(part)
        return cls(*parts)


def probability(odds: Floats) -> Floats:
    """Probabilities of log-odds."""
    result: Floats = (1.0 / (1.0 + np.exp(-np.clip(odds, -30.0, 30.0)))).astype(np.float32)
    return result
