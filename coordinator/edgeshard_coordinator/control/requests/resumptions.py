"""The book of requests that clients may come back for; a client is believed where somebody else knows its request.

Requests of this run of the coordinator it knows itself: they run, or ended lately. Those of a former run the
deployment's head knows, and names when it attaches, with those that are over; until then a request waits. A client is
believed once, for the request that it had, and with no more of it than was sent.

A request that the head does not name was never let in, unless another head was lost together with the coordinator, or
not long before. No head was lost with it where the disk has the deployment as ready, with the very epoch and node of
the head that attaches: a deployment is ready only once its head has been given all requests that run, each loss of a
head is another epoch, and an epoch is on disk before any node prepares it. The former run alone knew of requests that
had ended where their head was lost before it, so the head also has to have been there for as long as a client may be
back. In every other case a request may have been another head's, and comes in where every limit lets it.
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
"""Seconds after the end of its call in which a client may be back for the rest: it tries for 60 s, and may hear of the
end late."""
RESERVED_S = 15.0
"""Seconds for which the place is kept of a request that a head has of a former run: a client that lives tries twice a
second, and dials at least every 2 s."""
FIRST_EPOCH = 1
"""The one epoch that no other head can have served before."""
MOST_ENDED = 20_000
"""Requests that are remembered so; the oldest is forgotten first."""


class Standing(Enum):
    """The standing of a request, which says the limits that count for it. Its priority and its identity's places always
    count."""

    NEW = auto()
    """All limits count."""
    BELIEVED = auto()
    """The request was let in before: neither its identity's debt nor a full deployment refuses it."""
    REPLAYED = auto()
    """Another head may have had the request: it counts as a new one, but passes a full deployment, and the head takes
    it."""
    AWAITING = auto()
    """Its deployment's head has not named its requests of a former run yet."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of a request that a client has, by its own word or another's: so many new `tokens`, and
    log-probabilities of the prompt before position `scored`."""

    deployment: DeploymentName
    client: str
    digest: bytes
    tokens: int
    scored: int

    def is_of_one(self, other: Claim) -> bool:
        """Whether the other is of the same request, with more or less of it."""
        return (other.deployment, other.client, other.digest) == (self.deployment, self.client, self.digest)

    def covers(self, other: Claim) -> bool:
        """Whether the other is of the same request, with no more of it."""
        return self.is_of_one(other) and other.tokens <= self.tokens and other.scored <= self.scored


@dataclass(frozen=True, slots=True)
class _Ended:
    """`is_spent`: its client was believed already. `is_charged`: its prompt was counted. `is_told`: a head said so."""

    claim: Claim
    at: float
    is_charged: bool
    is_spent: bool
    is_told: bool = False


