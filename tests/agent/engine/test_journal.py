"""The head's report to the next coordinator, of running requests and of finished ones."""

from __future__ import annotations

from dataclasses import replace

from edgeshard_agent.engine.journal import KEPT_S, MOST_OVER, OVER_S, Journal

from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import FinishReason, Generation, PromptLogprobs, Token
from edgeshard.domain.requests.head import HeadEvent, HeldRequest, RequestEnd, StartRequest

R = RequestId("r")
START = StartRequest(R, Generation("once"), client="client/a", instance="run 1", digest=b"d" * 16)
HELD = HeldRequest(R, "run 1", "client/a", b"d" * 16)


def test_it_says_whose_a_request_is_and_how_far_it_is() -> None:
    journal = Journal()
    journal.open(replace(START, emitted_tokens=(7, 8), scored=3), 0.0)
    assert journal.held(0.0) == (replace(HELD, tokens=2, scored=3),), "before it was read"
    entry = journal.find(R)
    assert entry is not None
    entry.tokens = [Token(4 + index, 7, "") for index in range(2)]
    journal.record(HeadEvent(R, PromptLogprobs(3, (-1.0, -2.0), ((), ()))), 0.0)
    journal.record(HeadEvent(R, Token(6, 9, "")), 0.0)
    assert journal.held(0.0) == (replace(HELD, tokens=3, scored=5),)
    journal.record(HeadEvent(R, RequestEnd(FinishReason.LENGTH, "")), 0.0)
    assert journal.held(KEPT_S) == (replace(HELD, tokens=3, scored=5),), "nobody has its end yet"


def test_a_request_whose_end_the_coordinator_had_is_over_for_a_while() -> None:
    """Its client may not have had it."""
    journal = Journal()
    journal.open(START, 0.0)
    journal.record(HeadEvent(R, Token(2, 7, "")), 0.0)
    journal.forget(R, 1.0)
    journal.forget(RequestId("never"), 1.0)
    over = replace(HELD, tokens=1, over=True)
    assert journal.find(R) is None and journal.held(1.0 + OVER_S) == (over,)
    assert journal.held(1.1 + OVER_S) == ()
    journal.open(replace(START, instance="run 2"), 2.0)
    assert journal.held(2.0) == (replace(HELD, instance="run 2"),), "it runs again"


def test_what_is_over_is_bounded() -> None:
    journal = Journal()
    for number in range(MOST_OVER + 2):
        journal.open(replace(START, request_id=RequestId(f"r{number}")), 0.0)
        journal.forget(RequestId(f"r{number}"), 0.0)
    assert [held.request_id for held in journal.held(0.0)][:1] == ["r2"]
    journal.open(START, OVER_S + 1)
    journal.forget(R, OVER_S + 1)
    assert len(journal._over) == 1
