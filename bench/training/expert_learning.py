"""Learn the table that forecasts experts from recorded routing."""

from __future__ import annotations

import numpy as np
from edgeshard_agent.experts import Choices, ExpertTable, Floats, probability
from numpy.typing import NDArray

_ROUNDS = 40
# Weight of two opposite tokens: it prevents certainty after a few observations.
_PRIOR = 2.0


def learn(choices: Choices, experts: int) -> ExpertTable:
    """The table that makes recorded routing likeliest."""
    layers = choices.shape[1]
    hot = np.zeros((*choices.shape[:2], experts), dtype=np.float32)
    np.put_along_axis(hot, choices.astype(np.int64), 1.0, axis=-1)
    # the token before; nothing before the first
    before = np.concatenate([np.zeros_like(hot[:1]), hot[:-1]])
    table = ExpertTable(
        np.zeros((layers, experts), np.float32),
        np.zeros((layers, experts, experts), np.float32),
        np.zeros((layers, experts, experts), np.float32),
    )
    for layer in range(layers):
        last, earlier = (
            hot[:, layer - back] if layer >= back else before[:, (layer - back) % layers]
            for back in (1, 2)
        )
        inputs = np.concatenate([last, earlier, np.ones_like(last[:, :1])], axis=1)
        weights = _regression(inputs, hot[:, layer])
        table.last[layer], table.earlier[layer] = weights[:experts], weights[experts:-1]
        table.base[layer] = weights[-1]
    return table


def _regression(inputs: Floats, outcomes: Floats) -> Floats:
    """Weights [inputs, outcomes] of logistic regressions with one matrix of inputs [samples,
    inputs].

    A quarter of the inputs' Gram matrix bounds the curvature of them all (Boehning 1992), so one
    factorisation serves every step of every outcome, and each step goes uphill.
    """
    penalty = np.full(inputs.shape[1], _PRIOR, dtype=np.float64)
    penalty[-1] = 1e-3
    curvature = np.linalg.inv(0.25 * (inputs.T @ inputs).astype(np.float64) + np.diag(penalty))
    weights: NDArray[np.float64] = np.zeros((inputs.shape[1], outcomes.shape[1]))
    for _ in range(_ROUNDS):
        uphill = inputs.T @ (outcomes - probability(inputs @ weights.astype(np.float32)))
        weights += curvature @ (uphill - penalty[:, None] * weights)
    return weights.astype(np.float32)
