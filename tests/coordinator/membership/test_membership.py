"""Concurrent events: a principal is revoked while one of its calls runs."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from edgeshard_coordinator.membership.membership import Issuing, Membership
from edgeshard_coordinator.membership.store import MembershipStore
from edgeshard_coordinator.membership.tokens import FAILURES_PER_MINUTE

from edgeshard.domain.errors import DeniedError, NotFoundError, ResourceExhaustedError
from edgeshard.domain.identity import (
    Enrolment,
    OpenToken,
    Principal,
    Role,
    TokenRequest,
    coordinator_of,
)
from edgeshard.identity import authority
from edgeshard.identity.authority import new_key, request_for
from edgeshard.rpc.denials import Denials
from tests.support.identities import Identities

pytestmark = pytest.mark.timing

APP = Principal("mill", Role.CLIENT, "app")


def membership_in(directory: Path) -> Membership:
    identities = Identities(directory, "mill")
    issuing = Issuing(identities.authority, identities.coordinator(), timedelta(days=1))
    store = MembershipStore(directory / "state" / "membership.sqlite")
    return Membership("mill", store, Denials(), issuing, authority.now, lambda: 0.0)


@pytest.fixture
async def membership(tmp_path: Path) -> AsyncIterator[Membership]:
    made = membership_in(tmp_path)
    await made.open()
    yield made
    await made.close()


async def test_a_renewal_that_began_before_is_refused(membership: Membership) -> None:
    """Its certificate would be one that was made since, which is accepted."""

    def check() -> None:
        if membership.denials.list():
            raise DeniedError("revoked")

    revoking = asyncio.create_task(membership.revoke(Role.CLIENT, "app"))
    await asyncio.sleep(0)  # it has the lock
    with pytest.raises(DeniedError):
        await membership.renew(APP, request_for(new_key()), check)
    await revoking
    (denial,) = membership.denials.list()
    assert denial.principal == APP and not denial.accepted


async def test_two_processes_with_one_token_at_once(membership: Membership) -> None:
    token = await membership.create_token(TokenRequest(Role.AGENT, "b", 60.0), "a:1", "a:2")
    requests = [Enrolment(token.token_id, token.secret, request_for(new_key())) for _ in range(4)]
    ends = await asyncio.gather(
        *(membership.enrol(each) for each in requests), return_exceptions=True
    )
    assert sorted(type(end).__name__ for end in ends) == ["DeniedError"] * 3 + ["tuple"]


async def test_open_tokens_are_those_that_let_a_process_in(membership: Membership) -> None:
    """Neither a used one nor an expired one can be revoked: nothing would change."""
    began = time.time()
    wanted = TokenRequest(Role.AGENT, "b", 60.0)
    first = await membership.create_token(wanted, "a:1", "a:2", "operator/kim")
    used = await membership.create_token(TokenRequest(Role.CLIENT, "app", 60.0), "a:1", "a:2")
    await membership.enrol(Enrolment(used.token_id, used.secret, request_for(new_key())))
    (token,) = await membership.open_tokens()
    times = token.created_at, token.expires_at
    assert token == OpenToken(first.token_id, Role.AGENT, "b", *times, "operator/kim")
    assert began <= times[0] <= time.time() and times[1] == times[0] + 60.0
    later = authority.now() + timedelta(seconds=61)
    for token_id, now in [(used.token_id, authority.now), (first.token_id, lambda: later)]:
        membership._now = now
        with pytest.raises(NotFoundError, match="edgectl token list"):
            await membership.revoke_token(token_id)
    assert await membership.open_tokens() == ()


async def test_a_token_is_used_or_revoked_and_not_both(membership: Membership) -> None:
    token = await membership.create_token(TokenRequest(Role.AGENT, "b", 60.0), "a:1", "a:2")
    enrolment = Enrolment(token.token_id, token.secret, request_for(new_key()))
    ends = await asyncio.gather(
        membership.revoke_token(token.token_id), membership.enrol(enrolment), return_exceptions=True
    )
    assert sum(isinstance(end, Exception) for end in ends) == 1
    assert await membership.open_tokens() == ()


async def test_a_file_without_creators_keeps_its_tokens(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with sqlite3.connect(state / "membership.sqlite") as database:
        database.execute(
            "CREATE TABLE tokens (token_id TEXT PRIMARY KEY, digest TEXT NOT NULL, "
            "principal TEXT NOT NULL, expires_at REAL NOT NULL, key_digest TEXT NOT NULL, guesses "
            "INTEGER NOT NULL)"
        )
        values = ("0123456789abcdef", "d", "edgeshard://mill/agent/b", time.time() + 60, "", 0)
        database.execute("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?)", values)
    database.close()
    membership = membership_in(tmp_path)
    for _ in range(2):  # also when the columns are there
        await membership.open()
        (token,) = await membership.open_tokens()
        assert (token.token_id, token.id) == ("0123456789abcdef", "b")
        assert (token.created_at, token.creator) == (0.0, "")
        await membership.close()
        membership = membership_in(tmp_path)


async def test_wrong_secrets_cost_their_sender_and_not_the_token(membership: Membership) -> None:
    """A guesser is refused for a while, also with a right secret. A joiner from elsewhere is
    admitted, and so is the guesser's neighbour after the wait."""
    token = await membership.create_token(TokenRequest(Role.AGENT, "b", 600.0), "a:1", "a:2")
    wrong = Enrolment(token.token_id, b"x" * 16, request_for(new_key()))
    right = Enrolment(token.token_id, token.secret, request_for(new_key()))
    for number in range(FAILURES_PER_MINUTE):
        with pytest.raises(DeniedError):
            await membership.enrol(wrong, f"[2001:db8::{number + 1:x}]:5")
    ends = await asyncio.gather(
        *(membership.enrol(wrong, "10.0.0.1:5") for _ in range(3 * FAILURES_PER_MINUTE)),
        return_exceptions=True,
    )
    assert sum(isinstance(end, DeniedError) for end in ends) == FAILURES_PER_MINUTE, (
        "also those that come at once"
    )
    for address in ("[2001:db8::99]:5", "10.0.0.1:6"):
        with pytest.raises(ResourceExhaustedError) as refusal:
            await membership.enrol(right, address)
        assert refusal.value.reason == "RATE" and 0 < (refusal.value.retry_after_s or 0) <= 60
    await membership.enrol(right, "[2001:db8:0:1::1]:5")
    membership._steady = lambda: 60.0
    await membership.enrol(right, "10.0.0.1:6")


