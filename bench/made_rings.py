"""Stages and hops with times made up for a ring: constant, or linear."""

from __future__ import annotations

from edgeshard.planning.simulation.timing import HopTimes, StageTimes


def steady_stage(prefill_s: float, decode_s: float, overhead_s: float = 0.0) -> StageTimes:
    """A stage whose steps take the same time whatever their tokens and context; each slice of a
    prompt is one step."""
    return StageTimes(
        lambda tokens, context: prefill_s, lambda batch, context: decode_s, overhead_s
    )


def linear_hop(seconds_per_token: float, fixed_s: float = 0.0, latency_s: float = 0.0) -> HopTimes:
    return HopTimes(lambda tokens: fixed_s + seconds_per_token * tokens, latency_s)
