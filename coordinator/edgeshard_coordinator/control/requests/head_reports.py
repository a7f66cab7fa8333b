"""Heads' reports of their requests.

The journal of a request (prompt and emitted tokens) decides which reports count. A report must be
of the epoch that the request runs in, and a token must be the one at the next position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite

import structlog

from edgeshard.domain.errors import EdgeShardError, ResourceExhaustedError, UnavailableError
from edgeshard.domain.requests.generation import (
    Prompt,
    PromptLogprobs,
    Started,
    Token,
    TokenLogprob,
)
from edgeshard.domain.requests.head import (
    ForgetRequest,
    HeadEvents,
    LastToken,
    RequestAccepted,
    RequestAdmitted,
    RequestEnd,
    RequestEvent,
)
from edgeshard_coordinator.control.requests.quotas import QuotaBook
from edgeshard_coordinator.control.requests.request_table import RequestTable
from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

log = structlog.get_logger()

TOKEN_CHARACTERS = 1024
"""Characters of text that a token of an answer may have on average."""
FIRST_CHARACTERS = 1 << 16
"""And this many more, for text that was held back."""
TOKENS_OF_A_BYTE = 4
"""A tokenizer may make more than one token of a byte, by its rules for characters."""
ADDED_TOKENS = 256
"""Tokens that a template or a tokenizer may add to a prompt."""


def _wrong_prompt(prompt: Prompt, tokens: tuple[int, ...], record: DeploymentRecord) -> str | None:
    """Why these cannot be the tokens of a prompt; None if they can."""
    if not isinstance(prompt, str):
        return None if tokens == tuple(prompt) else "other tokens than the prompt's"
    placement = record.placement
    # If only the model limits a context, the KV memory of all requests does, too.
    context = record.spec.max_context or placement.kv_blocks * placement.kv_block_tokens
    most = min(context, TOKENS_OF_A_BYTE * len(prompt.encode("utf-8", "replace")) + ADDED_TOKENS)
    return (
        None if len(tokens) <= most else f"a prompt of {len(tokens)} tokens, more than it can have"
    )


def _are_finite(top: Iterable[TokenLogprob]) -> bool:
    """Whether all these log-probabilities are finite: no JSON holds another number."""
    return all(isfinite(entry.logprob) for entry in top)


@dataclass(eq=False)
class HeadReports:
    """Takes each report to its request's journal and client. Every method returns at once.

    `state` returns the newest state, `now` seconds of a steady clock. A request is ended if its
    client lags by more than `backlog_limit` events.
    """

    _state: Callable[[], State]
    _requests: RequestTable
    _quotas: QuotaBook
    _traffic: TrafficBook
    _now: Callable[[], float]
    _backlog_limit: int
    dropped_messages: int = 0
    """Tokens and other messages of heads that arrived too late, twice or out of order."""

    def take(self, attachment: Attachment, message: HeadEvents) -> None:
        """Process a head's messages from its stream. A message of another epoch than the stream's
        does not count."""
        for item in message.events:
            request = (
                attachment.requests.get(item.request_id)
                if message.epoch == attachment.epoch
                else None
            )
            if request is None or not self._on_event(attachment, request, item.event):
                self.dropped_messages += 1

    def _refuse(self, attachment: Attachment, request: RunningRequest, why: str) -> None:
        """End a request whose head reports what cannot be. The head computes it no further."""
        log.warning(
            "report_refused", deployment=attachment.deployment, node_id=attachment.node_id, why=why
        )
        error = UnavailableError(
            f"node {attachment.node_name}, the head of deployment {attachment.deployment}, "
            f"reported {why}; send the "
            "request again, and look at the node's log",
            reason="WRONG_REPORT",
        )
        request.cancel()
        self._requests.end(request, error)

    def _on_event(
        self, attachment: Attachment, request: RunningRequest, event: RequestEvent
    ) -> bool:
        """Take an event of a request that runs here; whether it counts."""
        match event:
            case Token():
                return self._on_token(attachment, request, event)
            case LastToken():
                is_counted = self._on_token(attachment, request, event.token)
                return is_counted and self._on_end(attachment, request, event.end)
            case PromptLogprobs():
                return self._on_prompt_logprobs(attachment, request, event)
            case RequestAccepted():
                self._on_accepted(attachment, request, event.prompt_tokens)
            case RequestAdmitted():
                request.times.admitted(self._now())
                request.read = event.read
            case RequestEnd():
                return self._on_end(attachment, request, event)
            case EdgeShardError():
                attachment.outgoing.put_nowait(ForgetRequest(request.request_id))
                self._requests.end(request, event)
        return True

    def _on_accepted(
        self, attachment: Attachment, request: RunningRequest, prompt_tokens: tuple[int, ...]
    ) -> None:
        record = self._state().deployments.get(attachment.deployment)
        if request.prompt_tokens is not None or record is None:
            return  # It continues: its client knows that it has started.
        if (why := _wrong_prompt(request.generation.prompt, prompt_tokens, record)) is not None:
            self._refuse(attachment, request, why)
            return
        request.prompt_tokens = prompt_tokens
        request.times.accepted(len(prompt_tokens))
        if not request.is_charged:
            request.is_charged = True
            # If a client resumes with tokens, the head reads them, as it does a prompt.
            self._quotas.charge(request.client, len(prompt_tokens) + len(request.emitted))
        request.deliver(
            Started(request.request_id, record.served_name, prompt_tokens, record.placement)
        )

    def _on_prompt_logprobs(
        self, attachment: Attachment, request: RunningRequest, prompt_logprobs: PromptLogprobs
    ) -> bool:
        """Log-probabilities count once, as tokens do: only those after the earlier ones. They must
        be within the bounds of their request."""
        if request.prompt_tokens is None or prompt_logprobs.position != request.scored:
            return False
        generation = request.generation
        most_top = generation.sampling.top_logprobs
        if (
            not generation.prompt_logprobs
            or not prompt_logprobs.logprobs  # without an entry it would count again and again
            or prompt_logprobs.end > len(request.prompt_tokens)
            or max(map(len, prompt_logprobs.top), default=0) > most_top
            or not all(map(isfinite, prompt_logprobs.logprobs))
            or not all(map(_are_finite, prompt_logprobs.top))
        ):
            self._refuse(attachment, request, "log-probabilities that were not requested")
            return False
        request.scored = prompt_logprobs.end
        if not request.unread_by_choice:
            request.deliver(prompt_logprobs)
        return True

    def _on_token(self, attachment: Attachment, request: RunningRequest, token: Token) -> bool:
        """A token counts once: at the position that follows the request's journal. It must be
        within the bounds of its request."""
        if token.position != request.next_position:
            return False
        generation = request.generation
        count = len(request.emitted)
        request.characters += len(token.text)
        if (
            count >= generation.max_new_tokens
            or request.characters > FIRST_CHARACTERS + TOKEN_CHARACTERS * count
            or not isfinite(token.logprob)
            or (token.top and len(token.top) > generation.sampling.top_logprobs)
            or (token.top and not _are_finite(token.top))
        ):
            self._refuse(attachment, request, "more tokens than were requested")
            return False
        if len(token.timings) > attachment.stages:
            # They are figures only, of another placement or false.
            token = replace(token, timings=())
        request.emitted.append(token.token)
        request.times.token(self._now())
        self._quotas.charge(request.client, 1)
        if not request.unread_by_choice:
            self._pass_on(request, token)
        return True

    def _on_end(self, attachment: Attachment, request: RunningRequest, end: RequestEnd) -> bool:
        """The end of a request, with the rest of its text; whether it is within the bounds of its
        request."""
        request.characters += len(end.text)
        if request.characters > FIRST_CHARACTERS + TOKEN_CHARACTERS * len(request.emitted):
            self._refuse(attachment, request, "text after the requested end")
            return False
        at_once = len(attachment.requests)
        self._requests.remove(request)
        attachment.outgoing.put_nowait(ForgetRequest(request.request_id))
        if (record := self._state().deployments.get(attachment.deployment)) is not None:
            prompt_tokens = len(request.prompt_tokens or ())
            new_tokens = len(request.emitted)
            self._traffic.count(
                record.served_name, record.model, prompt_tokens, new_tokens, at_once, end.guesses
            )
        request.finish(end.reason, end.text, self._now())
        return True

    def _pass_on(self, request: RunningRequest, token: Token) -> None:
        """Send the token to its client, or end the request of a client that reads too slowly."""
        if request.backlog < self._backlog_limit:
            request.deliver(token)
            return
        slow = ResourceExhaustedError(
            f"the client has not read {request.backlog} tokens; read the stream faster or request "
            "fewer tokens",
            reason="SLOW_READER",
        )
        request.fail(slow, drop_unread=True)
        request.unread_by_choice = True
        request.cancel()
