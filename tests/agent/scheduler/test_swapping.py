"""Preempted requests whose KV the stages keep continue from their position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.scheduler import Limits
from edgeshard_agent.scheduler.swapping import SwappedOut, Swapping

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.deployments.step_cost import Piece
from edgeshard.domain.requests.generation import Sampling
from tests.support.rig import Rig

Alone = Callable[[list[int], int], list[int]]


def overcommitted(make_rig: type[Rig], swapping: Swapping, stages: int = 2) -> Rig:
    return make_rig(
        blocks=6, stages=stages, limits=Limits(48, 100, overcommit=True), chunking=Chunking(16),
        batching=Batching(Mode.NO_BUBBLES, 2, 8, 2), swapping=swapping,
    )  # fmt: skip


def run_three(rig: Rig, alone: Alone, **options: Any) -> None:
    for number in range(3):
        rig.submit(f"r{number}", [number + 1] * 3, 16, **options)
    rig.run_all()
    for number in range(3):
        assert rig.tokens(f"r{number}") == alone([number + 1] * 3, 16)
    rig.check_empty()


def test_no_position_is_run_twice(make_rig: type[Rig], alone: Alone) -> None:
    rig = overcommitted(make_rig, Swapping(blocks=100))
    run_three(rig, alone)
    stats = rig.scheduler.stats
    assert stats.preemptions == stats.swaps > 0
    assert stats.prompt_tokens == 3 * 3
    run = [(span.request, position) for step in rig.steps for span in step.plan.spans
           for position in range(span.first_position, span.end_position)]  # fmt: skip
    assert len(run) == len(set(run)) == 3 * (3 + 15)


@pytest.mark.parametrize(
    "sampling", [Sampling(repetition_penalty=1.3), Sampling(frequency_penalty=1.3)]
)
def test_sampling_goes_on_as_well(make_rig: type[Rig], alone: Alone, sampling: Sampling) -> None:
    rig = overcommitted(make_rig, Swapping(blocks=100))
    run_three(rig, alone, sampling=sampling)
    told = [
        span.request for step in rig.steps for span in step.plan.spans if span.sampling is not None
    ]
    assert sorted(told) == [0, 1, 2] and rig.scheduler.stats.swaps > 0


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_what_is_kept_never_exceeds_the_budget(
    make_rig: type[Rig], alone: Alone, blocks: int
) -> None:
    """The stages refuse more, and a request that finds no room runs again."""
    rig = overcommitted(make_rig, Swapping(blocks=blocks))
    run_three(rig, alone)
    stats = rig.scheduler.stats
    assert stats.preemptions > 0 and (stats.swaps > 0) == (blocks > 1)


def test_what_is_computed_sooner_is_not_kept(make_rig: type[Rig], alone: Alone) -> None:
    def compute_s(pieces: Sequence[Piece]) -> float:
        return 0.01 * sum(count for _, count in pieces)

    rig = overcommitted(make_rig, Swapping(100, block_s=1.0, compute_s=compute_s))
    run_three(rig, alone)
    assert rig.scheduler.stats.swaps == 0 < rig.scheduler.stats.preemptions
    assert SwappedOut(Swapping(100, 0.03, compute_s), 16).takes(2, 7)
    assert not SwappedOut(Swapping(100, 0.04, compute_s), 16).takes(2, 7)


def test_a_cancelled_request_leaves_nothing_aside(make_rig: type[Rig]) -> None:
    rig = overcommitted(make_rig, Swapping(blocks=100))
    for number in range(3):
        rig.submit(f"r{number}", [number + 1] * 3, 16)
    while not rig.scheduler.stats.kv_blocks_swapped:
        rig.take(rig.next_step())
    assert any(stage.pool.swap.used for stage in rig.stages)
    for number in range(3):
        rig.cancel(f"r{number}")
    rig.run_all()
    rig.check_empty()
    assert not any(stage.pool.swap.used for stage in rig.stages)
