"""The book of requests that clients may resume. A resumption is accepted if the coordinator or a
head knows the request.

The coordinator knows the requests of its own run: they run, or ended lately. The deployment's head
knows the requests of a former run. It reports them when it attaches, including ended ones; until
then a request waits. A client's resumption is accepted once, for the request that it had, and with
no more of it than was sent.

A request that the head does not report was never admitted, unless another head was lost together
with the coordinator or shortly before. No head was lost with it if the disk has the deployment as
ready, with the epoch and node of the head that attaches. There are three reasons. A deployment is
ready only once its head has received all running requests. Each loss of a head is another epoch. An
epoch is on disk before any node prepares it. If a head was lost earlier, only the former run knew
of its ended requests. So the head must also have been there for `COME_BACK_S`. In every other case
a request may have been another head's, and is admitted if every limit allows it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, auto
from hashlib import blake2b
from typing import Any

from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.domain.identity import KEY_ROLE
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, RequestId
from edgeshard.domain.requests.generation import Generation
from edgeshard.domain.requests.head import MAX_HELD, HeldRequest

COME_BACK_S = 180.0
"""Seconds after the end of its call in which a client may resume: it tries for 60 s, and may notice
the end late."""
RESERVED_S = 15.0
"""Seconds for which the place of a request is reserved that a head has from a former run. A live
client tries twice a second, and dials at least every 2 s."""
FIRST_EPOCH = 1
"""The one epoch that no other head can have served before."""
MOST_ENDED = 20_000
"""Requests that are remembered so; the oldest is forgotten first."""


class Standing(Enum):
    """The resumption status of a request, which decides the limits that apply. Its priority and its
    identity's places always count."""

    NEW = auto()
    """All limits count."""
    BELIEVED = auto()
    """The request was admitted before: neither its identity's debt nor a full deployment refuses
    it."""
    REPLAYED = auto()
    """Another head may have had the request: it counts as a new one, but passes a full deployment,
    and the head takes it."""
    AWAITING = auto()
    """Its deployment's head has not named its requests of a former run yet."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of a request that a client has, by its own claim or a head's report: the number of
    new `tokens`, and log-probabilities of the prompt before position `scored`."""

    deployment: DeploymentName
    client: str
    digest: bytes
    tokens: int
    scored: int

    def is_of_one(self, other: Claim) -> bool:
        """Whether the other is of the same request, with more or less of it."""
        return (other.deployment, other.client, other.digest) == (
            self.deployment,
            self.client,
            self.digest,
        )

    def covers(self, other: Claim) -> bool:
        """Whether the other is of the same request, with no more of it."""
        return self.is_of_one(other) and other.tokens <= self.tokens and other.scored <= self.scored


@dataclass(frozen=True, slots=True)
class _Ended:
    """`is_spent`: a resumption was accepted already. `is_charged`: its prompt was counted.
    `is_told`: a head reported it."""

    claim: Claim
    at: float
    is_charged: bool
    is_spent: bool
    is_told: bool = False


