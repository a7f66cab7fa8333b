"""Which clients may resume a request, without a socket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.control.requests.request_front import PARKED_LIMIT_S, RequestFront
from edgeshard_coordinator.control.requests.resumptions import (
    COME_BACK_S,
    MOST_ENDED,
    RESERVED_S,
    Claim,
    ResumptionBook,
    Standing,
    digest_of,
)
from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.core.values.quotas import Quota, Quotas
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import (
    AlreadyExistsError,
    DeniedError,
    EdgeShardError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import (
    FinishReason,
    Generation,
    Guide,
    GuideKind,
    Sampling,
    Token,
)
from edgeshard.domain.requests.head import (
    ForgetRequest,
    HeldRequest,
    RequestAccepted,
    RequestEnd,
    StartRequest,
)
from tests.support.heads import say

NAME, OTHER = DeploymentName("tale"), DeploymentName("other")
A, B = (NodeId("id-a"), NodeName("a")), (NodeId("id-b"), NodeName("b"))
ONCE = Generation("once")
LIMIT, SHARE = 20, 12
"""Limit of a deployment of four slots, and one identity's share of it."""
RECORD = DeploymentRecord(
    uid="u1",
    spec=parse_spec({"name": "tale", "model": "tiny", "source": "a", "concurrency": 4}),
    manifest_digest=Digest("d" * 64),
    placement=Placement((PlacedStage(0, *A, "a:7000", LayerRange(0, 6), 1000, 1000),), 16, 8, 1, 1),
    epoch=Epoch(3),
    phase=DeploymentPhase.READY,
    ever_ready=True,
)


class Site:
    """A front over two deployments; after a restart their heads are not attached yet."""

    def __init__(self, *, restarted: bool = False, was_ready: bool = True, **quotas: Quota) -> None:
        self.now = 1000.0
        self.records = {
            name: replace(RECORD, spec=replace(RECORD.spec, name=name), was_ready=was_ready)
            for name in (NAME, OTHER)
        }
        named = {name.replace("_", "/"): quota for name, quota in quotas.items()}
        self.front = RequestFront(self.state, TrafficBook(), lambda: self.now, quotas=Quotas(named))
        self.heads: dict[DeploymentName, Attachment] = {}
        self.front.restore(self.records.values() if restarted else ())
        if not restarted:
            for name in (NAME, OTHER):
                self.attach(name=name)

    def state(self) -> State:
        return State(instance="this run", deployments=self.records)

    def attach(
        self,
        held: Iterable[HeldRequest] = (),
        epoch: int = 3,
        node: tuple[NodeId, NodeName] = A,
        name: DeploymentName = NAME,
        head_for_s: float | None = None,
    ) -> Attachment:
        self.records = {**self.records, name: replace(self.records[name], epoch=Epoch(epoch))}
        self.heads[name] = self.front.attach(name, Epoch(epoch), *node, tuple(held), head_for_s)
        return self.heads[name]

    def start(
        self, id: str, client: str = "client/app", generation: Generation = ONCE, **more: Any
    ) -> RunningRequest:
        return self.front.start(more.pop("model", NAME), generation, RequestId(id), client, **more)

    def back(self, id: str, *tokens: int, **more: Any) -> RunningRequest:
        return self.start(id, emitted=tokens, **more)

    def run(
        self, id: str, prompt_tokens: int = 1, new_tokens: int = 1, *, to_its_end: bool = True
    ) -> None:
        tokens = [
            Token(position, 7, "") for position in range(prompt_tokens, prompt_tokens + new_tokens)
        ]
        end = [RequestEnd(FinishReason.LENGTH, "")] if to_its_end else []
        say(
            self.front,
            self.heads[NAME],
            RequestId(id),
            RequestAccepted((7,) * prompt_tokens),
            *tokens,
            *end,
        )

    def refused(self, id: str, *tokens: int, **more: Any) -> EdgeShardError:
        with pytest.raises(EdgeShardError) as refusal:
            self.back(id, *tokens, **more)
        return refusal.value

    def charged(self, client: str = "client/app") -> float:
        """In tokens beyond a burst of 60, at one a second."""
        with pytest.raises(ResourceExhaustedError) as refusal:
            self.front.quotas.check_debt(client)
        return refusal.value.retry_after_s or 0.0


