"""Costs of steps on stages that stream, for the head that sizes them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.step_budget import stage_costs
from edgeshard.planning.costs.tier_costs import Streaming
from edgeshard.planning.search.plan import PlanResult


def streaming_costs(costs: Costs, result: PlanResult) -> tuple[StageCost, ...]:
    """`stage_costs` of a plan whose stages may stream.

    A step of one through which layers pass takes no less than reading, and the first slot's filling
    more. One that caches experts reads those that are expected to lack, while it computes others.
    """
    assert result.prediction is not None
    adjusted_costs = []
    for cost, stage in zip(stage_costs(costs, result.prediction.cut), result.stages, strict=True):
        if (one := stage.streaming) is not None:
            decode_s, prefill_s = (
                _streamed(one, cost.rows, curve) for curve in (cost.decode_s, cost.prefill_s)
            )
            cost = replace(cost, decode_s=decode_s, prefill_s=prefill_s)
        adjusted_costs.append(cost)
    return tuple(adjusted_costs)


def _streamed(one: Streaming, rows: Sequence[int], curve: Sequence[float]) -> tuple[float, ...]:
    """Seconds of steps on a stage that streams, from the seconds of their computing."""
    rate = one.disk_bytes_per_s
    if one.caches:
        pairs = zip(rows, curve, strict=True)
        return tuple(
            each + max(0.0, one.step_bytes(count) / rate - one.expert_share * each)
            for count, each in pairs
        )
    return tuple(max(one.streamed_bytes / rate, each) + one.layer_bytes / rate for each in curve)
