"""When a link is suspect, and when the incident is over: by a clock that the tests move."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.domain.requests.link import LinkBeacon
from edgeshard.rpc.link_watch import (
    BEACON_S,
    FIRST_S,
    LONGEST_S,
    SUSPECT_S,
    TICK_S,
    LinkFault,
    LinkWatch,
)

SLACK_S = 2 * TICK_S
"""A tick is late by up to a period, and its data is at most a period old."""


@dataclass
class Link:
    """A sender's loop and the link's other end, played at the speed of the loop's ticks.

    A receiver takes `rate` bytes a second and answers every `BEACON_S`, unless it is `dead`; a
    `deaf` one answers and receives nothing.
    """

    now: float = 100.0
    dead: bool = False
    deaf: bool = False
    rate: float = 1e9
    sent_steps: int = 0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    done_bytes: list[float] = field(default_factory=list)
    beacon_at: float = 0.0
    faults: list[tuple[float, LinkFault]] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = LinkWatch(self.now)

    @property
    def next_step(self) -> int:
        return sum(self.received_bytes >= end for end in self.done_bytes)

    def welcome(self) -> None:
        """A stream is open; all that is not there comes again."""
        self.watch.welcomed(self.next_step, self.now)
        self.beacon_at = self.now
        for step in range(self.next_step, self.sent_steps):
            self.watch.sent(step, self.now)

    def send(self, size_bytes: float) -> None:
        self.sent_bytes += size_bytes
        self.done_bytes.append(self.sent_bytes)
        self.watch.sent(self.sent_steps, self.now)
        self.sent_steps += 1

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.step(TICK_S)

    def step(self, seconds: float) -> None:
        """The sender's loop runs this much later; keepalives that have arrived are read first or
        last, at random."""
        self.now += seconds
        if not (self.dead or self.deaf):
            self.received_bytes = min(self.sent_bytes, self.received_bytes + seconds * self.rate)
        fault = self.watch.tick(self.now)
        if fault is not None:
            self.faults.append((self.now, fault))
        if not self.dead and self.now >= self.beacon_at:
            self.beacon_at = self.now + BEACON_S
            if self.watch.beacon(LinkBeacon(int(self.received_bytes), self.next_step), self.now):
                self.recoveries.append(self.now)


@pytest.fixture
def link() -> Link:
    link = Link()
    link.welcome()
    return link


def test_a_link_that_is_used_and_one_that_is_idle_are_not_suspect(link: Link) -> None:
    for _ in range(20):
        link.run(1.0)
        link.send(1e6)
    link.run(60.0)
    assert not link.faults and not link.recoveries


@pytest.mark.parametrize("sent", [0, 1000], ids=["idle", "owing"])
def test_a_receiver_that_says_nothing_is_suspect_once(link: Link, sent: int) -> None:
    link.run(5.0)
    link.dead = True
    if sent:
        link.send(sent)
    began = link.now
    link.run(60.0)
    (first_at, first), *later = link.faults
    assert SUSPECT_S - BEACON_S <= first_at - began <= SUSPECT_S + SLACK_S
    assert first.is_new and later and not any(fault.is_new for _, fault in later), (
        "one incident is told once"
    )
    gaps = [at - before for (before, _), (at, _) in zip(link.faults, link.faults[1:], strict=False)]
    assert gaps[0] == pytest.approx(2 * SUSPECT_S, abs=SLACK_S) and gaps[-1] == pytest.approx(
        LONGEST_S, abs=SLACK_S
    )


def test_bytes_that_do_not_come_in_are_noticed_although_the_receiver_answers(link: Link) -> None:
    link.run(5.0)
    link.deaf = True
    link.run(30.0)
    assert not link.faults, "nothing is owed"
    link.send(1000)
    began = link.now
    link.run(3.0)
    ((at, fault),) = link.faults
    assert SUSPECT_S <= at - began <= SUSPECT_S + SLACK_S and fault.is_new


def test_a_step_that_comes_in_slowly_is_progress(link: Link) -> None:
    link.rate = 16e3
    link.send(1e6)
    link.run(70.0)
    assert link.next_step == 1 and not link.faults


def test_an_incident_is_over_when_what_is_owed_comes_in(link: Link) -> None:
    link.deaf = True
    link.send(1000)
    link.run(2.5)
    assert len(link.faults) == 1
    link.welcome()
    link.run(1.0)
    assert not link.recoveries, (
        "it answers as it did before; a hello came through, and what is owed does not"
    )
    link.deaf = False
    link.run(1.0)
    assert len(link.recoveries) == 1
    link.dead = True
    link.run(3.0)
    assert [fault.is_new for _, fault in link.faults] == [True, True], "another incident"


def test_a_link_that_is_lost_and_not_open_again_in_time_is_suspect(link: Link) -> None:
    link.run(5.0)
    link.dead = True
    began = link.now
    link.watch.closed(answered=False, now=link.now)
    for _ in range(15):
        link.run(0.1)
        # refused by the system: there is no listener
        link.watch.closed(answered=False, now=link.now)
    assert not link.faults
    link.run(1.0)
    assert link.faults[0][0] - began == pytest.approx(SUSPECT_S, abs=SLACK_S)


def test_a_neighbour_that_refuses_is_there(link: Link) -> None:
    """As one whose stage is not prepared yet: the link to it works."""
    link.dead = True
    for _ in range(50):
        link.watch.closed(answered=True, now=link.now)
        link.run(1.0)
    assert not link.faults


def test_a_link_that_never_works_is_told_once_and_dialled_anew() -> None:
    link = Link(dead=True)
    link.run(4 * LONGEST_S)
    assert [fault.is_new for _, fault in link.faults] == [True] + [False] * (len(link.faults) - 1)
    assert len(link.faults) >= 3 and link.faults[0][0] - 100.0 == pytest.approx(
        FIRST_S, abs=SLACK_S
    )


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("run"), st.floats(0.1, 3.0)),
            st.tuples(st.just("stand still"), st.floats(0.1, 30.0)),
            st.tuples(st.just("send"), st.floats(1.0, 2e6)),
            st.tuples(st.just("rate"), st.floats(2e5, 1e9)),
            st.tuples(st.just("new stream"), st.just(0.0)),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_a_link_that_works_is_never_suspect_and_one_that_died_always(
    script: list[tuple[str, float]], is_deaf: bool
) -> None:
    """However long the sender's own loop stands still in between."""
    link = Link()
    link.welcome()
    for what, much in script:
        match what:
            case "run":
                link.run(much)
            case "stand still":
                link.step(much)
            case "send":
                link.send(much)
            case "rate":
                link.rate = much
            case "new stream":
                link.watch.closed(answered=False, now=link.now)
                link.welcome()
    assert not link.faults and not link.recoveries
    link.send(1e3)
    link.dead, link.deaf = not is_deaf, is_deaf
    if script and script[0][0] == "stand still":
        link.step(script[0][1])
    began = link.now
    link.run(4.0)
    at, fault = link.faults[0]
    # Bytes that arrived just before count as progress until the keepalive that reports them.
    assert (
        SUSPECT_S - BEACON_S - SLACK_S <= at - began <= SUSPECT_S + BEACON_S + SLACK_S
        and fault.is_new
    )
