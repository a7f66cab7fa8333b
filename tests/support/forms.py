"""How much of a test runs: the quick form in `make test`, the long one in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

LONG = False
"""Set by tests/conftest.py before a test module is imported, from pytest's option --long."""


def in_form(quick: int, long: int) -> int:
    """So many examples, seeds or kills."""
    return long if LONG else quick


def one_in(count: int, cases: Iterable[object]) -> list[ParameterSet]:
    """Parameters for pytest: all of them in the long form, one in `count` in the quick one."""
    made = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        made.append(pytest.param(*values, marks=pytest.mark.long if number % count else ()))
    return made
