"""The replicas of a name for each request: the one that it goes to, and the one that continues it
after a loss.

Replicas have one model and one spec, so any of them may take a request. A request that has tokens
continues only on nodes that compute the same bits. Its client then gets the same tokens as without
the loss. A request goes to the replica that had a prompt with the same beginning, since its prefix
cache may have that beginning. No text of a prompt is kept. Its blocks are hashed with a key of this
process, each with the preceding blocks and its client, since no client shares another's cache.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard_coordinator.control.requests.request_table import RequestTable
from edgeshard_coordinator.control.requests.resumptions import ResumptionBook, Standing
from edgeshard_coordinator.control.requests.running_request import RunningRequest
from edgeshard_coordinator.control.requests.served_deployments import ServedDeployments
from edgeshard_coordinator.core.placement.replicated import computes_the_same
from edgeshard_coordinator.core.values.quotas import most_requests
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

TEXT_BLOCK, TOKEN_BLOCK = 256, 64
"""Characters or tokens of a block; a prompt that is shorter is not remembered."""
MOST_BLOCKS = 128
"""Blocks of one prompt that count."""
MOST_KNOWN = 16_384
"""Beginnings that are remembered; the longest unused is forgotten first."""


class PrefixBook:
    """The replicas that prompts went to, by their beginnings."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, DeploymentName] = OrderedDict()

    def marks(
        self, name: DeploymentName, client: str, prompt: str | tuple[int, ...]
    ) -> list[bytes]:
        """A mark for each whole block of a prompt and the preceding blocks. Replicas are of one
        `name`."""
        mark = blake2b(
            f"{name}\0{client}\0{type(prompt).__name__}".encode(), key=self._key, digest_size=16
        ).digest()
        marks = []
        for block in _blocks(prompt):
            mark = blake2b(mark + block, key=self._key, digest_size=16).digest()
            marks.append(mark)
        return marks

    def holder(self, marks: list[bytes]) -> DeploymentName | None:
        """The replica that had the longest of these beginnings."""
        return next((self._known[mark] for mark in reversed(marks) if mark in self._known), None)

    def went_to(self, marks: list[bytes], deployment: DeploymentName) -> None:
        """Note that a replica gets a prompt with these marks."""
        for mark in marks:
            self._known[mark] = deployment
            self._known.move_to_end(mark)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)


def _blocks(prompt: str | tuple[int, ...]) -> Iterator[bytes]:
    size = TEXT_BLOCK if isinstance(prompt, str) else TOKEN_BLOCK
    for end in range(size, min(len(prompt), size * MOST_BLOCKS) + 1, size):
        block = prompt[end - size : end]
        yield (
            block.encode("utf-8", "surrogatepass")
            if isinstance(block, str)
            else array("q", block).tobytes()
        )


_LOST = (
    DeploymentPhase.WAITING,
    DeploymentPhase.LOADING,
    DeploymentPhase.FAILED,
    DeploymentPhase.DELETING,
)


