"""How much of a test runs: the quick form in `make test`, the long one in `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Case = TypeVar("Case")

DAY = "EDGESHARD_TEST_DAY"
"""Names the environment variable that chooses among cases that are too many for a run.
tests/conftest.py sets it, so that all processes of a run have the same."""
DAYS = 3
"""The long form of tests with many cases is spread over this number of days."""
LONG = False
"""Set by tests/conftest.py before a test module is imported, from pytest's option --long."""


def in_form(quick: int, long: int) -> int:
    """So many examples, seeds or kills."""
    return long if LONG else quick


def day() -> int:
    """The number of the day whose cases run; 0 for all of them."""
    return 0 if os.environ[DAY] == "every" else int(os.environ[DAY])


def is_turn(count: int, number: int) -> bool:
    """Whether the case of this number is among the one in `count` that the long form runs today."""
    return os.environ[DAY] == "every" or number % count == day() % count


def in_turn(count: int, cases: Sequence[object]) -> list[ParameterSet]:
    """Parameters of only the long form: one in `count` of the cases, others each day, and all of
    them if EDGESHARD_TEST_DAY is "every". Set to a day's number, it runs that day's."""
    chosen = [case for n, case in enumerate(cases) if is_turn(count, n)]
    return [pytest.param(case, marks=pytest.mark.long) for case in chosen]


def of_the_day(quick: int, cases: Sequence[Case]) -> list[Case]:
    """The first `quick` cases; in the long form one in `DAYS` of the others, too."""
    return [
        *cases[:quick],
        *(case for n, case in enumerate(cases[quick:]) if LONG and is_turn(DAYS, n)),
    ]


def one_in(count: int, cases: Iterable[object]) -> list[ParameterSet]:
    """Parameters for pytest: one in `count` in the quick form, and in the long one also one in
    `DAYS` of the others."""
    made = []
    for number, case in enumerate(cases):
        if number % count and LONG and not is_turn(DAYS, number):
            continue
        values = case if isinstance(case, tuple) else (case,)
        made.append(pytest.param(*values, marks=pytest.mark.long if number % count else ()))
    return made