def held(id: str, client: str = "client/app", tokens: int = 0, **more: Any) -> HeldRequest:
    generation = more.pop("generation", ONCE)
    return HeldRequest(RequestId(id), "a former run", client, digest_of(generation), tokens, **more)


def end_of(request: RunningRequest) -> EdgeShardError | None:
    return request.take(1)[1]


def forgotten(head: Attachment) -> set[str]:
    sent = [head.outgoing.get_nowait() for _ in range(head.outgoing.qsize())]
    return {command.request_id for command in sent if isinstance(command, ForgetRequest)}


def starts(head: Attachment) -> dict[str, StartRequest]:
    sent = [head.outgoing.get_nowait() for _ in range(head.outgoing.qsize())]
    return {start.request_id: start for start in sent if isinstance(start, StartRequest)}


def test_requests_that_ended_bring_no_identity_above_its_share() -> None:
    """A hundred one-token requests, one after the other, and then all of them again, as something
    else or as they were."""
    site, other = Site(), Generation("a long tale", 500, priority=10)
    ids = [f"r{number}" for number in range(100)]
    for id in ids:
        site.start(id)
        site.run(id)
    for id in ids:
        error = site.refused(id, generation=other)
        assert (error.field, error.reason) == ("resume", "NOT_RESUMABLE"), "another generation"
    assert site.front.active_requests(NAME) == 0
    for id in ids[:SHARE]:
        site.back(id)
    for id in ids[SHARE:]:
        assert site.refused(id).field == "requests"
    assert site.front.active_requests(NAME) == SHARE
    site.start("else", "client/else")


def test_a_priority_is_looked_at_whether_resumed_or_not() -> None:
    high = Generation("once", priority=10)
    site = Site(client_app=Quota(max_priority=10))
    site.start("mine", generation=high)
    site.run("mine")
    site.front.quotas._quotas = Quotas()  # it was lowered
    assert isinstance(site.refused("mine", generation=high), DeniedError)
    site = Site(restarted=True)
    assert site.refused("never", generation=high).field == "priority", "before any head attaches"
    site.attach([held("of-a-former-run", generation=high)])
    assert isinstance(site.refused("of-a-former-run", generation=high), DeniedError)


def test_a_client_is_believed_once() -> None:
    """Later it counts as a new request: in debt it waits, and the head may refuse it."""
    site = Site(client_app=Quota(tokens_per_minute=60))
    site.start("mine")
    site.run("mine", prompt_tokens=100, new_tokens=2)
    assert site.charged() == 42.0
    site.back("mine", 7, 7)
    assert starts(site.heads[NAME])["mine"].resumed
    site.run("mine", prompt_tokens=100, new_tokens=0)
    assert site.charged() == 42.0, "what it gets again is not counted again"
    assert site.refused("mine", 7, 7).field == "tokens_per_minute"
    site.now += 43.0
    site.back("mine", 7, 7)
    assert not starts(site.heads[NAME])["mine"].resumed
    site.run("mine", prompt_tokens=100, new_tokens=0)
    assert site.charged() > 40.0, "the third time costs what a new request does"


@pytest.mark.parametrize(
    "claim",
    [
        {"client": "client/thief"},
        {"generation": Generation("once", max_new_tokens=64)},
        {"generation": Generation("one")},
        {"model": OTHER},
        {"tokens": (7, 7, 7)},
        {"scored": 6},
    ],
)
@pytest.mark.parametrize("told_by", ["this run", "a head"])
def test_nobody_is_believed_beyond_what_was_there(claim: dict[str, Any], told_by: str) -> None:
    site = Site(restarted=told_by == "a head")
    if told_by == "a head":
        site.attach([held("mine", tokens=2, scored=5)])
        site.attach(name=OTHER)
    else:
        site.start("mine", scored=5)
        site.run("mine", new_tokens=2)
    more = dict(claim)
    assert site.refused("mine", *more.pop("tokens", (7, 7)), **more).reason == "NOT_RESUMABLE"
    site.back("mine", 7, 7, scored=5)


