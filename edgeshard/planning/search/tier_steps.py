"""Costs of steps on stages that stream, for the head that sizes them. Pure."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.step_budget import stage_costs
from edgeshard.planning.search.plan import PlanResult


def streaming_costs(costs: Costs, result: PlanResult) -> tuple[StageCost, ...]:
    """`stage_costs` of a plan whose stages may stream.

    A step of one through which layers pass takes no less than reading, and the first slot's filling more. One that
    caches experts reads those that are expected to lack, while it computes others.
    """
    assert result.prediction is not None
    found = []
    for cost, stage in zip(stage_costs(costs, result.prediction.cut), result.stages, strict=True):
        one = stage.streaming
        if one is not None and one.caches:
            decode_s, prefill_s = (
                tuple(
                    seconds + max(0.0, one.step_bytes(rows) / one.disk_bytes_per_s - one.expert_share * seconds)
                    for rows, seconds in zip(cost.rows, curve, strict=True)
                )
                for curve in (cost.decode_s, cost.prefill_s)
            )
            cost = replace(cost, decode_s=decode_s, prefill_s=prefill_s)
        elif one is not None:
            read_s, fill_s = (size / one.disk_bytes_per_s for size in (one.streamed_bytes, one.layer_bytes))
            decode_s, prefill_s = (
                tuple(max(read_s, seconds) + fill_s for seconds in curve) for curve in (cost.decode_s, cost.prefill_s)
            )
            cost = replace(cost, decode_s=decode_s, prefill_s=prefill_s)
        found.append(cost)
    return tuple(found)
