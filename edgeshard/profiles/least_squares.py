"""Least squares in which no coefficient is negative. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-12


def non_negative(design: Floats, target: Floats) -> Floats:
    """The x >= 0 of least |design x - wanted|; `design` [N, K] has no column of zeros, `target` is [N].

    Lawson and Hanson's active sets (Solving Least Squares Problems, 1974, chapter 23): columns join one by one, the
    steepest first, and leave where the solution would turn negative.
    """
    scale = np.linalg.norm(design, axis=0)
    columns = design / scale
    count = columns.shape[1]
    solution, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = columns.T @ (target - columns @ solution)
        gradient[free] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= _ROUNDING * np.linalg.norm(target):
            break
        free[entering] = True
        while True:
            tried = np.zeros(count)
            tried[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            falling = np.flatnonzero(free & (tried <= 0))
            if not len(falling):
                break
            # As far towards it as nothing turns negative; what reaches 0 first leaves.
            shares = solution[falling] / np.maximum(solution[falling] - tried[falling], _ROUNDING)
            solution = solution + float(np.min(shares)) * (tried - solution)
            free[falling[np.argmin(shares)]] = False
            free &= solution > 0
            solution[~free] = 0.0
        solution = tried
    result: Floats = solution / scale
    return result