@dataclass(eq=False)
class Replicas:
    """`state` returns the newest state."""

    _state: Callable[[], State]
    _served: ServedDeployments
    _requests: RequestTable
    _resumptions: ResumptionBook
    _request_counts: Counter[DeploymentName] = field(default_factory=Counter)
    """Requests that were given to each replica there is, so that equal ones take turns."""
    _prefixes: PrefixBook = field(default_factory=PrefixBook)

    def of_request(
        self,
        replicas: Sequence[DeploymentRecord],
        request_id: RequestId,
        prompt: str | tuple[int, ...],
        client: str,
        *,
        resumed: bool,
    ) -> DeploymentRecord:
        """The replica for a request. A resumed request goes to the replica that had it, as far as
        that is known. Any other goes to the one with the least expected wait, or to one nearly as
        good that may have the beginning of its prompt. If none is ready, the first."""
        by_name = {record.name: record for record in replicas}
        if len(replicas) == 1:
            return replicas[0]
        former = self._requests.get(request_id)
        deployment = None if former is None else former.deployment
        if resumed:
            deployment = deployment or self._resumptions.deployment_of(request_id)
        if deployment in by_name:
            return by_name[deployment]
        if resumed and (unheard := self._unheard(replicas)):
            return by_name[unheard[0]]
        ready = [record for record in replicas if self._served.is_ready(record)]
        if not ready:
            return replicas[0]
        marks = (
            self._prefixes.marks(ready[0].served_name, client, prompt)
            if ready[0].spec.prefix_cache
            else []
        )
        replica = self._least_wait(ready, self._prefixes.holder(marks))
        self._prefixes.went_to(marks, replica.name)
        return replica

    def heir_of(self, request: RunningRequest) -> DeploymentRecord | None:
        """The replica that is to continue a parked request whose own one is lost; None if it has to
        wait."""
        state = self._state()
        record = state.deployments.get(request.deployment)
        if record is None or request.standing is Standing.AWAITING:
            return None
        if record.phase not in _LOST or record.former is not None:
            return None
        begun = bool(request.emitted) or request.scored > 1
        ready = [
            other
            for other in state.siblings_of(record.spec)
            if self._served.is_ready(other)
            and (not begun or computes_the_same(state, record, other))
        ]
        return self._least_wait(ready) if ready else None

    def told_of(self, record: DeploymentRecord) -> Iterator[RunningRequest]:
        """The requests that no longer need to wait for a former head's report, since this
        deployment's head has reported its own. Each is with the deployment that had it, or may have
        had it."""
        replicas = (record, *self._state().siblings_of(record.spec))
        names, unheard = [one.name for one in replicas], self._unheard(replicas)
        lost_names = [name for name in names if self._resumptions.may_have_lost(name)]
        for request in list(self._requests.values()):
            if request.standing is not Standing.AWAITING or request.deployment not in names:
                continue
            deployment = self._resumptions.deployment_of(request.request_id)
            if deployment in names:
                request.deployment = deployment
            elif unheard:
                request.deployment = unheard[0]
                continue
            elif lost_names:
                request.deployment = lost_names[0]
            yield request

    def _unheard(self, replicas: Sequence[DeploymentRecord]) -> list[DeploymentName]:
        """Deployments that may have requests of a former run, and whose heads have not reported
        them yet."""
        return [
            one.name
            for one in replicas
            if one.ever_ready and not self._resumptions.has_heard(one.name)
        ]

    def _least_wait(
        self, ready: Sequence[DeploymentRecord], holder: DeploymentName | None = None
    ) -> DeploymentRecord:
        """The replica that would serve one request more soonest, among those with a free place if
        there are any. `holder` is taken instead if it has at most one request too many."""
        names = self._state().deployments.keys()
        self._request_counts = Counter(
            {name: count for name, count in self._request_counts.items() if name in names}
        )
        active = {record.name: len(self._requests.of(record.name)) for record in ready}
        roomy = [
            record
            for record in ready
            if active[record.name] < most_requests(record.running_requests)
        ]
        rates = _rates_of(ready)

        def wait(record: DeploymentRecord) -> tuple[float, int, int]:
            return (
                (active[record.name] + 1) / rates[record.name],
                self._request_counts[record.name],
                record.spec.replica,
            )

        best = min(roomy or ready, key=wait)
        holder_record = next((record for record in roomy if record.name == holder), best)
        if active[holder_record.name] / rates[holder_record.name] <= wait(best)[0]:
            best = holder_record
        self._request_counts[best.name] += 1
        return best


def _rates_of(records: Sequence[DeploymentRecord]) -> dict[DeploymentName, float]:
    """The weight of each replica: its predicted tokens/s, or the same for all if one has no
    prediction."""
    rates = [
        0.0 if (prediction := record.placement.predicted) is None else prediction.throughput_tps
        for record in records
    ]
    return {
        record.name: rate if min(rates) > 0 else 1.0
        for record, rate in zip(records, rates, strict=True)
    }
