"""An API key is known by its own id: a later key of the same name has nothing of a revoked one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.requests.quotas import QuotaBook
from edgeshard_coordinator.control.requests.replicas import TOKEN_BLOCK, PrefixBook
from edgeshard_coordinator.control.requests.request_meter import KeyCounts, RequestMeter
from edgeshard_coordinator.control.services.gateway import ApiKeyAuthenticator
from edgeshard_coordinator.core.values.quotas import Quota, Quotas
from edgeshard_coordinator.membership.api_keys import ApiKeyStore, KeyBook

from edgeshard.domain.errors import ResourceExhaustedError, UnauthenticatedError
from edgeshard.domain.identity import ApiKey, shown_identity
from edgeshard.domain.ids import DeploymentName
from edgeshard.gateway.access.auth import Caller

NAME = DeploymentName("tale")


async def two_of_a_name(keys: KeyBook) -> tuple[Caller, Caller]:
    """The callers of a key that was revoked and of another one of its name."""
    no_audit: Any = None
    entrance = ApiKeyAuthenticator(keys, no_audit)
    callers: list[Caller] = []
    for _ in range(2):
        if callers:
            await keys.revoke("app")
        _, text = await keys.create(ApiKey("app", (), 60, 2))
        callers.append(entrance.enter(text, "GET /v1/models", "127.0.0.1:1"))
    return callers[0], callers[1]


async def test_a_later_key_of_the_name_shares_no_prefix_debt_or_count(tmp_path: Path) -> None:
    keys = KeyBook(ApiKeyStore(tmp_path / "keys.sqlite"), lambda: 1.0)
    await keys.open()
    former, later = await two_of_a_name(keys)
    assert shown_identity(former.identity) == shown_identity(later.identity) == "key/app"
    prompt = tuple(range(4 * TOKEN_BLOCK))
    prefixes = PrefixBook()
    prefixes.went_to(prefixes.marks(NAME, former.identity, prompt), NAME)
    assert prefixes.holder(prefixes.marks(NAME, former.identity, prompt)) == NAME
    assert prefixes.holder(prefixes.marks(NAME, later.identity, prompt)) is None
    quotas = QuotaBook(
        Quotas({"key/app": Quota(tokens_per_minute=60, max_priority=3)}), lambda: 0.0, keys.quota_of
    )
    quotas.charge(former.identity, 600)
    with pytest.raises(ResourceExhaustedError, match=r"^key/app has used"):
        quotas.check_debt(former.identity)
    quotas.check_debt(later.identity)
    assert quotas.of(later.identity) == Quota(2, 60, 3), (
        "the quotas' file and the key's own limits hold for it"
    )
    meter = RequestMeter()
    meter.began(NAME, former.identity, 0.0, resumed=False)
    assert (meter.of_key(former.identity).requests, meter.of_key(later.identity)) == (
        1,
        KeyCounts(),
    )
    with pytest.raises(UnauthenticatedError):
        former.check()
    later.check()
    await keys.close()
