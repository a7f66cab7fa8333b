"""How far loading is, and how long the rest takes: by the rate so far, of each sort of work by
itself."""

from __future__ import annotations

import pytest
from edgeshard_agent.model.weights.weight_loading import Share, WeightLoadingMeter, seconds_left

from edgeshard.domain.nodes.device import StageFilling, WeightLoadingWork


@pytest.mark.parametrize(
    ("shares", "left"),
    [
        ([], 0.0),
        ([Share(0, 0, 0.0)], 0.0),
        ([Share(30, 30, 5.0)], 0.0),
        ([Share(10, 30, 5.0)], 10.0),
        ([Share(10, 30, 5.0), Share(100, 400, 1.0)], 13.0),
        ([Share(10, 30, 5.0), Share(0, 400, 0.0)], None),
        ([Share(40, 30, 5.0), Share(0, 0, 0.0)], 0.0),
    ],
)
def test_seconds_left(shares: list[Share], left: float | None) -> None:
    assert seconds_left(shares) == left


def test_reading_and_packing_have_rates_of_their_own() -> None:
    now, said = [100.0], list[StageFilling]()
    meter = WeightLoadingMeter(said.append, lambda: now[0])
    meter.expect(30, read=False)
    meter.expect(20, read=True)
    meter.begin(WeightLoadingWork.PACKING)
    now[0] += 3.0
    meter.say()
    assert said == [StageFilling(WeightLoadingWork.PACKING, 0, 50)] * 2
    meter.done(10)
    assert said[-1] == StageFilling(WeightLoadingWork.PACKING, 10, 50), (
        "nobody knows yet how fast it reads"
    )
    meter.begin(WeightLoadingWork.READING)
    now[0] += 0.5
    meter.done(10)
    assert said[-1] == StageFilling(WeightLoadingWork.READING, 20, 50, left_s=6.5)
    meter.begin(WeightLoadingWork.PACKING)
    now[0] += 9.0
    meter.done(20)
    assert said[-1] == StageFilling(WeightLoadingWork.PACKING, 40, 50, left_s=0.5)
