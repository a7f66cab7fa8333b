"""The replica that gets a request, and the replica that continues the requests of a lost one,
without a socket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgeshard_coordinator.control.requests import replicas
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.core.values.quotas import most_requests
from edgeshard_coordinator.core.values.state import DeploymentRecord, KnownNode, State

from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import (
    EdgeShardError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.requests.generation import Generation, Token
from edgeshard.domain.requests.head import ForgetRequest, HeldRequest, RequestAccepted, StartRequest
from tests.support.heads import say

LOST = UnavailableError("a node went away")
SPEC = parse_spec({"name": "tale", "model": "tiny", "replicas": 2, "concurrency": 2})
ONE, TWO = (DeploymentName(f"tale.{number}") for number in (1, 2))


def node_of(name: DeploymentName) -> tuple[NodeId, NodeName]:
    letter = "ab"[int(name[-1]) - 1]
    return NodeId(f"id-{letter}"), NodeName(letter)


class Site:
    """A front over two replicas, each ready on a node of its own. Nodes have the same `bits` unless
    the test sets others.
    """

    def __init__(
        self,
        bits: tuple[str, str] = ("same", "same"),
        instance: str = "now",
        *,
        prefix_cache: bool = False,
    ) -> None:
        self.instance, self.now = instance, 0.0
        self.records: dict[DeploymentName, DeploymentRecord] = {}
        self.nodes: dict[NodeId, KnownNode] = {}
        for spec, fingerprint in zip(
            replace(SPEC, prefix_cache=prefix_cache).numbered(2), bits, strict=True
        ):
            node_id, node_name = node_of(DeploymentName(spec.name))
            facts = DeviceFacts("cpu", "x", 1, 1, 1, False, "1", fingerprint)
            self.nodes[node_id] = KnownNode(node_id, node_name, f"{node_name}:1", 1, facts)
            stage = PlacedStage(
                0, node_id, node_name, f"{node_name}:1", LayerRange(0, 6), 1000, 1000
            )
            record = DeploymentRecord(
                uid=spec.name,
                spec=spec,
                manifest_digest=Digest("d" * 64),
                placement=Placement((stage,), 16, 8, 1, 1),
                epoch=Epoch(3),
                phase=DeploymentPhase.READY,
                ever_ready=True,
                was_ready=True,
            )
            self.records[record.name] = record
        self.front = RequestFront(self.state, TrafficBook(), lambda: self.now)

    def state(self) -> State:
        return State(instance=self.instance, nodes=self.nodes, deployments=self.records)

    def set(self, name: DeploymentName, phase: DeploymentPhase, **more: object) -> None:
        self.records[name] = replace(self.records[name], phase=phase, **more)  # type: ignore[arg-type]

    def attach(self, name: DeploymentName, held: tuple[HeldRequest, ...] = ()) -> Attachment:
        return self.front.attach(name, self.records[name].epoch, *node_of(name), held, 1000.0)

    def lose(self, name: DeploymentName, *, final: bool = False) -> None:
        self.set(name, DeploymentPhase.DELETING if final else DeploymentPhase.WAITING)
        self.front.end_service(name, Epoch(3), LOST, final=final)


def sent(attachment: Attachment) -> list[object]:
    return [attachment.outgoing.get_nowait() for _ in range(attachment.outgoing.qsize())]


def begin(site: Site, id: str, *tokens: int) -> tuple[RunningRequest, Attachment]:
    """A request of three prompt tokens, with these tokens of its answer."""
    running = site.front.start("tale", Generation("once"), RequestId(id))
    assert running.attachment is not None
    say(site.front, running.attachment, running.request_id, RequestAccepted((1, 2, 3)))
    for index, token in enumerate(tokens):
        say(site.front, running.attachment, running.request_id, Token(3 + index, token, "x"))
    return running, running.attachment


def test_requests_take_turns_and_go_where_fewest_are() -> None:
    site = Site()
    site.attach(ONE)
    site.attach(TWO)
    went = [
        site.front.start("tale", Generation("once"), RequestId(f"r{number}")).deployment
        for number in range(4)
    ]
    assert went == [ONE, TWO, ONE, TWO]
    for id in ("r1", "r3"):
        request = site.front._requests[RequestId(id)]
        site.front._requests.remove(request)
    assert site.front.start("tale", Generation("once"), RequestId("r4")).deployment == TWO
    assert site.front.start("tale.1", Generation("once"), RequestId("r5")).deployment == ONE


def test_a_conversation_stays_where_its_beginning_is_cached_unless_others_wait_less() -> None:
    """By its client and its beginning, also a longer one; the text itself is nowhere."""
    site = Site(prefix_cache=True)
    site.attach(ONE)
    site.attach(TWO)
    said = "secret " * 200

    def went(id: str, prompt: str | tuple[int, ...], client: str = "client/x") -> DeploymentName:
        return site.front.start("tale", Generation(prompt), RequestId(id), client).deployment

    assert went("r1", said) == ONE
    assert went("r2", "another " * 200) == TWO
    assert went("r3", "a third " * 200) == ONE
    assert went("r4", f"{said} and so on") == ONE, "one request more than the other has"
    assert went("r5", f"{said} and on") == TWO, "two more are too many"
    assert went("r6", said, "client/y") == TWO, "nobody shares another's cache"
    assert went("r7", tuple(range(200))) == ONE
    assert went("r8", tuple(range(300))) == ONE
    book = site.front._replicas._prefixes
    assert len(book._known) > 10 and not any(b"secret" in mark for mark in book._known)


def test_beginnings_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "MOST_KNOWN", 8)
    book = replicas.PrefixBook()
    kept = [book.marks(DeploymentName("tale"), "x", (number,) * 200) for number in range(4)]
    for marks in kept:
        assert len(marks) == 3
        book.went_to(marks, ONE)
    assert [book.holder(marks) for marks in kept] == [None, ONE, ONE, ONE] and len(book._known) == 8
    assert book.holder(book.marks(DeploymentName("tale"), "x", (1,) * 63)) is None
    assert book.holder(book.marks(DeploymentName("other"), "x", (3,) * 200)) is None


def test_limits_are_those_of_all_replicas_that_are_there() -> None:
    site = Site()
    site.attach(ONE)
    site.attach(TWO)
    limit = most_requests(2)
    for number in range(2 * limit):
        site.front.start("tale", Generation("once"), RequestId(f"r{number}"))
    with pytest.raises(ResourceExhaustedError):
        site.front.start("tale", Generation("once"), RequestId("more"))
    assert [site.front.active_requests(name) for name in (ONE, TWO)] == [limit, limit]


def test_one_that_is_not_ready_gets_no_request_and_none_is_refused_for_it() -> None:
    site = Site()
    site.attach(TWO)
    site.set(ONE, DeploymentPhase.LOADING)
    assert [
        site.front.start("tale", Generation("once"), RequestId(id)).deployment for id in "rs"
    ] == [TWO, TWO]
    site.lose(TWO)
    with pytest.raises(UnavailableError) as refused:
        site.front.start("tale", Generation("once"), RequestId("t"))
    assert refused.value.reason == "DEPLOYMENT_NOT_READY"


@pytest.mark.parametrize("final", [False, True])
def test_requests_of_a_lost_replica_go_on_behind_their_tokens_at_the_other(final: bool) -> None:
    """With the prompt's tokens and the seed they had; the other's own request stays as it is."""
    site = Site()
    one, two = site.attach(ONE), site.attach(TWO)
    running, _ = begin(site, "r", 7, 8)
    own, _ = begin(site, "s")
    sent(two)
    site.lose(ONE, final=final)
    (start,) = sent(two)
    assert isinstance(start, StartRequest) and start.request_id == "r" and start.resumed
    assert start.emitted_tokens == (7, 8) and start.generation.prompt == (1, 2, 3)
    assert {running.deployment, own.deployment} == {TWO} and not one.requests
    # The returned head is ordered to forget it, and continues its own requests.
    site.set(ONE, DeploymentPhase.READY)
    held = HeldRequest(RequestId("r"), site.instance, tokens=2)
    assert sent(site.attach(ONE, (held,))) == [ForgetRequest(RequestId("r"))]


def test_tokens_of_other_bits_are_never_mixed() -> None:
    """A request with tokens waits for its own replica; one without continues at once."""
    for bits in (("one", "other"), ("", "")):
        site = Site(bits)
        one, two = site.attach(ONE), site.attach(TWO)
        running, _ = begin(site, "r", 7)
        begin(site, "s")
        site.front.start("tale", Generation("once"), RequestId("t"))
        assert set(one.requests) == {"r", "t"}
        site.lose(ONE)
        site.front.expire()
        assert set(two.requests) == {"s", "t"} and site.front.active_requests(ONE) == 1
        site.now = 30.0
        site.front.expire()
        _, error = running.take(9)
        assert (
            isinstance(error, UnavailableError)
            and error.reason == "NOT_RECOVERED"
            and "tale.1" in error.message
        )


def test_a_request_waits_for_whichever_replica_is_back_first() -> None:
    site = Site()
    site.attach(ONE)
    site.attach(TWO)
    begin(site, "r", 7)
    site.lose(TWO)
    site.lose(ONE)
    assert site.front.active_requests(ONE) == 1
    site.set(TWO, DeploymentPhase.READY)
    two = site.attach(TWO)
    site.front.expire()
    assert set(two.requests) == {"r"}


def test_what_an_operator_moves_waits_for_its_own_replica() -> None:
    site = Site()
    site.attach(ONE)
    site.attach(TWO)
    begin(site, "r", 7)
    site.set(ONE, DeploymentPhase.LOADING, former=site.records[ONE].placement)
    site.front.end_service(ONE, Epoch(3), LOST, final=False)
    site.front.expire()
    assert site.front.active_requests(ONE) == 1


@pytest.mark.parametrize("order", [(ONE, TWO), (TWO, ONE)])
@pytest.mark.parametrize("holder", [ONE, TWO, None])
def test_a_client_that_comes_back_finds_the_replica_that_has_its_request(
    order: tuple[DeploymentName, ...], holder: DeploymentName | None
) -> None:
    """After a restart of the coordinator, whichever head attaches first. A request that neither
    head has was never admitted.
    """
    site = Site(instance="new")
    site.front.restore(site.records.values())
    generation = Generation("once")
    running = site.front.start("tale", generation, RequestId("r"), emitted=(7,))
    for name in order:
        held = HeldRequest(RequestId("r"), "old", digest=running.digest, tokens=2)
        attachment = site.attach(name, (held,) if name == holder else ())
        if name == holder:
            assert set(attachment.requests) == {"r"} and running.deployment == holder
    _, error = running.take(9)
    assert (error is None) == (holder is not None)
    assert holder is not None or (
        isinstance(error, EdgeShardError) and error.reason == "NOT_RESUMABLE"
    )


def test_a_client_that_comes_back_is_not_kept_waiting_by_a_replica_that_never_served() -> None:
    site = Site(instance="new")
    site.front.restore(site.records.values())
    site.set(ONE, DeploymentPhase.FAILED, ever_ready=False)
    running = site.front.start("tale", Generation("once"), RequestId("r"), emitted=(7,))
    held = HeldRequest(RequestId("r"), "old", digest=running.digest, tokens=2)
    assert set(site.attach(TWO, (held,)).requests) == {"r"}


def test_an_id_that_is_used_again_leads_to_no_lost_replica() -> None:
    site = Site()
    site.attach(ONE)
    site.attach(TWO)
    begun = site.front.start("tale", Generation("once"), RequestId("r"))
    site.front._requests.remove(begun)
    site.lose(ONE)
    assert site.front.start("tale", Generation("once"), RequestId("r")).deployment == TWO


def test_a_model_of_one_name_with_replicas_is_not_ambiguous() -> None:
    site = Site()
    site.attach(ONE)
    site.attach(TWO)
    assert site.front.start("tiny", Generation("once"), RequestId("r")).deployment == ONE
    assert site.front.served.find("tale", frozenset({"tale"})).served_name == "tale"
    assert [record.served_name for record in site.front.served.ready()] == ["tale"]
    other = DeploymentName("other")
    site.records[other] = replace(
        site.records[ONE], spec=parse_spec({"name": "other", "model": "tiny"})
    )
    with pytest.raises(InvalidArgumentError, match=r"name one of other, tale$"):
        site.front.start("tiny", Generation("once"), RequestId("s"))
