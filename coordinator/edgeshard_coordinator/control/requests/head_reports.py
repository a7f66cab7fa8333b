"""Heads' reports of their requests.

The journal of a request (prompt and emitted tokens) decides which reports count: those of the epoch that the request
runs in, and of tokens the one at the position that comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeshard.domain.errors import EdgeShardError, ResourceExhaustedError
from edgeshard.domain.ids import Epoch, RequestId
from edgeshard.domain.requests.generation import FinishReason, PromptLogprobs, Started, Token
from edgeshard.domain.requests.head import ForgetRequest
from edgeshard_coordinator.control.requests.quotas import QuotaBook
from edgeshard_coordinator.control.requests.request_table import RequestTable
from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.core.values.state import State


@dataclass(eq=False)
class HeadReports:
    """Takes each report to its request's journal and client. Every method returns at once.

    `state` gives the newest state, `now` seconds of a steady clock. A client may fall `backlog_limit` events behind
    before its request is given up.
    """

    _state: Callable[[], State]
    _requests: RequestTable
    _quotas: QuotaBook
    _traffic: TrafficBook
    _now: Callable[[], float]
    _backlog_limit: int
    dropped_messages: int = 0
    """Tokens and other messages of heads that came too late, twice or out of order."""

    def on_accepted(
        self, attachment: Attachment, request_id: RequestId, epoch: Epoch, prompt_tokens: tuple[int, ...]
    ) -> None:
        if (request := self._running(attachment, request_id, epoch)) is None:
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
        if not request.unread_by_choice:
            self._pass_on(request, token)
        return True

    def on_finished(
        self, attachment: Attachment, request_id: RequestId, epoch: Epoch, reason: FinishReason, text: str
    ) -> None:
        if (request := self._running(attachment, request_id, epoch)) is None:
            return
        at_once = len(attachment.requests)
        self._requests.remove(request)
        attachment.outgoing.put_nowait(ForgetRequest(request_id))
        if (record := self._state().deployments.get(attachment.deployment)) is not None:
            prompt_tokens, new_tokens = len(request.prompt_tokens or ()), len(request.emitted)
            self._traffic.count(record.name, record.model, prompt_tokens, new_tokens, at_once)
        request.finish(reason, text, self._now())

    def on_failed(self, attachment: Attachment, request_id: RequestId, epoch: Epoch, failure: EdgeShardError) -> None:
        if (request := self._running(attachment, request_id, epoch)) is None:
            return
        attachment.outgoing.put_nowait(ForgetRequest(request_id))
        self._requests.end(request, failure)

    def _pass_on(self, request: RunningRequest, token: Token) -> None:
        """Give its client the token, or give up a client that reads too slowly."""
        if request.backlog < self._backlog_limit:
            request.deliver(token)
            return
        slow = ResourceExhaustedError(
            f"the client is {request.backlog} tokens behind; read the stream faster or ask for fewer tokens",
            reason="SLOW_READER",
        )
        request.fail(slow, drop_unread=True)
        request.unread_by_choice = True
        request.cancel()

    def _running(self, attachment: Attachment, request_id: RequestId, epoch: Epoch) -> RunningRequest | None:
        """As `_current`. None counts as a message that is dropped."""
        request = self._current(attachment, request_id, epoch)
        self.dropped_messages += request is None
        return request

    def _current(self, attachment: Attachment, request_id: RequestId, epoch: Epoch) -> RunningRequest | None:
        return attachment.requests.get(request_id) if epoch == attachment.epoch else None
