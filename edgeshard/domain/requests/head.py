"""The coordinator's messages to the head of a pipeline, and the head's answers, on the head's own
stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edgeshard.domain.checks import at_most, one_or_more
from edgeshard.domain.deployments.guesses import NO_GUESSES, GuessCounts
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Epoch, Figure, NodeId, RequestId, check_short
from edgeshard.domain.requests.generation import FinishReason, Generation, PromptLogprobs, Token

MAX_HELD = 8192
"""Requests that a head reports when it attaches: those that run or wait, and 2,048 that are
over."""
MAX_DIGEST_BYTES = 64


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Serve a request. `emitted_tokens` are those the coordinator has already; `client` is whom it
    is for.

    Clients share the pipeline evenly, and none sees another's cached KV; '' if clients are not
    distinguished. A request that is `resumed` was admitted before, so that no limit of waiting
    requests counts for it. The coordinator sets this only for requests that it knows of, not for
    all clients that claim it. `instance` is the run of the coordinator. `digest` is the digest of
    the generation as the client sent it, which the head keeps for the next run. A head that has the
    request already continues it. It sends the tokens after `emitted_tokens` and, if requested, the
    prompt's log-probabilities from position `scored` on.
    """

    request_id: RequestId
    generation: Generation
    emitted_tokens: tuple[int, ...] = ()
    client: str = ""
    resumed: bool = False
    instance: str = ""
    scored: Annotated[int, one_or_more] = 1
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Stop a request and free what it holds."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """The coordinator has the request's end, or no client waits for it any more."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class HeadBeacon:
    """A keepalive. The coordinator sends it while a head has requests. The head answers each,
    unless it has sent something since the previous one.

    Unless another `follows`, none is due before there are requests again, or while a large message
    is under way.
    """

    follows: bool = False


HeadCommand = StartRequest | CancelRequest | ForgetRequest | HeadBeacon


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that a head has from an earlier stream; `instance` is the coordinator's run that
    last started it.

    `client` and `digest` are from its start; an older head or coordinator has no digest. `tokens`
    is the number of new ones that the head has of it, `scored` the position after the prompt's last
    log-probability. A request that is `over` was forgotten, because the coordinator had its end;
    its client may not have got it.
    """

    request_id: Annotated[RequestId, check_short]
    instance: Annotated[str, check_short]
    client: Annotated[str, check_short] = ""
    digest: Annotated[bytes, at_most(MAX_DIGEST_BYTES, "bytes")] = b""
    tokens: int = 0
    scored: Annotated[int, one_or_more] = 1
    over: bool = False


@dataclass(frozen=True, slots=True)
class HeadHello:
    """The first message of a head's stream.

    It has the deployment, the head's requests, the oldest first, and whether the head answers
    beacons. The head knows of no request that ended more than `head_for_s` seconds ago, with
    another head; an older version does not send it."""

    node_id: Annotated[NodeId, check_short]
    deployment: Annotated[DeploymentName, check_short]
    epoch: Epoch
    held: Annotated[tuple[HeldRequest, ...], at_most(MAX_HELD)] = ()
    beacons: bool = False
    head_for_s: Figure | None = None


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    """The request was tokenised and admitted."""

    prompt_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """The request waits no more: it has a place and KV memory, and `read` positions of it were
    read. Sent again with each part of a long prompt except the last, which brings a token. Only
    metrics and views use it."""

    read: int = 0


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request; `text` is the text held back until now. `guesses` are its draft tokens
    with this head while no other request decoded."""

    reason: FinishReason
    text: str
    guesses: GuessCounts = NO_GUESSES


@dataclass(frozen=True, slots=True)
class LastToken:
    """A request's last token, and the end that arrives with it, so that neither is received without
    the other."""

    token: Token
    end: RequestEnd


RequestEvent = (
    Token
    | LastToken
    | PromptLogprobs
    | RequestAccepted
    | RequestAdmitted
    | RequestEnd
    | EdgeShardError
)
"""A head's reports on a request. Log-probabilities of the prompt precede the first token; an error
ends it."""


@dataclass(frozen=True, slots=True)
class HeadEvent:
    request_id: RequestId
    event: RequestEvent


@dataclass(frozen=True, slots=True)
class HeadEvents:
    """One message: an event of any kind, or several tokens in order, since a message costs more
    than a token.

    `epoch` is the stream's. An event with another epoch does not count.
    """

    epoch: Epoch
    events: tuple[HeadEvent, ...]


HeadMessage = HeadHello | HeadEvents | HeadBeacon
