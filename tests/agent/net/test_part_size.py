"""Parts of a step follow the link's rate: never more than it carries in two seconds, and large if
it is fast."""

from __future__ import annotations

import pytest
from edgeshard_agent.net.link_sender import FIRST_PART_BYTES, PART_S, PartSize
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.wire.frames import LEAST_PART_BYTES, PART_BYTES

BEACON_S = 0.25


class Sending:
    """A link of `rate` bytes a second. The receiver reports a step of several parts at once, other
    steps a keepalive later.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now = 50.0
        self.step = 0
        self.size = PartSize(window=3)

    def send(self, size_bytes: int, late_s: float = 0.0) -> None:
        self.send_all([size_bytes], late_s)

    def send_all(self, sizes: list[int], late_s: float = 0.0) -> None:
        """Passed to the system one directly after the other."""
        for number, size in enumerate(sizes, self.step):
            self.size.note(number, size)
            self.size.sent(number, self.now)
        for size in sizes:
            self.now += size / self.rate
            waits = BEACON_S if size <= self.size.bytes else 0.0
            self.step += 1
            self.size.received(self.step, self.now + waits + late_s)
        self.now += BEACON_S + late_s


def test_a_fast_link_takes_the_largest_parts_from_the_second_step_on() -> None:
    link = Sending(1e9)
    assert link.size.bytes == FIRST_PART_BYTES
    link.send(2 << 20)
    assert link.size.bytes == PART_BYTES
    for size in (1, 8192, 500_000, 3 << 20):
        link.send(size)
        assert link.size.bytes == PART_BYTES, "small steps say nothing against it"


def test_a_slow_link_takes_parts_of_a_quarter_of_a_second() -> None:
    link = Sending(125_000.0)
    link.send(1 << 20)
    assert link.size.bytes == pytest.approx(PART_S * 125_000, rel=0.01)
    link.rate = 12_500
    link.send(1 << 20)
    assert link.size.bytes == LEAST_PART_BYTES
    link.rate = 1e8
    link.send(1 << 20)
    assert link.size.bytes == PART_BYTES


def test_a_receiver_that_was_late_once_is_forgiven() -> None:
    link = Sending(1e9)
    link.send(2 << 20)
    link.send(2 << 20, late_s=1.0)
    assert LEAST_PART_BYTES < link.size.bytes < PART_BYTES
    link.send(2 << 20)
    assert link.size.bytes == PART_BYTES


def test_a_new_stream_says_nothing_of_what_the_one_before_carried() -> None:
    link = Sending(1e9)
    link.size.note(0, 4 << 20)
    link.size.sent(0, link.now)
    link.size.restarted()
    link.size.received(1, link.now + 1e-3)
    assert link.size.bytes == FIRST_PART_BYTES


@settings(deadline=None)
@given(
    st.floats(40e3, 1e10),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 8 << 20), min_size=1, max_size=3),
            st.sampled_from([0.0, 0.0, 0.1, 3.0]),
        ),
        max_size=12,
    ),
)
def test_no_part_takes_longer_than_a_quarter_of_a_second_once_it_was_chosen(
    rate: float, sent: list[tuple[list[int], float]]
) -> None:
    """For any steps and any delay of the reports: a report can only make a link look slower."""
    link = Sending(rate)
    for sizes, late_s in sent:
        link.send_all(sizes, late_s)
        assert LEAST_PART_BYTES <= link.size.bytes <= PART_BYTES
        if link.size.bytes not in (FIRST_PART_BYTES, LEAST_PART_BYTES):
            assert link.size.bytes / rate <= PART_S * (1 + 1e-6)
