"""The state of additions: what may follow what, one at a time, and how many are retained."""

from __future__ import annotations

from itertools import product

import pytest
from edgeshard_coordinator.additions.addition_state import (
    MAX_ENDED,
    MAX_QUEUED,
    NO_ADDITIONS,
    TRANSITIONS,
    Additions,
    Phase,
)

from edgeshard.domain.errors import AlreadyExistsError, NotFoundError, ResourceExhaustedError

PATHS = {
    Phase.QUEUED: (),
    Phase.CONVERTING: (Phase.CONVERTING,),
    Phase.STORING: (Phase.CONVERTING, Phase.STORING),
    Phase.DONE: (Phase.CONVERTING, Phase.STORING, Phase.DONE),
    Phase.FAILED: (Phase.CONVERTING, Phase.FAILED),
    Phase.CANCELLED: (Phase.CANCELLED,),
}
"""A way to each phase."""


def queued(*names: str, who: str = "operator/ann") -> Additions:
    additions = NO_ADDITIONS
    for name in names:
        additions = additions.queued(f"/models/{name}", name, "int8", who)
    return additions


def in_phase(phase: Phase) -> Additions:
    additions = queued("a")
    for step in PATHS[phase]:
        additions = additions.moved(1, step)
    return additions


@pytest.mark.parametrize(("before", "after"), list(product(Phase, Phase)))
def test_only_the_transitions_of_the_table_happen(before: Phase, after: Phase) -> None:
    additions = in_phase(before)
    if after in TRANSITIONS[before]:
        assert additions.moved(1, after).get(1).phase is after
    else:
        with pytest.raises(ValueError, match=f"{before} cannot become {after}"):
            additions.moved(1, after)


def test_the_oldest_that_waits_is_next() -> None:
    additions = queued("a", "b", "c").moved(1, Phase.CANCELLED)
    waiting = additions.waiting
    assert waiting is not None and (waiting.number, waiting.name) == (2, "b")
    assert additions.moved(2, Phase.CONVERTING).moved(3, Phase.CANCELLED).waiting is None


def test_a_name_is_added_once_at_a_time() -> None:
    additions = queued("a")
    with pytest.raises(AlreadyExistsError) as found:
        additions.queued("/models/other", "a", "int8", "operator/bob")
    assert (found.value.field, found.value.reason) == ("name", "BEING_ADDED")
    again = additions.moved(1, Phase.CANCELLED).queued("/models/other", "a", "int8", "operator/bob")
    assert again.get(2).source == "/models/other"


def test_the_queue_is_bounded_and_ended_additions_are_forgotten() -> None:
    additions = queued(*(f"m{number}" for number in range(MAX_QUEUED)))
    with pytest.raises(ResourceExhaustedError, match="wait until one is done"):
        additions.queued("/models/x", "x", "int8", "operator/ann")
    for number in range(1, MAX_QUEUED + 1):
        additions = additions.moved(number, Phase.CANCELLED)
    assert list(additions.by_number) == list(range(MAX_QUEUED - MAX_ENDED + 1, MAX_QUEUED + 1))
    with pytest.raises(NotFoundError):
        additions.get(1)
    assert additions.queued("/models/x", "x", "int8", "operator/ann").last == MAX_QUEUED + 1, (
        "no number twice"
    )


def test_progress_is_that_of_a_running_addition() -> None:
    additions = queued("a")
    assert additions.progressed(1, "converting", 1, 2) is additions, "it waits"
    assert additions.progressed(7, "converting", 1, 2) is additions
    running = additions.moved(1, Phase.CONVERTING).progressed(1, "converting", 5, 9)
    found = running.get(1)
    assert (found.work, found.done_bytes, found.total_bytes) == ("converting", 5, 9)
    ended = running.moved(1, Phase.CANCELLED)
    assert ended.progressed(1, "converting", 9, 9) is ended


def test_the_open_additions_of_an_operator() -> None:
    additions = (
        queued("a", "b").moved(1, Phase.CANCELLED).queued("/models/c", "c", "int8", "operator/bob")
    )
    assert [addition.name for addition in additions.open_of("operator/ann")] == ["b"]