@pytest.mark.parametrize(
    "claim",
    [
        {"client": "client/thief"},
        {"generation": Generation("one")},
        {"tokens": (7, 8)},
        {"tokens": (7,) * 3},
    ],
)
def test_a_request_that_runs_is_taken_over_by_itself_alone(claim: dict[str, Any]) -> None:
    site = Site()
    running = site.start("mine")
    site.run("mine", new_tokens=2, to_its_end=False)
    more = dict(claim)
    assert isinstance(site.refused("mine", *more.pop("tokens", (7, 7)), **more), AlreadyExistsError)
    assert end_of(running) is None and site.front.active_requests(NAME) == 1
    site.back("mine", 7, 7)
    assert site.front.active_requests(NAME) == 1
    with pytest.raises(UnavailableError, match="another call"):
        raise running._error or AssertionError


def test_a_client_that_comes_too_late_sends_a_new_request() -> None:
    site = Site()
    site.start("mine")
    site.run("mine")
    site.now += COME_BACK_S + 1
    assert site.refused("mine").reason == "NOT_RESUMABLE"


def test_those_who_come_back_take_a_full_deployment_no_more_than_once_over() -> None:
    """However many identities do: their places may have been given away meanwhile."""
    site = Site()
    ids = [(f"r{number}", f"client/{number}") for number in range(3 * LIMIT)]
    for id, client in ids:
        site.start(id, client)
        site.run(id)
    for number in range(LIMIT):
        site.start(f"new{number}", f"client/new{number}")
    for id, client in ids[:LIMIT]:
        site.back(id, client=client)
    assert site.refused(ids[LIMIT][0], client=ids[LIMIT][1]).reason == "OVERLOADED"


# After a restart of the coordinator


def test_who_comes_back_before_the_head_waits_for_what_it_says() -> None:
    site = Site(restarted=True)
    mine = site.back("mine", 7)
    never = site.back("never")
    late = site.back("late", client="client/late")
    assert [end_of(request) for request in (mine, never, late)] == [None] * 3
    assert site.front.active_requests(NAME) == 3 and mine.attachment is None
    head = site.attach([held("mine", tokens=3)])
    assert mine.attachment is head and end_of(mine) is None
    assert list(starts(head)) == ["mine"]
    for request in (never, late):
        error = end_of(request)
        assert isinstance(error, FailedPreconditionError) and error.reason == "NOT_RESUMABLE"
    assert site.refused("never").reason == "NOT_RESUMABLE", "nor afterwards"


@pytest.mark.parametrize("cancels", [True, False])
def test_a_head_computes_for_no_client_that_left_before_it_was_back(cancels: bool) -> None:
    """A client that left silently, as in a network failure, may return: its request begins again at
    the head."""
    site = Site(restarted=True)
    request = site.back("mine", 7)
    site.back("waits")
    if cancels:
        assert site.front.cancel(RequestId("mine"), "client/app")
    else:
        site.front.abandon(request)
    head = site.attach([held("mine", tokens=3), held("waits"), held("unheard")])
    assert forgotten(head) == {"mine"}
    assert site.back("mine", 7, 8).standing is Standing.BELIEVED


def test_a_client_that_left_and_came_again_before_the_head_keeps_its_request() -> None:
    site = Site(restarted=True)
    site.front.abandon(site.back("mine", 7))
    again = site.back("mine", 7)
    head = site.attach([held("mine", tokens=3)])
    assert again.attachment is head and again.standing is Standing.BELIEVED
    assert not forgotten(head)


@pytest.mark.parametrize(
    "claim", [{"client": "client/other"}, {"generation": Generation("another")}]
)
def test_a_false_claim_that_is_given_up_ends_nothing_at_a_head(claim: dict[str, Any]) -> None:
    site = Site(restarted=True)
    site.front.cancel(site.back("mine", **claim).request_id)
    head = site.attach([held("mine", tokens=3)])
    assert not forgotten(head)
    assert site.back("mine").standing is Standing.BELIEVED


