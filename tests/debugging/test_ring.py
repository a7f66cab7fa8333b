"""The ring: bounded in entries and bytes, and its entries lead to the newest state."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass

import pytest

from edgeshard.debugging import ring as ring_module
from edgeshard.debugging.codec import Codec
from edgeshard.debugging.dump import StateMachine, refusal
from edgeshard.debugging.ring import (
    MOST_BYTES,
    MOST_EARLIER,
    MOST_ENTRY_BYTES,
    SEGMENT_ENTRIES,
    SEGMENTS,
    EventRing,
    rough_bytes,
)
from edgeshard.domain.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class Added:
    amount: int
    ballast: bytes = b""


@dataclass(frozen=True, slots=True)
class Beat:
    amount: int = 1


Event = Added | Beat


def apply(state: int, event: Event) -> int:
    if event.amount < 0:
        raise NotFoundError("no", reason="NEGATIVE")
    if event.amount == 99:
        raise ZeroDivisionError("a bug")
    return state + event.amount


MACHINE: StateMachine[int, Event] = StateMachine(Codec(int), Codec(Event), apply)


class World:
    def __init__(self) -> None:
        self.state = 0
        self.ring: EventRing[int, Event] = EventRing(routine=(Beat,))

    def post(self, event: Event) -> None:
        before = self.state
        try:
            self.state = apply(before, event)
        except (NotFoundError, ZeroDivisionError) as error:
            self.ring.record(before, event, 0.0, refusal(error))
        else:
            self.ring.record(before, event, 0.0)

    def check(self) -> int:
        """How many entries there are, once they have led to the state."""
        view = self.ring.view(self.state)
        state = view.checkpoint
        for entry in view.entries:
            if not entry.refused:
                state = apply(state, entry.event)
        assert state == self.state
        replay = MACHINE.replay(MACHINE.document(self.state, view))
        assert (
            not replay.differs and replay.events == len(view.entries) <= SEGMENTS * SEGMENT_ENTRIES
        )
        return len(view.entries)


def test_whatever_happens_it_leads_to_the_state() -> None:
    rng, world = random.Random(3), World()
    assert world.check() == 0
    for _ in range(4000):
        size = rng.choice([0, 10, 100_000, 300_000]) if rng.random() < 0.2 else 0
        world.post(Beat() if rng.random() < 0.5 else Added(rng.randrange(-3, 9), bytes(size)))
        if rng.random() < 0.01:
            world.check()
    assert world.check() > SEGMENT_ENTRIES


def test_the_newest_events_stay() -> None:
    world = World()
    for number in range(5 * SEGMENTS * SEGMENT_ENTRIES):
        world.post(Added(number))
    view = world.ring.view(world.state)
    assert world.check() > (SEGMENTS - 1) * SEGMENT_ENTRIES
    assert view.entries[-1].event == Added(5 * SEGMENTS * SEGMENT_ENTRIES - 1)
    assert view.entries[-1].number == view.recorded == 5 * SEGMENTS * SEGMENT_ENTRIES
    numbers = [entry.number for entry in (*view.earlier, *view.entries)]
    assert (
        numbers == list(range(numbers[0], view.recorded + 1)) and len(view.earlier) == MOST_EARLIER
    )


def test_routine_events_do_not_drive_out_the_others() -> None:
    world = World()
    world.post(Added(1))
    for _ in range(10 * SEGMENTS * SEGMENT_ENTRIES):
        world.post(Beat())
    assert [entry.event for entry in world.ring.view(world.state).earlier] == [Added(1)]


def test_bytes_are_bounded() -> None:
    world = World()
    tracemalloc.start()
    try:
        for number in range(400):
            world.post(Added(number, bytes(MOST_ENTRY_BYTES - 1000)))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert MOST_BYTES / 2 < kept < 2.5 * MOST_BYTES
    assert world.check() > 2


def test_an_event_too_large_begins_the_ring_anew() -> None:
    world = World()
    for amount in (1, 2):
        world.post(Added(amount))
    world.post(Added(3, bytes(MOST_ENTRY_BYTES)))
    assert world.check() == 0 and world.ring.view(world.state).checkpoint == 6
    assert [entry.event for entry in world.ring.view(world.state).earlier] == [Added(1), Added(2)]
    world.post(Added(4))
    world.post(Added(-1, bytes(MOST_ENTRY_BYTES)))
    assert world.check() == 1 and world.ring.view(world.state).checkpoint == 6


def test_an_event_that_breaks_the_machine_breaks_it_again() -> None:
    world = World()
    for amount in (1, 99, 2):
        world.post(Added(amount))
    assert world.check() == 3
    assert world.ring.view(world.state).entries[1].refused == "ZeroDivisionError"


def test_a_replay_that_differs_says_where() -> None:
    world = World()
    for amount in (1, -1, 2):
        world.post(Added(amount))
    document = MACHINE.document(world.state, world.ring.view(world.state))
    assert MACHINE.replay({**document, "state": 4}).differs == ("state",)
    entries = document["ring"]["entries"]
    for refused in ("", "OTHER"):
        changed = [entries[0], {**entries[1], "refused": refused}, entries[2]]
        replay = MACHINE.replay({**document, "ring": {**document["ring"], "entries": changed}})
        assert replay.differs and "event 2: refused with NEGATIVE" in replay.differs[0]
    changed = [{**entries[0], "refused": "NEGATIVE"}, *entries[1:]]
    replay = MACHINE.replay({**document, "ring": {**document["ring"], "entries": changed}})
    assert replay.differs == ("event 1: taken, not refused with NEGATIVE",)


@pytest.mark.parametrize(
    "value", [(), {"a": [1, 2, (b"x" * 1000, NotFoundError("n" * 1000))]}, Added(1, bytes(5000))]
)
def test_sizes_are_those_of_all_within(value: object) -> None:
    size = rough_bytes(value, 1 << 30)
    assert size >= {tuple: 40, dict: 2000, Added: 5000}[type(value)]
    assert rough_bytes([value] * 3, 10) < size + 1000


def test_measuring_a_size_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def parts(kind: type) -> tuple[str, ...]:
        nonlocal looked
        looked += 1
        return ("amount", "ballast") if kind is Added else ()

    monkeypatch.setattr(ring_module, "_parts", parts)
    assert rough_bytes([Added(1)] * 100_000, 900_000) > 900_000
    assert looked < 5000
