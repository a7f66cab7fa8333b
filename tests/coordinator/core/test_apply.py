"""The table of the state machine's steps."""

from __future__ import annotations

from typing import get_args

from edgeshard_coordinator.core.machine.apply import _STEPS
from edgeshard_coordinator.core.values.events import Event


def test_each_event_has_its_step() -> None:
    assert set(_STEPS) == set(get_args(Event))
