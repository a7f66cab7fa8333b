"""What happens at the same time: who is revoked while something of it is under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from edgeshard_coordinator.membership.membership import Issuing, Membership
from edgeshard_coordinator.membership.store import MembershipStore
from edgeshard_coordinator.membership.tokens import FAILURES_PER_MINUTE

from edgeshard.domain.errors import DeniedError, ResourceExhaustedError
from edgeshard.domain.identity import Enrolment, Principal, Role, TokenRequest, coordinator_of
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
    ends = await asyncio.gather(*(membership.enrol(each) for each in requests), return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["DeniedError"] * 3 + ["tuple"]


async def test_wrong_secrets_cost_their_sender_and_not_the_token(membership: Membership) -> None:
    """Whoever guesses is refused for a while, also with a right secret; who joins from elsewhere does, and so does the
    guesser's neighbour after the wait."""
    token = await membership.create_token(TokenRequest(Role.AGENT, "b", 600.0), "a:1", "a:2")
    wrong = Enrolment(token.token_id, b"x" * 16, request_for(new_key()))
    right = Enrolment(token.token_id, token.secret, request_for(new_key()))
    for number in range(FAILURES_PER_MINUTE):
        with pytest.raises(DeniedError):
            await membership.enrol(wrong, f"[2001:db8::{number + 1:x}]:5")
    ends = await asyncio.gather(
        *(membership.enrol(wrong, "10.0.0.1:5") for _ in range(3 * FAILURES_PER_MINUTE)), return_exceptions=True
    )
    assert sum(isinstance(end, DeniedError) for end in ends) == FAILURES_PER_MINUTE, "also those that come at once"
    for address in ("[2001:db8::99]:5", "10.0.0.1:6"):
        with pytest.raises(ResourceExhaustedError) as refusal:
            await membership.enrol(right, address)
        assert refusal.value.reason == "RATE" and 0 < (refusal.value.retry_after_s or 0) <= 60
    await membership.enrol(right, "[2001:db8:0:1::1]:5")
    membership._steady = lambda: 60.0
    await membership.enrol(right, "10.0.0.1:6")


async def test_many_boxes_join_from_one_address(membership: Membership) -> None:
    for number in range(2 * FAILURES_PER_MINUTE):
        token = await membership.create_token(TokenRequest(Role.AGENT, f"b{number}", 60.0), "a:1", "a:2")
        await membership.enrol(Enrolment(token.token_id, token.secret, request_for(new_key())), "10.0.0.1:5")


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
    assert told == [APP] and (tmp_path / "state" / "membership.sqlite").stat().st_mode & 0o777 == 0o600


async def test_the_coordinator_renews_itself(membership: Membership) -> None:
    principal = coordinator_of("mill")
    certificate, _ = await membership.renew(principal, request_for(new_key()))
    assert b"BEGIN CERTIFICATE" in certificate
