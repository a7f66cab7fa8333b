"""What the coordinator tells the head of a pipeline, and what the head answers, on the head's own stream."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.generation import FinishReason, Generation, Token
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, RequestId


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Serve a request. `emitted_tokens` are those its client has already; `client` is whom it is for.

    Clients share the pipeline evenly, and none sees another's cached KV; '' where nobody is told apart.
    """

    request_id: RequestId
    generation: Generation
    emitted_tokens: tuple[int, ...] = ()
    client: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Stop a request and free what it holds."""

    request_id: RequestId


HeadCommand = StartRequest | CancelRequest


@dataclass(frozen=True, slots=True)
class HeadHello:
    """The first message of a head's stream: whose it is."""

    node_id: NodeId
    deployment: DeploymentName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class HeadAccepted:
    """The request was tokenised and admitted."""

    request_id: RequestId
    epoch: Epoch
    prompt_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadToken:
    request_id: RequestId
    epoch: Epoch
    token: Token


@dataclass(frozen=True, slots=True)
class HeadTokens:
    """Several at once, in order: a message costs more than a token."""

    tokens: tuple[HeadToken, ...]


@dataclass(frozen=True, slots=True)
class HeadFinished:
    """The end of a request; `text` is what was held back until now."""

    request_id: RequestId
    epoch: Epoch
    reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class HeadFailed:
    request_id: RequestId
    epoch: Epoch
    failure: EdgeShardError


HeadMessage = HeadHello | HeadAccepted | HeadToken | HeadTokens | HeadFinished | HeadFailed