async def test_many_boxes_join_from_one_address(membership: Membership) -> None:
    for number in range(2 * FAILURES_PER_MINUTE):
        token = await membership.create_token(
            TokenRequest(Role.AGENT, f"b{number}", 60.0), "a:1", "a:2"
        )
        await membership.enrol(
            Enrolment(token.token_id, token.secret, request_for(new_key())), "10.0.0.1:5"
        )


async def test_what_is_denied_is_on_disk_before_it_counts(tmp_path: Path) -> None:
    told: list[Principal] = []

    async def on_denied(principal: Principal) -> None:
        other = MembershipStore(tmp_path / "state" / "membership.sqlite")
        assert [denial.principal for denial in await other.open()] == [principal]
        await other.close()
        told.append(principal)

    membership = membership_in(tmp_path)
    await membership.open(on_denied)
    await membership.revoke(Role.CLIENT, "app")
    await membership.close()
    assert (
        told == [APP] and (tmp_path / "state" / "membership.sqlite").stat().st_mode & 0o777 == 0o600
    )


async def test_the_coordinator_renews_itself(membership: Membership) -> None:
    principal = coordinator_of("mill")
    certificate, _ = await membership.renew(principal, request_for(new_key()))
    assert b"BEGIN CERTIFICATE" in certificate
