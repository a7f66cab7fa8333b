"""One stream for the tokens of all requests of a client: a message costs more than a token."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.generation import Finished, Token

UNREAD_TOKENS = 512
"""Tokens of a request that the coordinator sends beyond those that its client has read."""


@dataclass(frozen=True, slots=True)
class ListenerHello:
    """The first message of a listener's stream."""

    id: str


@dataclass(frozen=True, slots=True)
class TokensRead:
    """The application has read `count` tokens more of a request."""

    number: int
    count: int


ListenerMessage = ListenerHello | TokensRead


@dataclass(frozen=True, slots=True)
class Heard:
    """The content of one message, each with the request's number: tokens in order, and then ends.

    A request has finished, or has failed after it had started.
    """

    tokens: tuple[tuple[int, Token], ...] = ()
    ends: tuple[tuple[int, Finished | EdgeShardError], ...] = ()
