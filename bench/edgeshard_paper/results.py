"""All of the paper's experiments, run."""

from __future__ import annotations

from dataclasses import dataclass

from bench.edgeshard_paper.bandwidth import PAIRS, Sweep, endless, sweep
from bench.edgeshard_paper.experiments import (
    Modes,
    Row,
    modes,
    paper_cluster,
    sources,
    table,
    timelines,
)
from bench.edgeshard_paper.paper_numbers import MODELS
from bench.edgeshard_paper.profiling import Block, Profiling, blocks, profiling
from edgeshard.domain.deployments.placement import Mode
from edgeshard.planning.simulation.simulator import Simulation


@dataclass(frozen=True, slots=True)
class Results:
    """`free` are the strategies of source and cloud for 13B, without a limit of memory."""

    performance: dict[str, list[Row]]
    free: list[Row]
    sweeps: dict[str, Sweep]
    sources: dict[str, list[Row]]
    blocks: list[Block]
    profiling: list[Profiling]
    modes: list[Modes]
    timelines: dict[Mode, Simulation]


def run_all() -> Results:
    small, *_ = MODELS
    return Results(
        performance={model: table(model, paper_cluster()) for model in MODELS},
        free=table("llama2-13b", endless(paper_cluster()), PAIRS),
        sweeps={model: sweep(model) for model in MODELS},
        sources=sources(small),
        blocks=blocks(small),
        profiling=[row for model in MODELS for row in profiling(model)],
        modes=[modes(model) for model in MODELS],
        timelines=timelines(small),
    )