@dataclass(slots=True)
class ResumptionBook:
    """`now` returns seconds of a steady clock. A claim of another client is refused like a claim
    without any request."""

    now: Callable[[], float]
    began_at: float = field(init=False)
    _ended: OrderedDict[RequestId, _Ended] = field(default_factory=OrderedDict)
    _held_claims: dict[RequestId, tuple[Claim, float]] = field(default_factory=dict)
    """The requests that heads have of a former run, and since when that is known; without a digest
    from an older head."""
    _left: OrderedDict[RequestId, Claim] = field(default_factory=OrderedDict)
    """Claims of clients that resumed and left again before a head reported their requests."""
    _served: Mapping[DeploymentName, tuple[Epoch, NodeId] | None] = field(default_factory=dict)
    _lost_heads: dict[DeploymentName, bool] = field(default_factory=dict)
    """Whether another head had requests that this one cannot know, of each deployment whose head
    attached in this run."""

    def __post_init__(self) -> None:
        self.began_at = self.now()

    def restore(self, served: Mapping[DeploymentName, tuple[Epoch, NodeId] | None]) -> None:
        """Enter the deployments of a former run; for those that were ready on disk, the epoch and
        the head's node."""
        self._served = served

    def ended(
        self, request_id: RequestId, claim: Claim, *, is_charged: bool, is_spent: bool
    ) -> None:
        """Note the end of a request whose client may resume it, if the client does not know of the
        end."""
        self._remember(request_id, _Ended(claim, self.now(), is_charged, is_spent))

    def left(self, request_id: RequestId, claim: Claim) -> None:
        """Note that a client left which waited for the word of a head: the head need not finish its
        request."""
        self._left[request_id] = claim
        while len(self._left) > MOST_ENDED:
            self._left.popitem(last=False)

    def returned(self, request_id: RequestId) -> None:
        """Note that a client waits for a request again."""
        self._left.pop(request_id, None)

    def is_unwanted(self, item: HeldRequest) -> bool:
        """Whether a request of a former run that a head has, and that does not run here, has no
        client any more.

        Its client left in this run, or can no longer resume. Claims of other clients, and of other
        requests by the same id, do not count.
        """
        if self._is_late:
            return True
        ended = self._ended.get(item.request_id)
        here = (
            ended.claim
            if ended is not None and not ended.is_told
            else self._left.get(item.request_id)
        )
        return here is not None and (here.client, here.digest) == (item.client, item.digest)

    def _remember(self, request_id: RequestId, ended: _Ended) -> None:
        now, self._ended[request_id] = ended.at, ended
        self._ended.move_to_end(request_id)
        while (
            len(self._ended) > MOST_ENDED or next(iter(self._ended.values())).at + COME_BACK_S < now
        ):
            self._ended.popitem(last=False)

    def reported(
        self,
        deployment: DeploymentName,
        epoch: Epoch,
        node_id: NodeId,
        held_requests: Iterable[HeldRequest],
        settled_ids: Collection[RequestId],
        head_for_s: float | None = None,
    ) -> None:
        """Note the requests of former runs that a head has as it attaches, at most `MAX_HELD` of a
        deployment.

        `settled_ids` are the requests here that wait for no word, and `head_for_s` the seconds that
        it has been the head, None if it did not report them.
        """
        is_new = head_for_s is not None and head_for_s < COME_BACK_S and epoch > FIRST_EPOCH
        self._lost_heads.setdefault(
            deployment, is_new or self._served.get(deployment) != (epoch, node_id)
        )
        if self._is_late:
            return
        left = MAX_HELD - sum(
            claim.deployment == deployment for claim, _ in self._held_claims.values()
        )
        for item in held_requests:
            if item.request_id in self._ended or item.request_id in settled_ids:
                continue
            claim = Claim(deployment, item.client, item.digest, item.tokens, item.scored)
            if not item.over and self.is_unwanted(item):
                # The head forgets it. If its client is back after all, its claim is accepted once.
                self._remember(
                    item.request_id, _Ended(claim, self.now(), is_charged=True, is_spent=False)
                )
            elif not item.over:
                # If two replicas have it, one continued it when the other was lost.
                known_of = self._held_claims.get(item.request_id)
                is_more = known_of is None or known_of[0].tokens < claim.tokens
                left -= known_of is None
                if is_more and left >= 0:
                    self._held_claims[item.request_id] = (claim, self.now())
            elif item.digest:
                self._remember(
                    item.request_id,
                    _Ended(claim, self.now(), is_charged=True, is_spent=False, is_told=True),
                )

    def standing_of(self, request_id: RequestId, claim: Claim) -> tuple[Standing, bool]:
        """The status of a request whose client tries to resume it, and whether its prompt was
        counted.

        Raises FailedPreconditionError naming `resume` for an unknown request.
        """
        if (
            ended := self._ended.get(request_id)
        ) is not None and self.now() <= ended.at + COME_BACK_S:
            if not ended.claim.covers(claim):
                if ended.is_told and self._went_on_elsewhere(ended.claim, claim):
                    return Standing.REPLAYED, False
                raise _refused(request_id)
            return (
                (Standing.NEW, False) if ended.is_spent else (Standing.BELIEVED, ended.is_charged)
            )
        # No client waits for that long.
        if self._is_late or claim.deployment not in self._served:
            raise _refused(request_id)
        if (entry := self._held_claims.get(request_id)) is not None:
            reported_claim, _ = entry
            if not reported_claim.digest and reported_claim.deployment == claim.deployment:
                return Standing.REPLAYED, False
            if reported_claim.covers(claim):
                return Standing.BELIEVED, True
            if self._went_on_elsewhere(reported_claim, claim):
                return Standing.REPLAYED, False
            raise _refused(request_id)
        if claim.deployment not in self._lost_heads:
            return Standing.AWAITING, False
        if not self._lost_heads[claim.deployment]:
            raise _refused(request_id)
        return Standing.REPLAYED, False

    def _went_on_elsewhere(self, reported_claim: Claim, claim: Claim) -> bool:
        """Whether the head that reported a request may have been its head before the one that was
        lost."""
        return reported_claim.is_of_one(claim) and self._lost_heads.get(claim.deployment, False)

    def take(self, request_id: RequestId) -> None:
        """Strike out a request that runs here now: its resumption is accepted only once."""
        self._ended.pop(request_id, None)
        self._held_claims.pop(request_id, None)

    def reserved(self, but: RequestId) -> list[Claim]:
        """The claims whose places are reserved, except the claim of one request."""
        if self._is_late:
            self._held_claims.clear()
        since = self.now() - RESERVED_S
        return [
            claim
            for id, (claim, at) in self._held_claims.items()
            if at >= since and id != but and _can_return(claim)
        ]

    def deployment_of(self, request_id: RequestId) -> DeploymentName | None:
        """The deployment that had a request last, as far as it was reported."""
        if (ended := self._ended.get(request_id)) is not None:
            return ended.claim.deployment
        entry = self._held_claims.get(request_id)
        return None if entry is None else entry[0].deployment

    def has_heard(self, deployment: DeploymentName) -> bool:
        """Whether a head of it has attached in this run, and named its requests."""
        return deployment in self._lost_heads

    def may_have_lost(self, deployment: DeploymentName) -> bool:
        """Whether another head of it had requests that this one cannot know."""
        return self._lost_heads.get(deployment, False)

    def is_held(self, request_id: RequestId) -> bool:
        """Whether a head has one of this id of a former run: no other may have it."""
        return request_id in self._held_claims and not self._is_late

    @property
    def _is_late(self) -> bool:
        return self.now() > self.began_at + COME_BACK_S


