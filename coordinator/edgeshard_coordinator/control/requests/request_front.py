"""The way in for requests: from a client's call to the head that serves it, and the tokens back.

Nothing here waits or passes through the state loop. A request outlives the head that runs it. It is
parked until the deployment has a head again, which continues it from its journal
(`head_reports.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, UnavailableError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.requests.generation import FinishReason, Generation
from edgeshard.domain.requests.head import CancelRequest, ForgetRequest, HeldRequest
from edgeshard_coordinator.control.requests.admission import Admission
from edgeshard_coordinator.control.requests.head_reports import HeadReports
from edgeshard_coordinator.control.requests.quotas import QuotaBook
from edgeshard_coordinator.control.requests.replicas import Replicas
from edgeshard_coordinator.control.requests.request_meter import RequestMeter
from edgeshard_coordinator.control.requests.request_table import RequestTable
from edgeshard_coordinator.control.requests.resumptions import ResumptionBook, Standing
from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
from edgeshard_coordinator.control.requests.served_deployments import ServedDeployments
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.core.values.quotas import Quota, Quotas
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

BACKLOG_LIMIT = 4096
"""Events by which a client may lag; its request is ended if it lags by more."""
PARKED_LIMIT_S = 30.0
"""Seconds that a request waits for its deployment to have a head again."""
DEADLINE_MARGIN_S = 0.25
"""Seconds before its client leaves, at which a parked request gets the reason of its delay."""
FAILED_HEADS_LIMIT = 8
"""Heads in a row that may be lost before a request has a token of them: after those it is taken for
the cause."""


class RequestFront:
    """The requests of all deployments, from their start to their end. Every method returns at once.

    `state` returns the newest state, `now` seconds of a steady clock. `served` finds the deployment
    of a request, `reports` takes the messages of heads. `quota_of_key` returns the limits that an
    identity has by its API key, None if it has none.
    """

    def __init__(
        self,
        state: Callable[[], State],
        traffic: TrafficBook,
        now: Callable[[], float],
        backlog_limit: int = BACKLOG_LIMIT,
        quotas: Quotas = Quotas(),  # noqa: B008 - frozen
        quota_of_key: Callable[[str], Quota | None] = lambda identity: None,
    ) -> None:
        self._state = state
        self._now = now
        self.traffic = traffic
        self.quotas = QuotaBook(quotas, now, quota_of_key)
        self.meter = RequestMeter()
        self._resumptions = ResumptionBook(now)
        self._requests = RequestTable(self._resumptions, now)
        self.occupied = self._requests.occupied
        self._attachments: dict[DeploymentName, Attachment] = {}
        self.served = ServedDeployments(state, self._attachments)
        self._replicas = Replicas(state, self.served, self._requests, self._resumptions)
        self._admission = Admission(self._requests, self.quotas, self._resumptions)
        self.reports = HeadReports(state, self._requests, self.quotas, traffic, now, backlog_limit)
        self._last_number = 0
        self._closed: EdgeShardError | None = None

    def restore(self, deployments: Iterable[DeploymentRecord]) -> None:
        """The deployments on disk, at the start: clients of a former run may resume there."""
        heads = {
            record.name: (record.epoch, record.head.node_id)
            for record in deployments
            if record.was_ready
        }
        self._resumptions.restore({record.name: heads.get(record.name) for record in deployments})

    # Heads

    def attach(
        self,
        deployment: DeploymentName,
        epoch: Epoch,
        node_id: NodeId,
        node_name: NodeName,
        held_requests: Sequence[HeldRequest] = (),
        head_for_s: float | None = None,
    ) -> Attachment:
        """Take a head's new stream; an older one of the deployment ends. The head continues all
        requests of the deployment in their old order. It forgets a request of `held_requests` that
        ended here or has no client any more.

        Requests of an earlier run of the coordinator wait at the head for their clients. Requests
        whose clients reconnected before the head continue, or end with a typed error. `head_for_s`
        is the number of seconds that it has been the deployment's head, None if it does not report
        it.
        """
        older = self._attachments.get(deployment)
        if older is not None:
            self.detach(older)
        self._last_number += 1
        record = self._state().deployments.get(deployment)
        stages = 1 if record is None else len(record.placement.stages)
        attachment = Attachment(deployment, epoch, node_id, node_name, self._last_number, stages)
        self._attachments[deployment] = attachment
        self.meter.head_back(deployment, epoch, self._now())
        instance = self._state().instance
        for item in held_requests:
            if not item.over and self._is_over_here(item, deployment, instance):
                attachment.outgoing.put_nowait(ForgetRequest(item.request_id))
        former = [item for item in held_requests if item.instance != instance]
        settled_ids = {
            id
            for id, request in self._requests.items()
            if request.standing is not Standing.AWAITING
        }
        self._resumptions.reported(deployment, epoch, node_id, former, settled_ids, head_for_s)
        for request in () if record is None else self._replicas.told_of(record):
            self._awaited(request)
            elsewhere = self._attachments.get(request.deployment)
            if elsewhere not in (None, attachment) and request.request_id in self._requests:
                self._hand_over(request, elsewhere)
        for request in self._requests.of(deployment):
            self._hand_over(request, attachment)
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """The stream is over: its requests are parked. Detaching twice changes nothing."""
        if self._attachments.get(attachment.deployment) is attachment:
            del self._attachments[attachment.deployment]
            self.meter.head_lost(attachment.deployment, attachment.epoch, self._now())
        for request in list(attachment.requests.values()):
            request.attachment, request.parked_at = None, self._now()
            if request.unread_by_choice:
                self._requests.leave(request)  # no client waits for it
        attachment.requests.clear()
        attachment.close()

    def end_service(
        self, deployment: DeploymentName, epoch: Epoch, failure: EdgeShardError, *, final: bool
    ) -> None:
        """An epoch has ended: its head's stream ends, and requests are parked or continue at
        another replica. The others fail if the end is `final`."""
        attachment = self._attachments.get(deployment)
        if attachment is not None and attachment.epoch <= epoch:
            self.detach(attachment)
        for request in self._requests.of(deployment):
            if request.attachment is None and self._goes_on_elsewhere(request):
                continue
            if final:
                self._requests.end(request, failure)

    def expire(self) -> None:
        """End the requests that have been parked for too long, each with a typed error."""
        now = self._now()
        deployments = self._state().deployments
        moving = {name for name, record in deployments.items() if record.former is not None}
        for request in list(self._requests.values()):
            if request.attachment is not None or self._goes_on_elsewhere(request):
                continue
            if request.deployment in moving:
                request.parked_at = now  # an operator's choice, and the loaded weights may be large
            limit = request.parked_at + PARKED_LIMIT_S
            if request.deadline is not None:
                limit = min(limit, request.deadline - DEADLINE_MARGIN_S)
            if now >= limit:
                self._requests.end(request, self._not_recovered(request))

    def end_of_client(self, client: str, failure: EdgeShardError) -> None:
        """Its requests end, and are cancelled at their heads."""
        for request in self._requests.of_client(client):
            request.fail(failure)
            self.abandon(request)

    def close(self, failure: EdgeShardError) -> None:
        """Refuse new requests and end the running ones here; their heads keep them for the next
        coordinator."""
        self._closed = failure
        for attachment in list(self._attachments.values()):
            self.detach(attachment)
        for request in list(self._requests.values()):
            self._requests.end(request, failure)

    # Clients

    def start(
        self,
        model: str,
        generation: Generation,
        request_id: RequestId,
        client: str = "",
        *,
        deadline: float | None = None,
        emitted: tuple[int, ...] | None = None,
        scored: int = 1,
    ) -> RunningRequest:
        """Hand a request of `client` to the head of the deployment that serves `model`, or of one
        of its replicas.

        `deadline` is when the client leaves, in seconds of the steady clock. A client that lost its
        stream sends its request again with the tokens that it has (`emitted`). The request
        continues after them, here or at the head, and waits if there is no head. `scored` is the
        position after the last one whose prompt log-probability it has.

        Raises NotFoundError, UnavailableError or FailedPreconditionError naming `model`,
        InvalidArgumentError for an impossible generation, and as `Admission.let_in` does. The last
        may also arrive later, as the request's end, if a head must first report which requests it
        has.
        """
        resumed = emitted is not None
        with self.meter.counting_refusals():
            if self._closed is not None:
                raise self._closed
            generation.validate()
            replicas = self.served.replicas_of(model)
            record = self._replicas.of_request(
                replicas, request_id, generation.prompt, client, resumed=resumed
            )
            attachment = self.served.attachment_of(
                record, may_wait=resumed or record.former is not None
            )
            _check_length(record, generation)
            request = RunningRequest(
                request_id, record.name, generation, client, emitted, deadline, scored
            )
            former = self._admission.let_in(request, replicas)
        if former is not None:
            elsewhere = UnavailableError(
                "the request continues in another call", reason="RESUMED_ELSEWHERE"
            )
            self._requests.end(former, elsewhere)
        if request.standing is not Standing.AWAITING:
            self._resumptions.take(request_id)
        request.parked_at = self._now()
        request.times = self.meter.began(record.name, client, request.parked_at, resumed=resumed)
        self._requests.add(request)
        if attachment is not None:
            self._hand_over(request, attachment)
        return request

    def check_place(self, client: str, reading: int) -> None:
        """Raise ResourceExhaustedError if `client` may have no further request. Those that run or
        wait count, and `reading` ones whose bodies are still arriving."""
        self.quotas.check_place(client, self.running_of(client) + reading)

    def abandon(self, request: RunningRequest) -> None:
        """The client's call is over, however it ended: stop the request if it still runs.

        It keeps its place until the head reports that its memory is free.
        """
        request.unread_by_choice = True
        if self._requests.get(request.request_id) is not request:
            return
        if request.attachment is None:
            self._requests.leave(request)
        else:
            request.cancel()

    def cancel(self, request_id: RequestId, client: str | None = None) -> bool:
        """Stop a request; its client gets Finished with reason CANCELLED. False if there is none,
        or none of `client` if that is given."""
        request = self._requests.get(request_id)
        if request is None or client not in (None, request.client):
            return False
        request.cancel()
        if request.attachment is None:
            self._requests.remove(request, left=True)
            request.finish(FinishReason.CANCELLED, "", self._now())
        return True

    def owner_of(self, request_id: RequestId) -> str:
        """The client of a running request; '' for one that is not there, as in plaintext."""
        request = self._requests.get(request_id)
        return "" if request is None else request.client

    def active_requests(self, deployment: DeploymentName) -> int:
        return len(self._requests.of(deployment))

    def running_of(self, client: str) -> int:
        """The requests of a client that run or wait."""
        return len(self._requests.of_client(client))

    def all_active_requests(self) -> int:
        return len(self._requests)

    def running(self) -> Collection[RunningRequest]:
        """All requests that run or wait, in the order of their arrival."""
        return self._requests.values()

    def _hand_over(self, request: RunningRequest, attachment: Attachment) -> None:
        start = request.start(self._state().instance)
        if request.failed_heads >= FAILED_HEADS_LIMIT:
            self._requests.end(request, self._not_recovered(request))
            attachment.outgoing.put_nowait(ForgetRequest(request.request_id))
            return
        request.attachment = attachment
        attachment.requests[request.request_id] = request
        attachment.outgoing.put_nowait(start)
        if request.cancel_wanted:
            attachment.outgoing.put_nowait(CancelRequest(request.request_id))

    def _is_over_here(self, item: HeldRequest, deployment: DeploymentName, instance: str) -> bool:
        """Whether a request of a head ended in this run, runs at another replica, or has no client
        any more."""
        request = self._requests.get(item.request_id)
        if request is None:
            return item.instance == instance or self._resumptions.is_unwanted(item)
        return request.deployment != deployment and request.standing is not Standing.AWAITING

    def _goes_on_elsewhere(self, request: RunningRequest) -> bool:
        """Whether another replica continues a parked request, which is handed over then."""
        heir = self._replicas.heir_of(request)
        if heir is None:
            return False
        request.deployment = heir.name
        self._hand_over(request, self._attachments[heir.name])
        return True

    def _awaited(self, request: RunningRequest) -> None:
        """Admit a request, or end it, once its head has attached and reported its requests."""
        record = self._state().deployments.get(request.deployment)
        if record is None:
            return
        replicas = (record, *self._state().siblings_of(record.spec))
        try:
            with self.meter.counting_refusals():
                self._admission.decide(request, replicas)
        except EdgeShardError as error:
            self._requests.end(request, error)
        else:
            self._resumptions.take(request.request_id)

    def _not_recovered(self, request: RunningRequest) -> UnavailableError:
        record = self._state().deployments.get(request.deployment)
        why = (
            record.failure.message
            if record is not None and record.failure is not None
            else "its head was lost"
        )
        return UnavailableError(
            f"deployment {request.deployment} could not continue the request after "
            f"{len(request.emitted)} "
            f"tokens: {why}; send it again later",
            field="model",
            reason="NOT_RECOVERED",
            retry_after_s=5.0,
        )


def _check_length(record: DeploymentRecord, generation: Generation) -> None:
    """Raise InvalidArgumentError for more new tokens than the deployment allows, unless they may be
    clipped.

    The head checks them against the context.
    """
    limit = record.spec.most_new_tokens(generation.max_new_tokens)
    if generation.max_new_tokens > limit and not generation.clip_new_tokens:
        raise InvalidArgumentError(
            f"max_new_tokens {generation.max_new_tokens} is beyond the {limit} that deployment "
            f"{record.name} allows",
            field="max_new_tokens",
            reason="TOO_MANY_NEW_TOKENS",
        )