def test_a_head_forgets_a_request_whose_client_came_and_left_while_the_head_was_away() -> None:
    site = Site(restarted=True)
    site.front.detach(site.attach([held("mine", tokens=3), held("other")]))
    request = site.back("mine", 7)
    assert request.standing is Standing.BELIEVED
    site.front.abandon(request)
    assert forgotten(site.attach([held("mine", tokens=4), held("other")])) == {"mine"}


def test_a_head_that_comes_too_late_forgets_all_requests_of_a_former_run() -> None:
    site = Site(restarted=True)
    site.now += COME_BACK_S + 1.0
    assert forgotten(site.attach([held("mine", tokens=3), held("over", over=True)])) == {"mine"}


def test_claims_of_clients_that_left_are_bounded() -> None:
    book = ResumptionBook(lambda: 0.0)
    claim = Claim(NAME, "client/app", digest_of(ONCE), 0, 1)
    for number in range(MOST_ENDED + 1):
        book.left(RequestId(f"r{number}"), claim)
    assert not book.is_unwanted(held("r0")) and book.is_unwanted(held("r1"))


def test_who_waits_for_a_head_in_vain_is_told_so_in_time() -> None:
    site = Site(restarted=True)
    mine = site.back("mine")
    site.now += PARKED_LIMIT_S
    site.front.expire()
    error = end_of(mine)
    assert error is not None and error.reason == "NOT_RECOVERED"
    site.attach()
    assert site.refused("mine").reason == "NOT_RESUMABLE", "to have waited makes no request"


def test_ids_that_never_were_fill_no_deployment_after_a_restart() -> None:
    """Not while they wait, nor for others who do."""
    site = Site(restarted=True)
    for client in ("client/one", "client/two", "client/three"):
        for number in range(SHARE):
            site.back(f"{client[7:]}-{number}", client=client)
        assert site.refused(f"{client[7:]}-more", client=client).field == "requests"
    honest = [site.back(f"h{number}", client=f"client/h{number}") for number in range(LIMIT)]
    site.attach([held(f"h{number}", f"client/h{number}") for number in range(LIMIT)])
    assert [end_of(request) for request in honest] == [None] * LIMIT
    assert site.front.active_requests(NAME) == LIMIT


def test_where_nobody_is_told_apart_only_so_many_wait_for_a_head() -> None:
    site = Site(restarted=True)
    for number in range(2 * LIMIT):
        site.back(f"r{number}", client="")
    assert site.refused("more", client="").reason == "OVERLOADED"


def test_a_former_run_keeps_its_places_for_a_while() -> None:
    """Also the places of its identities: neither others' requests nor one's own take them."""
    site = Site(restarted=True)
    site.attach(
        [held(f"mine{number}") for number in range(SHARE)]
        + [held(f"h{number}", f"client/h{number}") for number in range(LIMIT - SHARE - 1)]
        + [held("by-http", "key/app"), held("by-http-too", "key/app")]
    )
    with pytest.raises(ResourceExhaustedError, match="its share"):
        site.start("mine-too")
    site.start("new", "client/new")
    with pytest.raises(ResourceExhaustedError) as refused:
        site.start("newer", "client/newer")
    assert refused.value.reason == "OVERLOADED"
    for number in range(SHARE):
        site.back(f"mine{number}")
    site.now += RESERVED_S + 1
    site.start("newest", "client/newest")
    for number in range(LIMIT - SHARE - 1):
        site.back(f"h{number}", client=f"client/h{number}")
    assert site.refused("mine0", 7).reason == "ALREADY_EXISTS", "it has none"


def test_no_other_request_takes_an_id_that_a_head_has() -> None:
    site = Site(restarted=True)
    site.attach([held("mine")])
    for client in ("client/app", "client/thief"):
        with pytest.raises(AlreadyExistsError):
            site.start("mine", client)
    site.back("mine")


