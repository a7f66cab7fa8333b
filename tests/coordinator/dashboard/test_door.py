"""Links that are good once, and sessions that end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
from edgeshard_coordinator.dashboard.door import (
    LINK_TTL_S,
    MOST_LINKS,
    MOST_OF_KEY,
    MOST_SESSIONS,
    SESSION_TTL_S,
    Kind,
    Login,
    shows_token,
)

from edgeshard.domain.errors import DeniedError, ResourceExhaustedError, UnauthenticatedError

ANNA = "operator/anna"
BERT = "operator/bert"
KEY = "key/notebook"


def secrets() -> Callable[[], str]:
    numbers = count()
    return lambda: f"secret {next(numbers)}"


@pytest.fixture
def door() -> Login:
    return Login(secrets())


def test_a_link_lets_in_once(door: Login) -> None:
    secret = door.link(ANNA, 0.0)
    cookie, session = door.enter(secret, 1.0)
    assert door.session(cookie, 2.0) is session and session.who == ANNA
    with pytest.raises(UnauthenticatedError) as used:
        door.enter(secret, 2.0)
    with pytest.raises(UnauthenticatedError) as made_up:
        door.enter("guess", 2.0)
    assert used.value.message == made_up.value.message, "it does not say which of the two it was"


def test_an_old_link_does_not(door: Login) -> None:
    secret = door.link(ANNA, 0.0)
    with pytest.raises(UnauthenticatedError):
        door.enter(secret, LINK_TTL_S)


def test_a_session_ends_by_time_and_by_leaving(door: Login) -> None:
    (first, _), (second, _) = (door.enter(door.link(ANNA, 0.0), 0.0) for _ in range(2))
    door.leave(first)
    for cookie, now in ((first, 1.0), (second, SESSION_TTL_S), ("guess", 1.0), (None, 1.0)):
        with pytest.raises(UnauthenticatedError):
            door.session(cookie, now)
    assert door.session(second, SESSION_TTL_S - 1).who == ANNA


def test_an_operator_who_is_revoked_has_neither_links_nor_sessions(door: Login) -> None:
    links = [door.link(who, 0.0) for who in (ANNA, BERT)]
    cookies = [door.enter(door.link(who, 0.0), 0.0)[0] for who in (ANNA, BERT)]
    door.end_of(ANNA)
    with pytest.raises(UnauthenticatedError):
        door.enter(links[0], 1.0)
    with pytest.raises(UnauthenticatedError):
        door.session(cookies[0], 1.0)
    assert door.session(cookies[1], 1.0).who == door.enter(links[1], 1.0)[1].who == BERT


def test_a_token_is_of_its_session(door: Login) -> None:
    one, other = (door.enter(door.link(ANNA, 0.0), 0.0)[1] for _ in range(2))
    assert shows_token(one, one.token)
    assert not any(shows_token(one, token) for token in (other.token, "", "ä"))


def test_links_and_sessions_are_bounded_until_some_end(door: Login) -> None:
    for _ in range(MOST_LINKS):
        door.link(ANNA, 0.0)
    with pytest.raises(ResourceExhaustedError):
        door.link(ANNA, 1.0)
    for number in range(MOST_SESSIONS):
        door.enter(door.link(ANNA, 100.0 + number), 100.0 + number)
    with pytest.raises(ResourceExhaustedError):
        door.enter(door.link(ANNA, 500.0), 500.0)
    door.enter(
        door.link(ANNA, 99.0 + SESSION_TTL_S + MOST_SESSIONS), 99.0 + SESSION_TTL_S + MOST_SESSIONS
    )


def test_the_session_of_a_key_is_of_another_kind_and_ends_with_the_key(door: Login) -> None:
    cookie, session = door.enter_by_key(KEY, frozenset({"tales"}), 0.0)
    operator, theirs = door.enter(door.link(ANNA, 0.0), 0.0)
    assert door.session(cookie, 1.0) is session and session.models == frozenset({"tales"})
    session.check_is(Kind.APPLICATION)
    theirs.check_is(Kind.OPERATOR)
    for one, kind in ((session, Kind.OPERATOR), (theirs, Kind.APPLICATION)):
        with pytest.raises(DeniedError):
            one.check_is(kind)
    door.end_of(KEY)
    with pytest.raises(UnauthenticatedError):
        door.session(cookie, 1.0)
    assert door.session(operator, 1.0) is theirs


def test_keys_take_no_place_of_operators_nor_of_each_other(door: Login) -> None:
    other, _ = door.enter_by_key("key/other", None, 0.0)
    cookies = [
        door.enter_by_key(KEY, None, float(number))[0] for number in range(2 * MOST_SESSIONS)
    ]
    alive = []
    for cookie in cookies:
        with suppress(UnauthenticatedError):
            door.session(cookie, 600.0)
            alive.append(cookie)
    assert alive == cookies[-MOST_OF_KEY:], "the oldest ended"
    assert door.session(other, 600.0).who == "key/other"
    assert door.enter(door.link(ANNA, 600.0), 600.0)[1].who == ANNA


def test_secrets_are_not_shown(door: Login) -> None:
    cookie, session = door.enter(door.link(ANNA, 0.0), 0.0)
    assert session.token not in repr(session)
    assert cookie not in repr(vars(door))
