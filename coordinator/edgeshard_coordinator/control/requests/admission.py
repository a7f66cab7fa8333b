"""Admission of requests: by the identity's quota, the deployment's limit, and the book of resumable
requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Admits requests or refuses them, given the requests that run or wait now."""

    _requests: Mapping[RequestId, RunningRequest]
    _quotas: QuotaBook
    _resumptions: ResumptionBook

    def let_in(
        self, request: RunningRequest, replicas: Sequence[DeploymentRecord]
    ) -> RunningRequest | None:
        """Enter the resumption status of a request for one of the `replicas` of a name. Returns the
        former call of the same request, which must end, if there is one.

        Raises for a request that may not run, changing nothing: AlreadyExistsError naming
        `request_id`, and as `QuotaBook.check`, `QuotaBook.check_debt` and
        `ResumptionBook.standing_of` do.
        """
        former = self._requests.get(request.request_id)
        standing = Standing.NEW
        is_charged = False
        is_back = False
        if former is not None:
            if not former.goes_on_as(request):
                raise _taken("is running")
            standing = (
                Standing.AWAITING if former.standing is Standing.AWAITING else Standing.BELIEVED
            )
            is_charged, is_back = former.is_charged, former.is_back
        elif request.resumed:
            standing, is_charged, is_back = self._known(request)
        elif self._resumptions.is_held(request.request_id):
            raise _taken("runs since before the coordinator's restart")
        self._check(request, replicas, standing, former)
        request.standing = standing
        request.is_charged = is_charged
        request.is_back = is_back
        return former

    def decide(self, request: RunningRequest, replicas: Sequence[DeploymentRecord]) -> None:
        """Enter the resumption status of a request that waited for its head's report, which is
        there now. Raises if it must end."""
        standing, is_charged, is_back = self._known(request)
        self._check(request, replicas, standing, request)
        request.standing = standing
        request.is_charged = is_charged
        request.is_back = is_back

    def _known(self, request: RunningRequest) -> tuple[Standing, bool, bool]:
        """The status of a request that had a start before, whether its prompt was counted, and
        whether its resumption was accepted because of that. It was not if a head runs the request:
        then the coordinator lost it."""
        standing, is_charged = self._resumptions.standing_of(request.request_id, request.claim)
        runs = self._resumptions.is_held(request.request_id)
        return standing, is_charged, standing is Standing.BELIEVED and not runs

    def _check(
        self,
        request: RunningRequest,
        replicas: Sequence[DeploymentRecord],
        standing: Standing,
        itself: RunningRequest | None,
    ) -> None:
        """Raise for a request that finds no place by its standing or by its identity; `itself` is
        not counted.

        A resumed request passes a full deployment, since its place may have been given to another,
        but not beyond twice the limit. A request that waits for its head's report is counted only
        among its identity's: otherwise invented claims would keep honest clients out.
        """
        is_checked = standing in (Standing.NEW, Standing.REPLAYED)
        others = [other for other in self._requests.values() if other is not itself]
        claims = self._resumptions.reserved(request.request_id) if is_checked else []
        own_deployments = [other.deployment for other in others if other.client == request.client]
        own_deployments += [claim.deployment for claim in claims if claim.client == request.client]
        self._quotas.check(request.client, request.generation.priority, replicas, own_deployments)
        if is_checked:
            self._quotas.check_debt(request.client)
        if standing is Standing.AWAITING:
            crowd = own_deployments
        else:
            crowd = [
                other.deployment for other in others if other.standing is not Standing.AWAITING
            ]
            crowd += [claim.deployment for claim in claims]
        limit = most_requests(replicas[0].running_requests)
        if crowd.count(request.deployment) >= (limit if standing is Standing.NEW else 2 * limit):
            raise ResourceExhaustedError(
                f"deployment {request.deployment} has {limit} requests running or waiting, its "
                "limit; try again",
                reason="OVERLOADED",
                retry_after_s=1.0,
            )


def _taken(why: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"request_id: a request with this id {why}; choose another or leave it empty",
        field="request_id",
    )