def test_a_head_tells_of_requests_whose_end_the_former_run_had() -> None:
    """Their clients may not have had it. They hold no place."""
    site = Site(restarted=True)
    head = site.attach(
        [held(f"r{number}", f"client/{number}", tokens=2, over=True) for number in range(3 * LIMIT)]
    )
    for number in range(LIMIT):
        site.start(f"new{number}", f"client/new{number}")
    site.back("r0", 7, 7, client="client/0")
    assert starts(head)["r0"].resumed
    site.run("r0", new_tokens=0)
    site.attach([held("r0", "client/0", tokens=2, over=True)])
    assert site.refused("r0", 7, 7, client="client/0").reason == "OVERLOADED", (
        "its client is believed once"
    )


@pytest.mark.parametrize("lost", ["another epoch", "another node", "not ready on disk"])
def test_requests_go_on_where_the_head_was_lost_with_the_coordinator(lost: str) -> None:
    """Up to twice the deployment's limit, since new ones may have come before; what their clients
    have is read as a prompt is."""
    site = Site(
        restarted=True, was_ready=lost != "not ready on disk", client_h0=Quota(tokens_per_minute=60)
    )
    before = [
        site.back(f"h{number}", *(7,) * 50, client=f"client/h{number}")
        for number in range(2 * LIMIT)
    ]
    more = site.back("one-more", client="client/more")
    head = site.attach(
        epoch=4 if lost == "another epoch" else 3, node=B if lost == "another node" else A
    )
    assert [end_of(request) for request in before] == [None] * (2 * LIMIT)
    error = end_of(more)
    assert error is not None and error.reason == "OVERLOADED"
    assert all(start.resumed for start in starts(head).values()), (
        "the head refuses none that the coordinator let in"
    )
    site.run("h0", prompt_tokens=20, new_tokens=0)
    assert site.charged("client/h0") == 10.0, "70 less the 60 of a minute"
    site.run("h1", prompt_tokens=20, new_tokens=0)
    late = site.back("came-after", client="client/late")
    assert late.attachment is head
    site.back("and-after", client="client/later")
    assert site.refused("too-late", client="client/latest").reason == "OVERLOADED"


@pytest.mark.parametrize("waits", [False, True])
def test_who_went_on_with_what_its_head_runs_was_not_believed_by_that(waits: bool) -> None:
    """The coordinator lost it, not its client, which finds room in a full deployment when its
    stream breaks later."""
    site = Site(restarted=True)
    earlier = site.back("mine", 7) if waits else None
    site.attach([held("mine", tokens=1)])
    mine = earlier or site.back("mine", 7)

    def call_breaks() -> None:
        site.front.detach(site.heads[NAME])
        site.front.abandon(mine)  # a request without a head ends with its call
        site.attach()

    call_breaks()
    for number in range(LIMIT):
        site.start(f"new{number}", f"client/new{number}")
    mine = site.back("mine", 7)
    call_breaks()
    assert site.refused("mine", 7).reason == "OVERLOADED", "its client is believed once"


@pytest.mark.parametrize("for_s", [0.0, COME_BACK_S - 1])
def test_what_ended_at_a_head_that_was_lost_before_the_coordinator_goes_on(for_s: float) -> None:
    """Only the lost head knew of its end, which its client may not have received. It comes in as a
    new one does."""
    site = Site(restarted=True, client_app=Quota(requests=1))
    before = site.back("mine", 7)
    head = site.attach([held("other", "client/other")], head_for_s=for_s)
    assert end_of(before) is None and before.attachment is head
    assert site.refused("mine-too").field == "requests"
    assert site.refused("other", client="client/thief").reason == "NOT_RESUMABLE", (
        "what the head has is its client's"
    )


