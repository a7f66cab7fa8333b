"""The head's scheduler without a network, for the tests of several rooms."""

from __future__ import annotations

import pytest

from tests.support.rig import Alone, Rig, Ring, expected


@pytest.fixture(scope="session")
def make_rig() -> type[Rig]:
    return Rig


@pytest.fixture(scope="session")
def make_ring() -> type[Ring]:
    return Ring


@pytest.fixture(scope="session")
def alone() -> Alone:
    """(prompt, new tokens) -> the tokens of a request that runs by itself."""
    return expected
