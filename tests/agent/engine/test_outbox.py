"""The resend buffer: nothing is forgotten that a receiver may still ask for, and nothing is kept
beyond the window."""

from __future__ import annotations

import pytest
from edgeshard_agent.net.link_sender import Outbox
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.domain.errors import InternalError
from edgeshard.proto.v1 import stage_pb2 as pb


def frames(step: int) -> list[pb.Frame]:
    return [pb.Frame(header=str(step).encode())]


def number(taken: tuple[int, list[pb.Frame]] | None) -> int | None:
    if taken is None:
        return None
    assert taken[0] == int(taken[1][0].header)
    return taken[0]


def test_steps_leave_in_order_and_once() -> None:
    outbox = Outbox(4)
    for step in range(3):
        outbox.put(step, frames(step))
    assert [number(outbox.take()) for _ in range(4)] == [0, 1, 2, None]


def test_a_reconnected_receiver_gets_what_it_lacks() -> None:
    outbox = Outbox(4)
    for step in range(3):
        outbox.put(step, frames(step))
        outbox.take()
    outbox.rewind(1)
    assert [number(outbox.take()) for _ in range(3)] == [1, 2, None]


def test_a_kept_step_is_forwarded_again_without_losing_the_place() -> None:
    outbox = Outbox(4)
    for step in range(3):
        outbox.put(step, frames(step))
    assert number(outbox.take()) == 0
    assert outbox.repeat(0)
    assert not outbox.repeat(2), "it has not been sent once yet"
    assert [number(outbox.take()) for _ in range(4)] == [0, 1, 2, None]


def test_what_left_the_window_cannot_be_asked_for() -> None:
    outbox = Outbox(2)
    for step in range(5):
        outbox.put(step, frames(step))
        outbox.take()
    assert len(outbox) == 2
    with pytest.raises(InternalError):
        outbox.rewind(2)
    with pytest.raises(InternalError):
        outbox.rewind(6)
    assert not outbox.repeat(1)


def test_a_gap_is_refused() -> None:
    with pytest.raises(InternalError):
        Outbox(2).put(1, frames(1))


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.sampled_from(["put", "take", "lose"]), max_size=60))
def test_every_step_arrives_once_whatever_streams_break(window: int, script: list[str]) -> None:
    """The head's rule (step n only after the receiver ran n - window) is all that trimming relies
    on."""
    outbox = Outbox(window)
    received = 0
    put = 0
    in_stream = list[int]()
    for what in [*script, *["take"] * 100]:
        if what == "put" and put - received < window:
            outbox.put(put, frames(put))
            put += 1
        elif what == "take":
            taken = number(outbox.take())
            if taken is not None:
                assert taken == received
                received += 1
        elif what == "lose":
            in_stream.clear()
            outbox.rewind(received)
        assert len(outbox) <= window
    assert received == put
