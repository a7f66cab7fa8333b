"""A caller that guesses secrets locks out only itself, and uses up no token."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from edgeshard_coordinator.membership.tokens import FAILURES_PER_MINUTE

from edgeshard.client.joining import enrol
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.identity import Role
from edgeshard.identity.authority import new_key
from tests.attack import joining
from tests.support.membership import SecureSite

pytestmark = pytest.mark.timing


async def test_a_guesser_locks_out_nobody_and_destroys_no_token(tmp_path: Path) -> None:
    async with SecureSite(tmp_path) as mill, mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
        authority = mill.identities.authority.certificate_pem
        met = await joining.guess(token.enrolment, authority, "mill", token.token_id, count=130)
        assert met == {
            "PERMISSION_DENIED": FAILURES_PER_MINUTE,
            "RESOURCE_EXHAUSTED": 130 - FAILURES_PER_MINUTE,
        }
        with pytest.raises(ResourceExhaustedError) as refusal:
            await enrol(token.invitation, new_key())
        assert 0 < (refusal.value.retry_after_s or 0) <= 60
        async with joining.dialled_from("127.0.0.2", token.enrolment) as elsewhere:
            await enrol(replace(token.invitation, enrolment=elsewhere), new_key())


async def test_calls_that_say_nothing_keep_nobody_out(tmp_path: Path) -> None:
    async with SecureSite(tmp_path) as mill, mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
        authority = mill.identities.authority.certificate_pem
        attack = asyncio.create_task(
            joining.hold_turns(token.enrolment, authority, "mill", count=32)
        )
        await asyncio.sleep(1.0)
        await enrol(token.invitation, new_key())
        attack.cancel()
