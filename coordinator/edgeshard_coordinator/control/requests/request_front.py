"""The way in for requests: from a client's call to the head that serves it, and the tokens back.

Nothing here waits and nothing passes through the state loop. A journal for every request (prompt and emitted tokens)
decides which tokens count: only those of the epoch it runs in, at the position that comes next. A request outlives the
head that runs it: it is parked until the deployment has a head again, which goes on from the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.requests.generation import Finished, FinishReason, Generation, PromptLogprobs, Started, Token
from edgeshard.domain.requests.head import CancelRequest, ForgetRequest, HeadCommand, HeldRequest
from edgeshard_coordinator.control.requests.admission import Admission
from edgeshard_coordinator.control.requests.quotas import QuotaBook
from edgeshard_coordinator.control.requests.request_meter import RequestMeter
from edgeshard_coordinator.control.requests.resumptions import ResumptionBook, Standing
from edgeshard_coordinator.control.requests.running_request import RunningRequest
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.core.values.quotas import Quota, Quotas
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

BACKLOG_LIMIT = 4096
"""Events a client may fall behind before its request is given up."""
PARKED_LIMIT_S = 30.0
"""How long a request waits for its deployment to have a head again."""
DEADLINE_MARGIN_S = 0.25
"""So long before its client leaves, a parked request is told why nothing came."""
FAILED_HEADS_LIMIT = 8
"""Heads in a row that may be lost before a request has a token of them: after those it is taken for the cause."""


@dataclass(slots=True, eq=False)
class Attachment:
    """One head's Attach stream. `outgoing` ends with None; admission bounds it."""

    deployment: DeploymentName
    epoch: Epoch
    node_id: NodeId
    node_name: NodeName
    number: int
    outgoing: asyncio.Queue[HeadCommand | None] = field(default_factory=asyncio.Queue)
    requests: dict[RequestId, RunningRequest] = field(default_factory=dict)

    def close(self) -> None:
        self.outgoing.put_nowait(None)


def _refusals_counted(start: Callable[Concatenate[RequestFront, Arguments], Answer]) -> Callable[..., Answer]:
    @wraps(start)
    def counted(front: RequestFront, *args: Arguments.args, **options: Arguments.kwargs) -> Answer:
        try:
            return start(front, *args, **options)
        except EdgeShardError as error:
            front.meter.refused[error.code.name.lower()] += 1
            raise

    return counted


