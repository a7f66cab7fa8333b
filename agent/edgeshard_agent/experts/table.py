"""A forecast of the experts that a router will choose, from those that were chosen in the two layers before.

It is EdgeMoE's predictor. There the table's key is the experts of both layers together. With many experts most keys
are never seen, so each expert of either layer has an entry of its own here, and entries add up: log-odds that an expert
is chosen. They are learned from recorded routing by logistic regression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeshard.domain.errors import InvalidArgumentError

Floats = NDArray[np.float32]
Choices = NDArray[np.int16]
"""[tokens, layers, chosen]: the experts that each token's routers chose, in the order of the text."""

Chosen = NDArray[np.int16]
"""[tokens, chosen]: the same of one layer."""

_BASE, _LAST, _EARLIER = "base", "last", "earlier"
_ROUNDS = 40
# As much as two tokens that say the opposite: keeps what was seen a few times from being certain.
_PRIOR = 2.0


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Log-odds that an expert is chosen: `base` [layers, experts], and what is added for each expert of the layer
    before, `last` [layers, experts before, experts], and of the one before that, `earlier`.

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

        `last` and `earlier` [tokens, chosen] are what the tokens' routers chose in the two layers before; None where
        that is not known.
        """
        odds = self.base[layer]
        if last is not None:
            odds = odds + self.last[layer, last].sum(1)
        if earlier is not None:
            odds = odds + self.earlier[layer, earlier].sum(1)
        single = _probability(np.atleast_2d(odds))
        result: Floats = single[0] if len(single) == 1 else 1.0 - (1.0 - single).prod(0)
        return result

    def part(self, first: int, end: int) -> ExpertTable:
        """Of some of the layers, where what other layers chose is not known."""
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

    def tensors(self) -> dict[str, NDArray[np.float16]]:
        """What is kept beside the model."""
        return {
            name: values.astype(np.float16)
            for name, values in ((_BASE, self.base), (_LAST, self.last), (_EARLIER, self.earlier))
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, NDArray[np.float16]], layers: int, experts: int) -> ExpertTable:
        """Raises InvalidArgumentError where they are not those of a model with so many mixtures and experts."""
        wanted = {_BASE: (layers, experts), _LAST: (layers, experts, experts), _EARLIER: (layers, experts, experts)}
        for name, shape in wanted.items():
            found = tensors.get(name)
            if found is None or found.shape != shape or not np.isfinite(found).all():
                raise InvalidArgumentError(f"expert table: {name} must be finite numbers of shape {shape}", field=name)
        return cls(*(tensors[name].astype(np.float32) for name in (_BASE, _LAST, _EARLIER)))


def learn(choices: Choices, experts: int) -> ExpertTable:
    """The table that makes recorded routing likeliest."""
    layers = choices.shape[1]
    hot = np.zeros((*choices.shape[:2], experts), dtype=np.float32)
    np.put_along_axis(hot, choices.astype(np.int64), 1.0, axis=-1)
    before = np.concatenate([np.zeros_like(hot[:1]), hot[:-1]])  # the token before; nothing before the first
    table = ExpertTable(
        np.zeros((layers, experts), np.float32),
        np.zeros((layers, experts, experts), np.float32),
        np.zeros((layers, experts, experts), np.float32),
    )
    for layer in range(layers):
        last, earlier = (
            hot[:, layer - back] if layer >= back else before[:, (layer - back) % layers] for back in (1, 2)
        )
        inputs = np.concatenate([last, earlier, np.ones_like(last[:, :1])], axis=1)
        weights = _regression(inputs, hot[:, layer])
        table.last[layer], table.earlier[layer] = weights[:experts], weights[experts:-1]
        table.base[layer] = weights[-1]
    return table


def _regression(inputs: Floats, outcomes: Floats) -> Floats:
    """Weights [inputs, outcomes] of logistic regressions with one matrix of inputs [samples, inputs].

    A quarter of the inputs' Gram matrix bounds the curvature of them all (Boehning 1992), so one factorisation serves
    every step of every outcome, and each step goes uphill.
    """
    penalty = np.full(inputs.shape[1], _PRIOR, dtype=np.float64)
    penalty[-1] = 1e-3
    curvature = np.linalg.inv(0.25 * (inputs.T @ inputs).astype(np.float64) + np.diag(penalty))
    weights: NDArray[np.float64] = np.zeros((inputs.shape[1], outcomes.shape[1]))
    for _ in range(_ROUNDS):
        uphill = inputs.T @ (outcomes - _probability(inputs @ weights.astype(np.float32)))
        weights += curvature @ (uphill - penalty[:, None] * weights)
    return weights.astype(np.float32)


def _probability(odds: Floats) -> Floats:
    result: Floats = (1.0 / (1.0 + np.exp(-np.clip(odds, -30.0, 30.0)))).astype(np.float32)
    return result
