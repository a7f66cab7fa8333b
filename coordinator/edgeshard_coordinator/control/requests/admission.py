"""What lets a request in, or keeps it out: its identity's quota, its deployment's limit, and what is known of one that
its client comes back for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgeshard.domain.errors import AlreadyExistsError, ResourceExhaustedError
from edgeshard.domain.ids import RequestId
from edgeshard_coordinator.control.requests.quotas import QuotaBook
from edgeshard_coordinator.control.requests.resumptions import ResumptionBook, Standing
from edgeshard_coordinator.control.requests.running_request import RunningRequest
from edgeshard_coordinator.core.values.quotas import most_requests
from edgeshard_coordinator.core.values.state import DeploymentRecord


@dataclass(eq=False)
class Admission:
    """Lets requests in or refuses them, beside those that run or wait now, which change."""

    _requests: Mapping[RequestId, RunningRequest]
    _quotas: QuotaBook
    _resumptions: ResumptionBook

    def let_in(self, request: RunningRequest, record: DeploymentRecord) -> RunningRequest | None:
        """Say how it comes in; the former call of the same request, which must end, where there is one.

        Raises for one that may not run, changing nothing: AlreadyExistsError naming `request_id`, and what
        `QuotaBook.check`, `QuotaBook.check_debt` and `ResumptionBook.standing_of` raise.
        """
        former = self._requests.get(request.request_id)
        standing, is_charged, is_back = Standing.NEW, False, False
        if former is not None:
            if not former.goes_on_as(request):
                raise _taken("is running")
            standing = Standing.AWAITING if former.standing is Standing.AWAITING else Standing.BELIEVED
            is_charged, is_back = former.is_charged, former.is_back
        elif request.resumed:
            standing, is_charged, is_back = self._known(request)
        elif self._resumptions.is_held(request.request_id):
            raise _taken("runs since before the coordinator's restart")
        self._check(request, record, standing, former)
        request.standing, request.is_charged, request.is_back = standing, is_charged, is_back
        return former

    def decide(self, request: RunningRequest, record: DeploymentRecord) -> None:
        """The same for one that waited for its head's word, which is there. Raises where it must end."""
        standing, is_charged, is_back = self._known(request)
        self._check(request, record, standing, request)
        request.standing, request.is_charged, request.is_back = standing, is_charged, is_back

    def _known(self, request: RunningRequest) -> tuple[Standing, bool, bool]:
        """As what it comes in that had a start before, whether its prompt was counted, and whether its client was
        believed by that. It was not where a head runs it: the coordinator lost it, not its client."""
        standing, is_charged = self._resumptions.standing_of(request.request_id, request.claim)
        runs = self._resumptions.is_held(request.request_id)
        return standing, is_charged, standing is Standing.BELIEVED and not runs

    def _check(
        self, request: RunningRequest, record: DeploymentRecord, standing: Standing, itself: RunningRequest | None
    ) -> None:
        """Raise for a request that finds no place as what it comes in as, nor by its identity; `itself` is not counted.

        One that comes back passes a full deployment, since its place may have been given away; no more than once over,
        though. One that waits for its head's word is counted among its identity's alone: else whoever claims what never
        was would keep out those who do not.
        """
        is_checked = standing in (Standing.NEW, Standing.REPLAYED)
        others = [other for other in self._requests.values() if other is not itself]
        kept = self._resumptions.reserved(request.request_id) if is_checked else []
        held = [other.deployment for other in others if other.client == request.client]
        held += [claim.deployment for claim in kept if claim.client == request.client]
        self._quotas.check(request.client, request.generation.priority, record, held)
        if is_checked:
            self._quotas.check_debt(request.client)
        if standing is Standing.AWAITING:
            crowd = held
        else:
            crowd = [other.deployment for other in others if other.standing is not Standing.AWAITING]
            crowd += [claim.deployment for claim in kept]
        limit = most_requests(record.spec.concurrency)
        if crowd.count(record.name) >= (limit if standing is Standing.NEW else 2 * limit):
            raise ResourceExhaustedError(
                f"deployment {record.name} has {limit} requests running or waiting, its limit; try again",
                reason="OVERLOADED",
                retry_after_s=1.0,
            )


def _taken(why: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"request_id: a request with this id {why}; choose another or leave it empty", field="request_id"
    )
