"""The lab's links: bytes take turns, delays overlap."""

from __future__ import annotations

import pytest
from edgeshard_agent.lab.shaping import LinkShape

from edgeshard.domain.errors import InvalidArgumentError


def test_frames_queue_for_bandwidth_and_share_the_delay() -> None:
    link = LinkShape(bandwidth_bps=8000, latency_s=0.5)
    assert link.arrival(10.0, 1000) == pytest.approx(11.5)
    assert link.arrival(10.0, 1000) == pytest.approx(12.5), "behind the first, its delay in parallel"
    assert link.arrival(20.0, 500) == pytest.approx(21.0), "an idle link owes nothing"


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (-1, 0), (float("nan"), 0), (1, -1), (1, float("inf"))])
def test_impossible_links_are_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(InvalidArgumentError):
        LinkShape(bandwidth, latency)
