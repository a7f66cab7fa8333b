"""The linear program: known answers, programs without one, and the same as GLOP on random ones."""

from __future__ import annotations

import numpy as np
import pytest

from bench.flexgen_paper.linear import minimise
from edgeshard.planning.solvers.instance import Floats


def _none(count: int) -> tuple[Floats, Floats]:
    return np.zeros((0, count)), np.zeros(0)


def test_a_program_with_a_known_answer() -> None:
    """x + y at least 2 (as -x - y <= -2), x at most 1.5, and y costs twice as much."""
    upper, limits = np.array([[-1.0, -1.0], [1.0, 0.0]]), np.array([-2.0, 1.5])
    found = minimise(np.array([1.0, 2.0]), upper, limits, *_none(2))
    assert found is not None
    assert found == pytest.approx([1.5, 0.5])


def test_equalities_that_say_the_same_twice_do_no_harm() -> None:
    equal, values = np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([1.0, 2.0])
    found = minimise(np.array([3.0, 1.0]), np.zeros((0, 2)), np.zeros(0), equal, values)
    assert found is not None
    assert found == pytest.approx([0.0, 1.0])


def test_a_program_that_cannot_be_met() -> None:
    upper, limits = np.array([[1.0, 1.0]]), np.array([0.5])
    assert minimise(np.ones(2), upper, limits, np.array([[1.0, 1.0]]), np.ones(1)) is None


def test_random_programs_have_the_value_that_glop_finds() -> None:
    solver_of = pytest.importorskip("ortools.linear_solver.pywraplp")
    random = np.random.default_rng(3)
    without = 0
    for _ in range(100):
        count, rows = int(random.integers(2, 9)), int(random.integers(1, 9))
        cost = random.uniform(0, 5, count)
        upper = random.uniform(-3, 5, (rows, count)) * 10.0 ** random.integers(-3, 9, (rows, 1))
        limits = random.uniform(-1, 4, rows) * np.abs(upper).max(axis=1)
        equal, values = random.uniform(0, 3, (1, count)), random.uniform(0.1, 3, 1)
        solver = solver_of.Solver.CreateSolver("GLOP")
        x = [solver.NumVar(0, solver.infinity(), str(index)) for index in range(count)]
        for row, limit in zip(
            upper / np.abs(upper).max(axis=1)[:, None],
            limits / np.abs(upper).max(axis=1),
            strict=True,
        ):
            solver.Add(sum(float(a) * v for a, v in zip(row, x, strict=True)) <= float(limit))
        solver.Add(sum(float(a) * v for a, v in zip(equal[0], x, strict=True)) == float(values[0]))
        solver.Minimize(sum(float(a) * v for a, v in zip(cost, x, strict=True)))
        solved = solver.Solve() == solver_of.Solver.OPTIMAL
        found = minimise(cost, upper, limits, equal, values)
        assert (found is not None) == solved
        if found is None:
            without += 1
            continue
        assert float(cost @ found) == pytest.approx(solver.Objective().Value(), rel=1e-6, abs=1e-9)
        assert (upper @ found <= limits + 1e-6 * np.abs(upper).max(axis=1)).all()
    assert 5 < without < 80
