"""Logins to the dashboard: links that are good once, keys of applications, and the sessions of
browsers. Pure: times and secrets are passed in as values."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from edgeshard.domain.errors import DeniedError, ResourceExhaustedError, UnauthenticatedError
from edgeshard_coordinator.membership.tokens import digest_of

LINK_TTL_S = 60.0
SESSION_TTL_S = 12 * 3600.0
MOST_LINKS, MOST_SESSIONS = 64, 256
"""The most of operators that are good at a time."""
MOST_OF_KEY = 8
"""The most sessions of one API key; another one ends the oldest."""


class Kind(StrEnum):
    """What a session shows, and may do."""

    OPERATOR = "operator"
    APPLICATION = "application"


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that logged in by a link of the operator `who`, such as `operator/anna`, or by an
    API key, such as `key/notebook#ID`, for only some `models` (None: all). `token` goes with each
    request. Browsers send the cookie to programs on other ports of the host, too, and these cannot
    read the token."""

    who: str
    token: str = field(repr=False)
    ends_at: float
    kind: Kind = Kind.OPERATOR
    models: frozenset[str] | None = None

    def check_is(self, kind: Kind) -> None:
        """Raise DeniedError for a session of another kind."""
        if self.kind is not kind:
            raise DeniedError(
                "an API key gives access only to its models and its usage: operators log in with "
                "the link of "
                "edgectl dashboard"
                if kind is Kind.OPERATOR
                else "this page needs a login with an API key",
                reason="SESSION_KIND",
            )


class Login:
    """`secret` makes a new secret each time. Only digests of links and cookies are kept."""

    def __init__(self, secret: Callable[[], str]) -> None:
        self._secret = secret
        self._links: dict[str, tuple[str, float]] = {}
        self._sessions: dict[str, Session] = {}

    def link(self, who: str, now: float) -> str:
        """A secret that lets a browser of the operator `who` in, once, within `LINK_TTL_S`
        seconds."""
        self._links = {digest: link for digest, link in self._links.items() if link[1] > now}
        if len(self._links) >= MOST_LINKS:
            raise ResourceExhaustedError(
                f"{MOST_LINKS} links to the dashboard were made in the last minute; use one, or "
                "wait",
                reason="TOO_MANY_LINKS",
                retry_after_s=LINK_TTL_S,
            )
        secret = self._secret()
        self._links[digest_of(secret.encode())] = (who, now + LINK_TTL_S)
        return secret

    def enter(self, secret: str, now: float) -> tuple[str, Session]:
        """The cookie and the session of a browser that shows the secret of a link.

        Raises UnauthenticatedError, in the same words for a secret that is made up, too old, or was
        used.
        """
        who, good_until = self._links.pop(digest_of(secret.encode()), ("", now))
        if good_until <= now:
            raise UnauthenticatedError(
                "this link was used already, or is older than a minute: make another with edgectl "
                "dashboard",
                field="secret",
                reason="DASHBOARD_LINK",
            )
        self._forget_old(now)
        if (
            sum(session.kind is Kind.OPERATOR for session in self._sessions.values())
            >= MOST_SESSIONS
        ):
            raise ResourceExhaustedError(
                f"{MOST_SESSIONS} browsers are logged in: log out of some",
                reason="TOO_MANY_SESSIONS",
            )
        return self._opened(Session(who, self._secret(), now + SESSION_TTL_S))

    def enter_by_key(
        self, who: str, models: frozenset[str] | None, now: float
    ) -> tuple[str, Session]:
        """The cookie and the session of a browser that showed an API key, whose identity is
        `who`."""
        self._forget_old(now)
        own = [digest for digest, session in self._sessions.items() if session.who == who]
        for digest in own[: max(0, len(own) + 1 - MOST_OF_KEY)]:
            del self._sessions[digest]
        return self._opened(
            Session(who, self._secret(), now + SESSION_TTL_S, Kind.APPLICATION, models)
        )

    def _opened(self, session: Session) -> tuple[str, Session]:
        cookie = self._secret()
        self._sessions[digest_of(cookie.encode())] = session
        return cookie, session

    def _forget_old(self, now: float) -> None:
        self._sessions = {
            digest: session for digest, session in self._sessions.items() if session.ends_at > now
        }

    def session(self, cookie: str | None, now: float) -> Session:
        """The session of a browser. Raises UnauthenticatedError if it has none, or if it ended."""
        session = None if cookie is None else self._sessions.get(digest_of(cookie.encode()))
        if session is None or session.ends_at <= now:
            raise UnauthenticatedError(
                "this browser is not logged in: open the link that edgectl dashboard prints, or "
                "show an API key",
                reason="NO_SESSION",
            )
        return session

    def leave(self, cookie: str) -> None:
        """End a session."""
        self._sessions.pop(digest_of(cookie.encode()), None)

    def end_of(self, who: str) -> None:
        """End all links and sessions of an operator, or of an API key."""
        self._links = {digest: link for digest, link in self._links.items() if link[0] != who}
        self._sessions = {
            digest: session for digest, session in self._sessions.items() if session.who != who
        }


def shows_token(session: Session, token: str) -> bool:
    """Whether a request was made by a page of this session."""
    return hmac.compare_digest(session.token.encode(), token.encode())