def digest_of(generation: Generation) -> bytes:
    """The digest of all that a client requested. Options with their default value do not count, so
    that a later version with more options computes the same digest."""
    digest = blake2b(digest_size=16)
    _put(digest.update, generation)
    return digest.digest()


def _put(update: Callable[[bytes], None], value: Any) -> None:
    """Put the bytes of a value, which differ for any two values: each part begins with its kind and
    size."""
    if is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            if (part := getattr(value, item.name)) != _default_of(item):
                _put(update, item.name)
                _put(update, part)
        update(b".")
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        update(b"s%d:%s" % (len(text), text))
    elif isinstance(value, tuple) and all(type(item) is int for item in value):
        update(b"i%d:%s" % (len(value), array("q", value).tobytes()))
    elif isinstance(value, tuple):
        update(b"t%d:" % len(value))
        for item in value:
            _put(update, item)
    else:
        update(f"{type(value).__name__}:{value!r};".encode())


def _default_of(item: Any) -> Any:
    return item.default_factory() if callable(item.default_factory) else item.default


def _can_return(claim: Claim) -> bool:
    """Whether a client can resume. By HTTP it cannot: there a broken answer is requested again from
    the start."""
    return not claim.client.startswith(f"{KEY_ROLE}/")


def _refused(request_id: RequestId) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"resume: there is no request {request_id} of yours that can resume with these tokens; "
        "send it as a new one",
        field="resume",
        reason="NOT_RESUMABLE",
    )
