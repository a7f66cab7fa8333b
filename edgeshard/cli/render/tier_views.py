"""The columns of stages that do not hold all weights, experts or KV in memory, and of a head that guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgeshard.cli.render.output import Column, human_bytes, human_seconds
from edgeshard.cli.render.views import Part, StagePart, percent, running_stages
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.nodes.device import StageExperts, StageGuesses, StageStatus, StageStreaming, StageSwap

STREAMING_COLUMNS: list[Column[StagePart[StageStreaming]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("IN MEMORY", lambda stage: human_bytes(stage.part.resident_bytes), right=True),
    Column("FROM DISK", lambda stage: human_bytes(stage.part.streamed_bytes), right=True),
    Column("READ", lambda stage: human_bytes(stage.part.read_bytes), right=True),
    Column("WAITED", lambda stage: human_seconds(stage.part.waited_s), right=True),
]
"""Weights: the ones that stay, the ones that each sweep reads, the bytes read so far, and the time
that steps waited for them.
"""

EXPERT_COLUMNS: list[Column[StagePart[StageExperts]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("EXPERTS", lambda stage: human_bytes(stage.part.total_bytes), right=True),
    Column("CACHED", lambda stage: human_bytes(stage.part.cached_bytes), right=True),
    Column("ROOM", lambda stage: human_bytes(stage.part.room_bytes), right=True),
    Column("HITS", lambda stage: str(stage.part.hits), right=True),
    Column("MISSES", lambda stage: str(stage.part.misses), right=True),
    Column("HIT RATE", lambda stage: percent(stage.part.hit_rate), right=True),
    Column("READ", lambda stage: human_bytes(stage.part.read_bytes), right=True),
    Column("WAITED", lambda stage: human_seconds(stage.part.waited_s), right=True),
]
"""Experts on the disk: all of them, the ones in memory and their room, what steps found there, and what they read."""

SWAP_COLUMNS: list[Column[StagePart[StageSwap]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("KV ASIDE", lambda stage: human_bytes(stage.part.kept_bytes), right=True),
    Column("OF AT MOST", lambda stage: human_bytes(stage.part.capacity_bytes), right=True),
    Column("SWAPPED OUT", lambda stage: str(stage.part.swapped_out), right=True),
    Column("BACK IN", lambda stage: str(stage.part.swapped_in), right=True),
]
"""Preempted requests: their kept KV, and how many had theirs swapped out, and swapped in."""

GUESS_COLUMNS: list[Column[StagePart[StageGuesses]]] = [
    Column("NODE", lambda stage: stage.node),
    Column("GUESSED", lambda stage: str(stage.part.guessed), right=True),
    Column("RIGHT", lambda stage: str(stage.part.right), right=True),
    Column("ROWS IN VAIN", lambda stage: str(stage.part.guessed - stage.part.right), right=True),
]
"""The head's guesses: how many tokens were guessed, and drawn."""


def tier_tables(deployment: Deployment) -> list[tuple[Sequence[Any], Sequence[Column[Any]]]]:
    """Rows and columns of each table; without rows if no stage has that part."""
    return [
        (_parts(deployment, lambda status: status.streaming), STREAMING_COLUMNS),
        (_parts(deployment, lambda status: status.experts), EXPERT_COLUMNS),
        (_parts(deployment, lambda status: status.swap), SWAP_COLUMNS),
        (_parts(deployment, lambda status: status.guesses), GUESS_COLUMNS),
    ]


def _parts(deployment: Deployment, of: Callable[[StageStatus], Part | None]) -> list[StagePart[Part]]:
    stages = running_stages(deployment)
    return [StagePart(stage.node, part) for stage in stages if (part := of(stage.part)) is not None]
