"""The expected rate of a pipeline, from the seconds of its stages and hops. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bench.made_rings import linear_hop, steady_stage
from edgeshard.domain.deployments.placement import Mode
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import Pipeline, SimulatedTraffic

_TOKENS = 64


def ideal_tokens_per_s(
    streams: int, micro_batches: int, stage_s: Sequence[float], hop_s: Sequence[float]
) -> float:
    """m b / max(R, m B): all tokens of a round over the round, or over all turns at the busiest
    station.

    docs/papers.md#rates-of-a-pipeline
    """
    round_s = sum(stage_s) + sum(hop_s)
    return streams / max(round_s, micro_batches * max(*stage_s, *hop_s, 0.0))


def simulated_tokens_per_s(
    mode: Mode, streams: int, micro_batches: int, stage_s: Sequence[float], hop_s: Sequence[float]
) -> float:
    """The same by the simulator, whose modes differ in when a micro-batch continues."""
    stages = tuple(steady_stage(0.0, seconds) for seconds in stage_s)
    hops = tuple(linear_hop(0.0, seconds) for seconds in hop_s)
    traffic = SimulatedTraffic(
        1, micro_batches, prompt_tokens=1, new_tokens=_TOKENS, decode_only=True
    )
    return streams / micro_batches * simulate(Pipeline(stages, hops), traffic, mode).tokens_per_s
