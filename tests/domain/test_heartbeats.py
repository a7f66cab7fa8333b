"""A heartbeat sent as a change, and made whole again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.control.commands import (
    MEMORY_NOTICED,
    MOST_STAGES,
    NOTHING,
    SHARE_NOTICED,
    Heartbeat,
    HeartbeatChange,
    change_between,
    with_change,
)
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import HugePages, StageKey, StagePhase, StageStatus


def stage(
    name: str, index: int = 0, epoch: int = 1, phase: StagePhase = StagePhase.ACTIVE, steps: int = 0
) -> StageStatus:
    return StageStatus(
        DeploymentName(name), Epoch(epoch), index, LayerRange(0, 2), phase, steps_done=steps
    )


def beat(
    *stages: StageStatus, memory: int = 1 << 30, share: float = 0.0, pages: HugePages | None = None
) -> Heartbeat:
    return Heartbeat(NodeId("a"), "i1", stages, memory, pages, share)


BIT = st.integers(0, 1)
STAGES = st.lists(
    st.builds(
        stage, st.sampled_from("abc"), BIT, st.integers(1, 2), st.sampled_from(StagePhase), BIT
    ),
    unique_by=lambda status: status.key,
)
BEATS = st.builds(
    lambda stages, memory, share, pages, packed: replace(
        beat(*stages, memory=memory, share=share, pages=pages), packed=packed
    ),
    STAGES,
    st.integers(0, 100),
    st.floats(0, 1),
    st.builds(HugePages, st.integers(0, 1), st.integers(0, 1)),
    st.sampled_from([(), (1,), (1, 1 << 63)]),
)


@given(st.lists(BEATS, min_size=1, max_size=6))
def test_whatever_is_said_as_changes_is_whole_again(said: list[Heartbeat]) -> None:
    heard = said[0]
    for now in said[1:]:
        heard = with_change(heard, change_between(heard, now))
        assert {status.key: status for status in heard.stages} == {
            status.key: status for status in now.stages
        }
        assert abs(heard.memory_available_bytes - now.memory_available_bytes) <= (
            MEMORY_NOTICED * heard.memory_available_bytes
        )
        assert abs(heard.others_share - now.others_share) <= SHARE_NOTICED
        assert heard.huge_pages == now.huge_pages and heard.packed == now.packed


def test_of_a_node_that_rests_nothing_is_said() -> None:
    before = beat(stage("a"), memory=1000, share=0.02, pages=HugePages(1, 1))
    after = replace(before, memory_available_bytes=1001, others_share=0.021)
    assert change_between(before, after) == NOTHING
    assert with_change(before, NOTHING) is before


def test_only_stages_that_differ_are_said() -> None:
    before = beat(stage("a"), stage("b"), stage("c"))
    change = change_between(before, beat(stage("a"), stage("b", steps=1)))
    assert change == HeartbeatChange(
        (stage("b", steps=1),), (StageKey(DeploymentName("c"), 0),), urgent=True
    )


@pytest.mark.parametrize(
    ("after", "urgent"),
    [
        ((stage("a", steps=9),), False),
        ((stage("a", phase=StagePhase.FAILED),), True),
        ((stage("a", epoch=2),), True),
        ((), True),
        ((stage("a"), stage("a", index=1)), True),
    ],
)
def test_news_of_a_stage_is_urgent_and_its_counters_are_not(
    after: tuple[StageStatus, ...], urgent: bool
) -> None:
    assert change_between(beat(stage("a")), beat(*after)).urgent is urgent


def test_a_reading_that_failed_changes_nothing() -> None:
    before = beat(pages=HugePages(2, 1))
    assert with_change(before, change_between(before, beat())).huge_pages == HugePages(2, 1)


def test_a_node_cannot_grow_beyond_what_any_holds() -> None:
    most = beat(*(stage(f"d{number}") for number in range(MOST_STAGES)))
    assert len(with_change(most, HeartbeatChange((stage("d0", steps=1),))).stages) == MOST_STAGES
    with pytest.raises(InvalidArgumentError) as refused:
        with_change(most, HeartbeatChange((stage("one more"),)))
    assert (refused.value.field, refused.value.reason) == ("stages", "TOO_MANY_STAGES")
