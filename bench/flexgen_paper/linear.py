"""A linear program of a few variables, solved exactly except for rounding: the simplex method on a
dense table. Pure.

Nine fractions and two times need no solver of their own package. Bland's rule prevents cycles. Rows
are scaled to a largest entry of 1, because bytes and seconds are in one table.
(docs/papers.md#tensors-over-three-tiers)
"""

from __future__ import annotations

import numpy as np

from edgeshard.planning.solvers.instance import Floats

_NOTHING = 1e-10
"""An entry of a scaled table below this counts as zero."""
_INFEASIBLE = 1e-8
"""The largest remaining infeasibility, over the scaled rows, of a program that counts as
solvable."""


def minimise(
    cost: Floats, upper: Floats, limits: Floats, equal: Floats, values: Floats
) -> Floats | None:
    """The x >= 0 of least cost x with  upper x <= limits  and  equal x = values; None if there is
    none.

    cost [n], upper [u, n], limits [u], equal [e, n], values [e]. The cost must not be able to fall
    without end; one that is nowhere negative cannot.
    """
    count = len(cost)
    upper, limits = _scaled(upper, limits)
    equal, values = _scaled(equal, values)
    rows = np.zeros((len(limits) + len(values), count + len(limits)))
    rows[: len(limits), :count] = upper
    rows[: len(limits), count:] = np.eye(len(limits))
    rows[len(limits) :, :count] = equal
    right = np.concatenate([limits, values])
    rows[right < 0] *= -1.0
    right = np.abs(right)
    total = rows.shape[1]
    # One artificial variable for each row; the first phase drives them out.
    table = np.hstack([rows, np.eye(len(right)), right[:, None]])
    basis = list(range(total, total + len(right)))
    aim = np.zeros(table.shape[1])
    aim[total:-1] = 1.0
    _solve(table, basis, aim, total + len(right))
    if sum(table[row, -1] for row, column in enumerate(basis) if column >= total) > _INFEASIBLE:
        return None
    _drive_out(table, basis, total)
    aim = np.zeros(table.shape[1])
    aim[:count] = cost / max(1e-300, float(np.abs(cost).max(initial=0.0)))
    _solve(table, basis, aim, total)
    found = np.zeros(table.shape[1] - 1)
    found[basis] = table[:, -1]
    return np.maximum(found[:count], 0.0)


def _scaled(rows: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Rows with a largest entry of 1; a row of zeros stays."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    largest[largest == 0] = 1.0
    return rows / largest[:, None], right / largest


def _solve(table: Floats, basis: list[int], aim: Floats, allowed: int) -> None:
    """Pivot until no column below `allowed` lowers the aim. In place."""
    while True:
        gain = aim[:-1] - aim[basis] @ table[:, :-1]
        better = np.flatnonzero(gain[:allowed] < -_NOTHING)
        if not better.size:
            return
        column = int(better[0])
        entries = table[:, column]
        usable = np.flatnonzero(entries > _NOTHING)
        if not usable.size:
            return  # only rounding can look like a cost that falls without end
        ratios = table[usable, -1] / entries[usable]
        least = usable[ratios <= ratios.min() + _NOTHING]
        _pivot(table, basis, int(min(least, key=lambda row: basis[row])), column)


def _drive_out(table: Floats, basis: list[int], total: int) -> None:
    """Artificial variables that stayed at zero leave the basis; a row without any other entry is
    redundant."""
    for row, column in enumerate(basis):
        if column < total:
            continue
        table[row, -1] = 0.0
        entries = np.flatnonzero(np.abs(table[row, :total]) > _NOTHING)
        if entries.size:
            _pivot(table, basis, row, int(entries[0]))


def _pivot(table: Floats, basis: list[int], row: int, column: int) -> None:
    table[row] /= table[row, column]
    others = np.arange(len(table)) != row
    table[others] -= np.outer(table[others, column], table[row])
    np.maximum(table[:, -1], 0.0, out=table[:, -1])
    basis[row] = column