@pytest.mark.parametrize("over", [False, True])
def test_a_head_of_an_earlier_epoch_tells_of_less_than_its_client_has(over: bool) -> None:
    """It lost the request to another head, which continued it and was lost together with the
    coordinator."""
    site = Site(restarted=True)
    head = site.attach([held("mine", tokens=1, over=over)], epoch=4)
    assert site.refused("mine", 7, 7, client="client/thief").reason == "NOT_RESUMABLE"
    assert site.refused("mine", 7, 7, generation=Generation("one")).reason == "NOT_RESUMABLE"
    site.back("mine", 7, 7)
    assert starts(head)["mine"].emitted_tokens == (7, 7)
    site = Site(restarted=True)
    site.attach([held("mine", tokens=1, over=over)])
    assert site.refused("mine", 7, 7).reason == "NOT_RESUMABLE", "no other head had it"


@pytest.mark.parametrize(("epoch", "for_s"), [(3, COME_BACK_S), (1, 0.0), (3, None)])
def test_a_head_that_no_other_was_before_in_time_knows_all_requests(
    epoch: int, for_s: float | None
) -> None:
    """It is the first, or no client is still to come that another had; an older version does not
    say since when."""
    site = Site(restarted=True)
    site.front.restore([replace(RECORD, epoch=Epoch(epoch), was_ready=True)])
    site.attach(epoch=epoch, head_for_s=for_s)
    assert site.refused("never").reason == "NOT_RESUMABLE"


def test_a_head_of_an_older_version_says_only_what_it_has() -> None:
    """A client that names one of them is admitted as a new request is, in its place."""
    site = Site(restarted=True, client_app=Quota(requests=1, tokens_per_minute=60))
    before = site.back("mine", 7)
    head = site.attach([HeldRequest(RequestId(id), "a former run") for id in ("mine", "yours")])
    assert before.attachment is head and site.refused("yours").field == "requests"
    assert site.back("yours", client="client/you").attachment is head
    assert site.refused("never").reason == "NOT_RESUMABLE"


def test_a_deployment_that_no_former_run_had_has_no_requests_of_one() -> None:
    site = Site()
    assert site.refused("never").reason == "NOT_RESUMABLE"
    site = Site(restarted=True)
    site.now += COME_BACK_S + 1
    assert site.refused("never").reason == "NOT_RESUMABLE", "no client waits so long"
    site.attach([held("mine")])
    assert site.refused("mine").reason == "NOT_RESUMABLE"


def test_what_is_remembered_is_bounded() -> None:
    now = [0.0]
    book = ResumptionBook(lambda: now[0])
    claim = Claim(NAME, "client/app", digest_of(ONCE), 3, 1)
    for number in range(MOST_ENDED + 5):
        book.ended(RequestId(f"r{number}"), claim, is_charged=True, is_spent=False)
    now[0] += COME_BACK_S - 1
    with pytest.raises(FailedPreconditionError):
        book.standing_of(RequestId("r4"), claim)
    assert book.standing_of(RequestId("r5"), claim) == (Standing.BELIEVED, True)
    now[0] += 2.0
    book.ended(RequestId("last"), claim, is_charged=True, is_spent=False)
    assert len(book._ended) == 1


def test_a_digest_tells_generations_apart() -> None:
    differing = [
        ONCE,
        Generation("Once"),
        Generation((1, 2)),
        Generation((1, 2, 3)),
        Generation("once", max_new_tokens=9),
        Generation("once", priority=1),
        Generation("once", sampling=Sampling(seed=2**64 - 1)),
        Generation("once", sampling=Sampling(temperature=0.5)),
        Generation("once", sampling=Sampling(logit_bias=((1, 2.0),))),
        Generation("once", sampling=Sampling(logit_bias=((1, 2.5),))),
        Generation("once", stop_strings=("ab", "c")),
        Generation("once", stop_strings=("a", "bc")),
        Generation("once", stop_tokens=(1,)),
        Generation("once", guide=Guide(GuideKind.REGEX, "a")),
        Generation("once", guide=Guide(GuideKind.GRAMMAR, "a")),
        Generation("once", prompt_logprobs=True),
        Generation("\ud800"),
    ]
    assert len({digest_of(generation) for generation in differing}) == len(differing)
    assert digest_of(Generation("once", max_new_tokens=128)) == digest_of(ONCE), (
        "a default is as if it were left out"
    )
