"""Attachments of heads and the epochs they are of, without a socket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgeshard_coordinator.control.requests.request_front import FAILED_HEADS_LIMIT, RequestFront
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.guesses import NO_GUESSES, GuessCounts
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import (
    DeploymentName,
    Digest,
    Epoch,
    ModelName,
    NodeId,
    NodeName,
    RequestId,
)
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Finished, FinishReason, Generation, Token
from edgeshard.domain.requests.head import (
    CancelRequest,
    LastToken,
    RequestAccepted,
    RequestEnd,
    StartRequest,
)
from tests.support.heads import say

NAME, R = DeploymentName("tale"), RequestId("r")
A, B = (NodeId("id-a"), NodeName("a")), (NodeId("id-b"), NodeName("b"))
RECORD = DeploymentRecord(
    uid="u1",
    spec=parse_spec({"name": "tale", "model": "tiny", "source": "a"}),
    manifest_digest=Digest("d" * 64),
    placement=Placement((PlacedStage(0, *A, "a:7000", LayerRange(0, 6), 1000, 1000),), 16, 8, 1, 1),
    epoch=Epoch(3),
    phase=DeploymentPhase.READY,
)
LOST = UnavailableError("a node went away")


class Site:
    """A front over a state that has one deployment, ready at `epoch`."""

    def __init__(self, backlog_limit: int = 4096) -> None:
        self.epoch = Epoch(3)
        self.now = 0.0
        self.former: Placement | None = None
        self.front = RequestFront(self.state, TrafficBook(), lambda: self.now, backlog_limit)

    def state(self) -> State:
        return State(
            instance="test",
            deployments={
                NAME: replace(RECORD, epoch=self.epoch, former=self.former, ever_ready=True)
            },
        )


@pytest.mark.parametrize("epoch", [2, 3, 4])
def test_a_request_goes_to_the_head_of_the_deployments_epoch(epoch: int) -> None:
    """The state is at the next epoch before the old head's stream has ended, and the other way
    round."""
    site = Site()
    attachment = site.front.attach(NAME, Epoch(epoch), *A)
    if epoch == site.epoch:
        assert site.front.start(NAME, Generation("once"), R).attachment is attachment
        return
    with pytest.raises(UnavailableError) as refused:
        site.front.start(NAME, Generation("once"), R)
    assert refused.value.reason == "DEPLOYMENT_NOT_READY" and not attachment.requests


@pytest.mark.parametrize(("ended", "stays"), [(2, True), (3, False), (4, False)])
@pytest.mark.parametrize("final", [True, False])
def test_the_end_of_an_epoch_ends_its_stream_and_none_above(
    ended: int, stays: bool, final: bool
) -> None:
    """The action that ends epoch 2 may come when the head of epoch 3 is attached. Requests fail at
    the very end."""
    site = Site()
    attachment = site.front.attach(NAME, Epoch(3), *A)
    running = site.front.start(NAME, Generation("once"), R)
    site.front.end_service(NAME, Epoch(ended), LOST, final=final)
    assert site.front.active_requests(NAME) == (not final)
    assert final or (running.attachment is attachment) == stays


@pytest.mark.parametrize(("deadline", "given_up_at"), [(None, 30.0), (100.0, 30.0), (5.0, 4.75)])
def test_a_parked_request_waits_as_long_as_its_client_and_no_longer_than_the_limit(
    deadline: float | None, given_up_at: float
) -> None:
    site = Site()
    attachment = site.front.attach(NAME, Epoch(3), *A)
    running = site.front.start(NAME, Generation("once"), R, deadline=deadline)
    site.front.detach(attachment)
    site.now = given_up_at - 0.01
    site.front.expire()
    assert site.front.active_requests(NAME) == 1
    site.now = given_up_at
    site.front.expire()
    assert site.front.active_requests(NAME) == 0
    _, error = running.take(1)
    assert isinstance(error, UnavailableError) and error.reason == "NOT_RECOVERED"


@pytest.mark.parametrize("deadline", [None, 50.0])
def test_while_its_deployment_moves_a_request_waits_as_long_as_its_client(
    deadline: float | None,
) -> None:
    """The weights to load may be large; afterwards the usual limits apply."""
    site = Site()
    attachment = site.front.attach(NAME, Epoch(3), *A)
    site.front.start(NAME, Generation("once"), R, deadline=deadline)
    site.front.detach(attachment)
    site.former = RECORD.placement
    site.now = 49.0
    site.front.expire()
    assert site.front.active_requests(NAME) == 1
    site.former, site.now = None, 78.9
    site.front.expire()
    assert site.front.active_requests(NAME) == (deadline is None)
    site.now = 79.0
    site.front.expire()
    assert site.front.active_requests(NAME) == 0


def test_a_request_that_comes_while_its_deployment_moves_is_taken() -> None:
    site = Site()
    site.former = RECORD.placement
    running = site.front.start(NAME, Generation("once"), R)
    assert running.attachment is None
    assert site.front.attach(NAME, Epoch(3), *A).requests == {R: running}


def test_a_request_that_no_head_survives_is_given_up() -> None:
    """One after the other is lost before the request has a token: it may be what breaks them."""
    site = Site()
    running = None
    for _ in range(FAILED_HEADS_LIMIT + 1):
        attachment = site.front.attach(NAME, Epoch(3), *A)
        running = running or site.front.start(NAME, Generation("once"), R)
        site.front.detach(attachment)
    assert site.front.active_requests(NAME) == 0 and running is not None
    _, error = running.take(1)
    assert isinstance(error, UnavailableError) and error.reason == "NOT_RECOVERED"


def test_a_cancel_reaches_the_next_head_too() -> None:
    site = Site()
    old = site.front.attach(NAME, Epoch(3), *A)
    site.front.start(NAME, Generation("once"), R)
    assert site.front.cancel(R)
    site.front.detach(old)
    new = site.front.attach(NAME, Epoch(3), *B)
    sent = [new.outgoing.get_nowait() for _ in range(new.outgoing.qsize())]
    assert [type(command) for command in sent] == [StartRequest, CancelRequest]


def test_a_request_that_is_cancelled_while_it_is_parked_ends_at_once() -> None:
    site = Site()
    site.front.detach(site.front.attach(NAME, Epoch(3), *A))
    site.front.attach(NAME, Epoch(3), *A)
    running = site.front.start(NAME, Generation("once"), R)
    assert running.attachment is not None
    site.front.detach(running.attachment)
    assert site.front.cancel(R) and site.front.active_requests(NAME) == 0
    assert running.take(1) == ([Finished(FinishReason.CANCELLED, "", 0, 0)], None)


def test_an_old_stream_that_ends_takes_nothing_from_the_new_one() -> None:
    site = Site()
    old = site.front.attach(NAME, Epoch(3), *A)
    new = site.front.attach(NAME, Epoch(3), *B)
    running = site.front.start(NAME, Generation("once"), R)
    site.front.detach(old)
    assert running.attachment is new and site.front.active_requests(NAME) == 1


@pytest.mark.parametrize("epoch", [2, 4])
def test_what_a_head_says_of_another_epoch_is_dropped(epoch: int) -> None:
    site, stale = Site(), Epoch(epoch)
    head = site.front.attach(NAME, Epoch(3), *A)
    running = site.front.start(NAME, Generation("once"), R)
    say(site.front, head, R, RequestAccepted((1, 2)), epoch=stale)
    assert running.prompt_tokens is None
    say(site.front, head, R, RequestAccepted((5, 6, 7)))
    token, end = Token(3, 66, "<66>"), RequestEnd(FinishReason.STOP, "")
    say(site.front, head, R, token, LastToken(token, end), end, LOST, epoch=stale)
    assert (
        not running.emitted
        and site.front.active_requests(NAME) == 1
        and site.front.reports.dropped_messages == 5
    )
    say(site.front, head, R, Token(3, 10, "<10>"))
    assert list(running.emitted) == [10]


@pytest.mark.parametrize("epoch", [3, 4])
def test_a_stream_that_another_one_replaced_says_nothing_that_counts(epoch: int) -> None:
    """For any epoch in its messages: the request continues with the new stream."""
    site = Site()
    old = site.front.attach(NAME, Epoch(3), *A)
    running = site.front.start(NAME, Generation("once"), R)
    say(site.front, old, R, RequestAccepted((5, 6, 7)), Token(3, 10, "<10>"))
    site.epoch = Epoch(4)
    new = site.front.attach(NAME, Epoch(4), *B)
    end = RequestEnd(FinishReason.STOP, "")
    say(
        site.front,
        old,
        R,
        Token(4, 66, "<66>"),
        LastToken(Token(4, 66, "<66>"), end),
        end,
        LOST,
        epoch=Epoch(epoch),
    )
    assert running.emitted == [10] and site.front.reports.dropped_messages == 4
    say(site.front, new, R, Token(4, 11, "<11>"))
    assert running.emitted == [10, 11] and site.front.active_requests(NAME) == 1


def test_an_end_that_comes_with_a_token_out_of_its_place_does_not_count() -> None:
    """A token between them is missing: the client would take the answer for whole."""
    site = Site()
    head = site.front.attach(NAME, Epoch(3), *A)
    running = site.front.start(NAME, Generation("once"), R)
    say(
        site.front,
        head,
        R,
        RequestAccepted((5, 6, 7)),
        LastToken(Token(4, 66, ""), RequestEnd(FinishReason.STOP, "")),
    )
    assert (
        not running.emitted
        and site.front.active_requests(NAME) == 1
        and site.front.reports.dropped_messages == 1
    )


def test_the_token_at_which_a_slow_client_is_given_up_counts_and_so_does_its_end() -> None:
    """Else the head's word that it has finished would be passed over, and the request kept its
    place for ever."""
    site = Site(backlog_limit=1)
    head = site.front.attach(NAME, Epoch(3), *A)
    running = site.front.start(NAME, Generation("once"), R)
    say(site.front, head, R, RequestAccepted((5, 6, 7)), Token(3, 10, "<10>"))
    assert running.emitted == [10] and site.front.reports.dropped_messages == 0
    taken, error = running.take(9)
    assert taken == [] and error is not None and error.reason == "SLOW_READER"
    assert head.outgoing.get_nowait() and head.outgoing.get_nowait() == CancelRequest(R)
    say(site.front, head, R, RequestEnd(FinishReason.LENGTH, ""))
    assert site.front.active_requests(NAME) == 0


@pytest.mark.parametrize("with_token", [True, False])
def test_guesses_count_with_the_request_that_ends_unless_they_brought_more_than_it_has(
    with_token: bool,
) -> None:
    """By name and model; also when the end comes by itself. Right guesses after the answer's end
    were counted, too."""
    site = Site()
    head = site.front.attach(NAME, Epoch(3), *A)
    counted = [GuessCounts.of({(0, 0): 2, (7, 7): 1}), GuessCounts.of({(7, 7): 40})]
    for guesses in counted:
        site.front.start(NAME, Generation("once"), R)
        end = RequestEnd(FinishReason.STOP, "", guesses)
        tokens = [Token(3 + index, 10 + index, "x") for index in range(4)]
        *first, last = tokens
        say(site.front, head, R, RequestAccepted((5, 6, 7)), *first)
        say(site.front, head, R, *([LastToken(last, end)] if with_token else [last, end]))
    traffic = site.front.traffic.of(NAME, RECORD.model)
    assert traffic.requests == 2 and traffic.guesses == counted[0]
    assert site.front.traffic.guesses_of_model(RECORD.model) == counted[0]
    assert site.front.traffic.guesses_of_model(ModelName("other")) == NO_GUESSES