class RequestFront:
    """`state` gives the newest state, `now` seconds of a steady clock. Every method returns at once."""

    def __init__(
        self,
        state: Callable[[], State],
        traffic: TrafficBook,
        now: Callable[[], float],
        backlog_limit: int = BACKLOG_LIMIT,
        quotas: Quotas = Quotas(),  # noqa: B008 - frozen
    ) -> None:
        self._state = state
        self.traffic = traffic
        self._now = now
        self._quotas = QuotaBook(quotas, now)
        self._resumptions = ResumptionBook(now)
        self.meter = RequestMeter()
        self._backlog_limit = backlog_limit
        self._attachments: dict[DeploymentName, Attachment] = {}
        self._requests: dict[RequestId, RunningRequest] = {}
        self._admission = Admission(self._requests, self._quotas, self._resumptions)
        self.occupied = asyncio.Event()
        """Set while there are requests, so that an idle coordinator need not look at them."""
        self._last_number = 0
        self._closed: EdgeShardError | None = None
        self.dropped_messages = 0
        """Tokens and other messages of heads that came too late, twice or out of order."""

    def restore(self, deployments: Iterable[DeploymentRecord]) -> None:
        """The deployments on disk, at the start: clients of a former run may come back to them."""
        heads = {record.name: (record.epoch, record.head.node_id) for record in deployments if record.was_ready}
        self._resumptions.restore({record.name: heads.get(record.name) for record in deployments})

    # Heads

    def attach(
        self,
        deployment: DeploymentName,
        epoch: Epoch,
        node_id: NodeId,
        node_name: NodeName,
        held: Sequence[HeldRequest] = (),
        head_for_s: float | None = None,
    ) -> Attachment:
        """Take a head's new stream; an older one of the deployment ends. The head goes on with every request of the
        deployment, in their old order, and forgets those of the requests it has (`held`) that ended here.

        What it has of an earlier run of the coordinator waits there for the client, who knows more of it. Requests of
        clients that came back before it go on, or end with a typed error. `head_for_s` is how long it has been the
        deployment's head, as far as it says so.
        """
        older = self._attachments.get(deployment)
        if older is not None:
            self.detach(older)
        self._last_number += 1
        attachment = Attachment(deployment, epoch, node_id, node_name, self._last_number)
        self._attachments[deployment] = attachment
        self.meter.head_back(deployment, epoch, self._now())
        instance = self._state().instance
        for item in held:
            if item.request_id not in self._requests and item.instance == instance and not item.over:
                attachment.outgoing.put_nowait(ForgetRequest(item.request_id))
        former = [item for item in held if item.instance != instance]
        known = {id for id, request in self._requests.items() if request.standing is not Standing.AWAITING}
        self._resumptions.reported(deployment, epoch, node_id, former, known, head_for_s)
        record = self._state().deployments.get(deployment)
        for request in self._of(deployment):
            if request.standing is Standing.AWAITING and record is not None:
                self._awaited(request, record)
        for request in self._of(deployment):
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
                self._leave(request)  # nobody waits for it
        attachment.requests.clear()
        attachment.close()

    def end_service(self, deployment: DeploymentName, epoch: Epoch, failure: EdgeShardError, *, final: bool) -> None:
        """An epoch has ended: its head's stream ends, and requests are parked. They fail where the end is `final`."""
        attachment = self._attachments.get(deployment)
        if attachment is not None and attachment.epoch <= epoch:
            self.detach(attachment)
        if final:
            for request in self._of(deployment):
                self._end(request, failure)

    def expire(self) -> None:
        """End the requests that have been parked for too long, each with a typed error."""
        now = self._now()
        deployments = self._state().deployments
        moving = {name for name, record in deployments.items() if record.former is not None}
        for request in list(self._requests.values()):
            if request.attachment is not None:
                continue
            if request.deployment in moving:
                request.parked_at = now  # an operator wants it so, and what is loaded may be large
            limit = request.parked_at + PARKED_LIMIT_S
            if request.deadline is not None:
                limit = min(limit, request.deadline - DEADLINE_MARGIN_S)
            if now >= limit:
                self._end(request, self._not_recovered(request))

    def end_of_client(self, client: str, failure: EdgeShardError) -> None:
        """Its requests end, and are cancelled at their heads."""
        for request in [request for request in self._requests.values() if request.client == client]:
            request.fail(failure)
            self.abandon(request)

    def close(self, failure: EdgeShardError) -> None:
        """Refuse new requests and end the running ones here; their heads keep them for the next coordinator."""
        self._closed = failure
        for attachment in list(self._attachments.values()):
            self.detach(attachment)
        for request in list(self._requests.values()):
            self._end(request, failure)

    def on_accepted(
        self, attachment: Attachment, request_id: RequestId, epoch: Epoch, prompt_tokens: tuple[int, ...]
    ) -> None:
        request = self._current(attachment, request_id, epoch)
        if request is None:
            self.dropped_messages += 1
            return
        record = self._state().deployments.get(attachment.deployment)
        if request.prompt_tokens is not None or record is None:
            return  # It goes on: its client knows that it has started.
        request.prompt_tokens = prompt_tokens
        request.times.accepted(len(prompt_tokens))
        if not request.is_charged:
            request.is_charged = True
            # A client that comes with tokens has the head read them, as it does a prompt.
            self._quotas.charge(request.client, len(prompt_tokens) + len(request.emitted))
        request.deliver(Started(request_id, attachment.deployment, prompt_tokens, record.placement))

    def on_prompt_logprobs(
        self, attachment: Attachment, request_id: RequestId, epoch: Epoch, prompt_logprobs: PromptLogprobs
    ) -> None:
        """Log-probabilities count once, as tokens do: in the request's epoch, behind those that came before."""
        request = self._current(attachment, request_id, epoch)
        if request is None or request.prompt_tokens is None or prompt_logprobs.position != request.scored:
            self.dropped_messages += 1
            return
        request.scored = prompt_logprobs.end
        if not request.unread_by_choice:
            request.deliver(prompt_logprobs)

    def on_admitted(self, attachment: Attachment, request_id: RequestId, epoch: Epoch) -> None:
        """The head computes it now. One that comes late changes nothing."""
        if (request := self._current(attachment, request_id, epoch)) is not None:
            request.times.admitted(self._now())

    def on_token(self, attachment: Attachment, request_id: RequestId, epoch: Epoch, token: Token) -> bool:
        """A token counts once: in the request's epoch, at the position behind its journal. Whether it did."""
        request = self._current(attachment, request_id, epoch)
        if request is None or token.position != request.next_position:
            self.dropped_messages += 1
            return False
        request.emitted.append(token.token)
        request.times.token(self._now())
        self._quotas.charge(request.client, 1)
        if request.unread_by_choice:
            return True
        if request.backlog >= self._backlog_limit:
            slow = ResourceExhaustedError(
                f"the client is {request.backlog} tokens behind; read the stream faster or ask for fewer tokens",
                reason="SLOW_READER",
            )
            request.fail(slow, drop_unread=True)
            request.unread_by_choice = True
            self._send_cancel(request)
            return True
        request.deliver(token)
        return True

    def on_finished(
        self, attachment: Attachment, request_id: RequestId, epoch: Epoch, reason: FinishReason, text: str
    ) -> None:
        request = self._current(attachment, request_id, epoch)
        if request is None:
            self.dropped_messages += 1
            return
        at_once = len(attachment.requests)
        self._remove(request)
        attachment.outgoing.put_nowait(ForgetRequest(request_id))
        prompt_tokens, new_tokens = len(request.prompt_tokens or ()), len(request.emitted)
        if (record := self._state().deployments.get(attachment.deployment)) is not None:
            self.traffic.count(record.name, record.model, prompt_tokens, new_tokens, at_once)
        request.times.finished(reason, self._now())
        request.deliver(Finished(reason, text, prompt_tokens, new_tokens))

    def on_failed(self, attachment: Attachment, request_id: RequestId, epoch: Epoch, failure: EdgeShardError) -> None:
        request = self._current(attachment, request_id, epoch)
        if request is None:
            self.dropped_messages += 1
            return
        attachment.outgoing.put_nowait(ForgetRequest(request_id))
        self._end(request, failure)

    # Clients

    @_refusals_counted
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
        """Hand a request of `client` to the head of the deployment that serves `model`.

        `deadline` is when the client leaves. One that comes again after it lost its stream brings the tokens that it
        has (`emitted`): its request goes on behind them, here or at the head, and waits where there is no head.
        `scored` is the position behind the last one whose prompt log-probability it has.

        Raises NotFoundError, UnavailableError or FailedPreconditionError naming `model`, InvalidArgumentError for a
        generation that cannot be, and what `Admission.let_in` raises. That may come later, as the request's end, where
        a head has to say first what it has.
        """
        if self._closed is not None:
            raise self._closed
        generation.validate()
        record = self.record_of(model)
        resumed = emitted is not None
        attachment = self._attachment_of(record, may_wait=resumed or record.former is not None)
        if generation.max_new_tokens > record.spec.max_new_tokens and not generation.clip_new_tokens:
            raise InvalidArgumentError(
                f"max_new_tokens {generation.max_new_tokens} is beyond the {record.spec.max_new_tokens} that "
                f"deployment {record.name} allows",
                field="max_new_tokens",
                reason="TOO_MANY_NEW_TOKENS",
            )
        request = RunningRequest(request_id, record.name, generation, client, emitted, deadline, scored)
        former = self._admission.let_in(request, record)
        if former is not None:
            self._end(former, UnavailableError("the request goes on in another call", reason="RESUMED_ELSEWHERE"))
        if request.standing is not Standing.AWAITING:
            self._resumptions.take(request_id)
        now = self._now()
        request.times = self.meter.began(record.name, client, now, resumed=resumed)
        request.parked_at = now
        self._requests[request_id] = request
        self.occupied.set()
        if attachment is not None:
            self._hand_over(request, attachment)
        return request

    def hold_keys(self, of_key: Callable[[str], Quota | None]) -> None:
        """API keys have limits of their own: `of_key` gives an identity's, None where it has none."""
        self._quotas.of_key = of_key

    def check_place(self, client: str, reading: int) -> None:
        """Raise ResourceExhaustedError where `client` may have no request beside those that run or wait and `reading`
        ones whose bodies are on their way."""
        held = sum(request.client == client for request in self._requests.values())
        self._quotas.check_place(client, held + reading)

    def check_debt(self, client: str) -> None:
        """Raise ResourceExhaustedError for a client that has used more tokens than its quota."""
        self._quotas.check_debt(client)

    def charge(self, client: str, tokens: int) -> None:
        """They were made of a text of `client`, for no request."""
        self._quotas.charge(client, tokens)

    def records(self) -> tuple[DeploymentRecord, ...]:
        return tuple(self._state().deployments.values())

    def find(self, model: str, only: frozenset[str] | None = None) -> DeploymentRecord:
        """The deployment that serves `model`, by its name or its model's, and can be asked now; where `only` some of
        these names are the caller's business, as if there were no others.

        Raises NotFoundError, InvalidArgumentError, UnavailableError or FailedPreconditionError naming `model`.
        """
        record = self.record_of(model, only)
        self._attachment_of(record, may_wait=False)
        return record

    def abandon(self, request: RunningRequest) -> None:
        """The client's call is over, however it ended: stop the request if it still runs.

        It keeps its place until the head says that its memory is free.
        """
        request.unread_by_choice = True
        if self._requests.get(request.request_id) is not request:
            return
        if request.attachment is None:
            self._leave(request)
        else:
            self._send_cancel(request)

    def cancel(self, request_id: RequestId, client: str | None = None) -> bool:
        """Stop a request; its client gets Finished with reason CANCELLED. False when there is none, of `client` where
        one is named."""
        request = self._requests.get(request_id)
        if request is None or client not in (None, request.client):
            return False
        self._send_cancel(request)
        if request.attachment is None:
            self._remove(request)
            tokens = len(request.prompt_tokens or ()), len(request.emitted)
            request.times.finished(FinishReason.CANCELLED, self._now())
            request.deliver(Finished(FinishReason.CANCELLED, "", *tokens))
        return True

    def owner_of(self, request_id: RequestId) -> str:
        """Whose a running request is; '' for one that is not there, as in plaintext."""
        request = self._requests.get(request_id)
        return "" if request is None else request.client

    def active_requests(self, deployment: DeploymentName) -> int:
        return len(self._of(deployment))

    def all_active_requests(self) -> int:
        return len(self._requests)

    def record_of(self, model: str, only: frozenset[str] | None = None) -> DeploymentRecord:
        """The deployment that serves under this name. Raises NotFoundError or InvalidArgumentError naming `model`."""
        records = [r for r in self._state().deployments.values() if r.phase is not DeploymentPhase.DELETING]
        if only is not None:
            records = [record for record in records if not only.isdisjoint((record.name, record.model))]
        by_name = next((record for record in records if record.name == model), None)
        if by_name is not None:
            return by_name
        serving = [record for record in records if record.model == model]
        if len(serving) == 1:
            return serving[0]
        if serving:
            names = ", ".join(record.name for record in serving)
            raise InvalidArgumentError(
                f"model {model} is served by several deployments; name one of {names}", field="model"
            )
        served = ", ".join(sorted(record.name for record in records)) or "nothing"
        raise NotFoundError(
            f"model {model[:80]!r} is not served here; served: {served}", field="model", reason="MODEL_NOT_SERVED"
        )

    def _of(self, deployment: DeploymentName) -> list[RunningRequest]:
        """The deployment's requests, in the order in which they came."""
        return [request for request in self._requests.values() if request.deployment == deployment]

    def _attachment_of(self, record: DeploymentRecord, *, may_wait: bool) -> Attachment | None:
        attachment = self._attachments.get(record.name)
        is_there = attachment is not None and attachment.epoch == record.epoch
        if is_there and (may_wait or record.phase is DeploymentPhase.READY):
            return attachment
        if record.phase is DeploymentPhase.FAILED:
            why = record.failure.message if record.failure else "unknown"
            raise FailedPreconditionError(
                f"deployment {record.name} failed: {why}; delete it and deploy it again",
                field="model",
                reason="DEPLOYMENT_FAILED",
            )
        if may_wait and record.ever_ready:
            return None
        raise UnavailableError(
            f"deployment {record.name} is {record.phase}, not ready; try again",
            field="model",
            reason="DEPLOYMENT_NOT_READY",
            retry_after_s=1.0,
        )

    def _hand_over(self, request: RunningRequest, attachment: Attachment) -> None:
        start = request.start(self._state().instance)
        if request.failed_heads >= FAILED_HEADS_LIMIT:
            self._end(request, self._not_recovered(request))
            attachment.outgoing.put_nowait(ForgetRequest(request.request_id))
            return
        request.attachment = attachment
        attachment.requests[request.request_id] = request
        attachment.outgoing.put_nowait(start)
        if request.cancel_wanted:
            attachment.outgoing.put_nowait(CancelRequest(request.request_id))

    def _awaited(self, request: RunningRequest, record: DeploymentRecord) -> None:
        """A head has attached, and it is known now what it has: the request comes in, or ends."""
        try:
            self._admission.decide(request, record)
        except EdgeShardError as error:
            self.meter.refused[error.code.name.lower()] += 1
            self._end(request, error)
        else:
            self._resumptions.take(request.request_id)

    def _not_recovered(self, request: RunningRequest) -> UnavailableError:
        record = self._state().deployments.get(request.deployment)
        why = record.failure.message if record is not None and record.failure is not None else "its head was lost"
        return UnavailableError(
            f"deployment {request.deployment} could not go on with the request behind its {len(request.emitted)} "
            f"tokens: {why}; send it again later",
            field="model",
            reason="NOT_RECOVERED",
            retry_after_s=5.0,
        )

    def _current(self, attachment: Attachment, request_id: RequestId, epoch: Epoch) -> RunningRequest | None:
        return attachment.requests.get(request_id) if epoch == attachment.epoch else None

    def _send_cancel(self, request: RunningRequest) -> None:
        if not request.cancel_wanted:
            request.cancel_wanted = True
            if request.attachment is not None:
                request.attachment.outgoing.put_nowait(CancelRequest(request.request_id))

    def _leave(self, request: RunningRequest) -> None:
        request.times.finished(FinishReason.CANCELLED, self._now())
        self._remove(request)

    def _end(self, request: RunningRequest, error: EdgeShardError) -> None:
        self._remove(request)
        request.times.failed(error)
        request.fail(error)

    def _remove(self, request: RunningRequest) -> None:
        if request.attachment is not None:
            request.attachment.requests.pop(request.request_id, None)
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
            # What nobody vouched for is no better for having waited here.
            if request.standing is not Standing.AWAITING:
                self._resumptions.ended(
                    request.request_id, request.claim, is_charged=request.is_charged, is_spent=request.is_back
                )
            if not self._requests:
                self.occupied.clear()
