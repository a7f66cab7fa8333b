"""The facts that a node finds out about itself."""

from __future__ import annotations

import os

import pytest
from edgeshard_agent.measuring.machine_facts import has_cores_of_its_own


@pytest.mark.parametrize(
    ("allowed", "of_its_own"), [({0}, True), ({0, 1, 2}, True), ({0, 1, 2, 3}, False)]
)
def test_cores_of_its_own_are_fewer_than_the_machine_has(
    allowed: set[int], of_its_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert has_cores_of_its_own() is of_its_own