@dataclass(slots=True)
class ResumptionBook:
    """`now` gives seconds of a steady clock. A claim of another client is refused as one of no request at all is."""

    now: Callable[[], float]
    began_at: float = field(init=False)
    _ended: OrderedDict[RequestId, _Ended] = field(default_factory=OrderedDict)
    _held: dict[RequestId, tuple[Claim, float]] = field(default_factory=dict)
    """The requests that heads have of a former run, and since when that is known; without a digest from an older
    head."""
    _left: OrderedDict[RequestId, Claim] = field(default_factory=OrderedDict)
    """Claims of clients that came back and left again before a head named their requests."""
    _served: Mapping[DeploymentName, tuple[Epoch, NodeId] | None] = field(default_factory=dict)
    _lost_heads: dict[DeploymentName, bool] = field(default_factory=dict)
    """Whether another head had requests that this one cannot know, of each deployment whose head attached in this
    run."""

    def __post_init__(self) -> None:
        self.began_at = self.now()

    def restore(self, served: Mapping[DeploymentName, tuple[Epoch, NodeId] | None]) -> None:
        """Enter the deployments of a former run; of those that were ready on disk, the epoch and the head's node."""
        self._served = served

    def ended(self, request_id: RequestId, claim: Claim, *, is_charged: bool, is_spent: bool) -> None:
        """Note the end of a request whose client may come back for the rest, if it does not know of the end."""
        self._remember(request_id, _Ended(claim, self.now(), is_charged, is_spent))

    def left(self, request_id: RequestId, claim: Claim) -> None:
        """Note that a client left which waited for the word of a head: the head need not finish its request."""
        self._left[request_id] = claim
        while len(self._left) > MOST_ENDED:
            self._left.popitem(last=False)

    def returned(self, request_id: RequestId) -> None:
        """Note that somebody waits for a request again."""
        self._left.pop(request_id, None)

    def is_unwanted(self, item: HeldRequest) -> bool:
        """Whether a request of a former run that a head has, and that does not run here, has no client any more.

        Its client left in this run, or can be back no more. Claims of other clients, and of other requests by the same
        id, do not count.
        """
        if self._is_late:
            return True
        ended = self._ended.get(item.request_id)
        here = ended.claim if ended is not None and not ended.is_told else self._left.get(item.request_id)
        return here is not None and (here.client, here.digest) == (item.client, item.digest)

    def _remember(self, request_id: RequestId, ended: _Ended) -> None:
        now, self._ended[request_id] = ended.at, ended
        self._ended.move_to_end(request_id)
        while len(self._ended) > MOST_ENDED or next(iter(self._ended.values())).at + COME_BACK_S < now:
            self._ended.popitem(last=False)

    def reported(
        self,
        deployment: DeploymentName,
        epoch: Epoch,
        node_id: NodeId,
        held: Iterable[HeldRequest],
        known: Collection[RequestId],
        head_for_s: float | None = None,
    ) -> None:
        """Note the requests of former runs that a head has as it attaches, at most `MAX_HELD` of a deployment.

        `known` are the requests here that wait for no word, and `head_for_s` the seconds that it has been the head,
        None if it did not report them.
        """
        is_new = head_for_s is not None and head_for_s < COME_BACK_S and epoch > FIRST_EPOCH
        self._lost_heads.setdefault(deployment, is_new or self._served.get(deployment) != (epoch, node_id))
        if self._is_late:
            return
        left = MAX_HELD - sum(claim.deployment == deployment for claim, _ in self._held.values())
        for item in held:
            if item.request_id in self._ended or item.request_id in known:
                continue
            claim = Claim(deployment, item.client, item.digest, item.tokens, item.scored)
            if not item.over and self.is_unwanted(item):
                # The head forgets it. If its client is back after all, its claim is accepted once.
                self._remember(item.request_id, _Ended(claim, self.now(), is_charged=True, is_spent=False))
            elif not item.over:
                # Of two replicas that have it, one went on with it when the other was lost.
                known_of = self._held.get(item.request_id)
                is_more = known_of is None or known_of[0].tokens < claim.tokens
                left -= known_of is None
                if is_more and left >= 0:
                    self._held[item.request_id] = (claim, self.now())
            elif item.digest:
                self._remember(
                    item.request_id, _Ended(claim, self.now(), is_charged=True, is_spent=False, is_told=True)
                )

    def standing_of(self, request_id: RequestId, claim: Claim) -> tuple[Standing, bool]:
        """The standing of a request whose client says that it is back, and whether its prompt was counted.

        Raises FailedPreconditionError naming `resume` for a request that nobody knows.
        """
        if (ended := self._ended.get(request_id)) is not None and self.now() <= ended.at + COME_BACK_S:
            if not ended.claim.covers(claim):
                if ended.is_told and self._went_on_elsewhere(ended.claim, claim):
                    return Standing.REPLAYED, False
                raise _refused(request_id)
            return (Standing.NEW, False) if ended.is_spent else (Standing.BELIEVED, ended.is_charged)
        # No client waits so long.
        if self._is_late or claim.deployment not in self._served:
            raise _refused(request_id)
        if (held := self._held.get(request_id)) is not None:
            told, _ = held
            if not told.digest and told.deployment == claim.deployment:
                return Standing.REPLAYED, False
            if told.covers(claim):
                return Standing.BELIEVED, True
            if self._went_on_elsewhere(told, claim):
                return Standing.REPLAYED, False
            raise _refused(request_id)
        if claim.deployment not in self._lost_heads:
            return Standing.AWAITING, False
        if not self._lost_heads[claim.deployment]:
            raise _refused(request_id)
        return Standing.REPLAYED, False

    def _went_on_elsewhere(self, told: Claim, claim: Claim) -> bool:
        """Whether the head that told of a request may have been its head before the one that was lost."""
        return told.is_of_one(claim) and self._lost_heads.get(claim.deployment, False)

    def take(self, request_id: RequestId) -> None:
        """Strike out a request that runs here now: its client is believed once."""
        self._ended.pop(request_id, None)
        self._held.pop(request_id, None)

    def reserved(self, but: RequestId) -> list[Claim]:
        """The claims whose places are kept, but for that of one request."""
        if self._is_late:
            self._held.clear()
        since = self.now() - RESERVED_S
        return [claim for id, (claim, at) in self._held.items() if at >= since and id != but and _can_return(claim)]

    def deployment_of(self, request_id: RequestId) -> DeploymentName | None:
        """The deployment that had a request last, as far as somebody said so."""
        if (ended := self._ended.get(request_id)) is not None:
            return ended.claim.deployment
        held = self._held.get(request_id)
        return None if held is None else held[0].deployment

    def has_heard(self, deployment: DeploymentName) -> bool:
        """Whether a head of it has attached in this run, and named its requests."""
        return deployment in self._lost_heads

    def may_have_lost(self, deployment: DeploymentName) -> bool:
        """Whether another head of it had requests that this one cannot know."""
        return self._lost_heads.get(deployment, False)

    def is_held(self, request_id: RequestId) -> bool:
        """Whether a head has one of this id of a former run: no other may have it."""
        return request_id in self._held and not self._is_late

    @property
    def _is_late(self) -> bool:
        return self.now() > self.began_at + COME_BACK_S


def digest_of(generation: Generation) -> bytes:
    """The digest of all that a client asked for. Options with their default value do not count, so that a later version
    with more options gives the same."""
    digest = blake2b(digest_size=16)
    _put(digest.update, generation)
    return digest.digest()


def _put(update: Callable[[bytes], None], value: Any) -> None:
    """Put the bytes of a value, which differ for any two values: each part says its kind and its size first."""
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
    """Whether a client can come back. By HTTP it cannot: there an answer that broke off is asked for anew."""
    return not claim.client.startswith(f"{KEY_ROLE}/")


def _refused(request_id: RequestId) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"resume: there is no request {request_id} of yours that can resume with these tokens; send it as a new one",
        field="resume",
        reason="NOT_RESUMABLE",
    )
