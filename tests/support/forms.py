"""How much of a test runs: the quick form in `make test`, the long one in `make test-all`."""

from __future__ import annotations

LONG = False
"""Set by tests/conftest.py before a test module is imported, from pytest's option --long."""


def in_form(quick: int, long: int) -> int:
    """So many examples, seeds or kills."""
    return long if LONG else quick
