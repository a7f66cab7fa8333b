"""The rate at which nodes may register, whatever their names are."""

from __future__ import annotations

import pytest
from edgeshard_coordinator.control.runtime.node_reports import (
    BURST_S,
    MAX_NAMES,
    RATE,
    Registrations,
)

from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.ids import NodeName


def test_a_node_registers_often_once_and_then_at_the_rate() -> None:
    registrations, name = Registrations(), NodeName("m")
    burst = int(BURST_S * RATE) + 1
    for _ in range(burst):
        registrations.take(name, 100.0)
    with pytest.raises(ResourceExhaustedError) as refused:
        registrations.take(name, 100.0)
    assert (refused.value.field, refused.value.reason) == ("name", "TOO_MANY_REGISTRATIONS")
    registrations.take(NodeName("another"), 100.0)
    wait_s = refused.value.retry_after_s
    assert wait_s is not None and wait_s == pytest.approx(1.0 / RATE)
    registrations.take(name, 100.0 + wait_s)


def test_names_without_end_take_bounded_memory() -> None:
    registrations = Registrations()
    for number in range(3 * MAX_NAMES):
        registrations.take(NodeName(f"n{number}"), 100.0)
    assert len(registrations._buckets) <= MAX_NAMES
