"""API keys: kept hashed, good until they are revoked, held to their own limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from edgeshard_coordinator.core.values.quotas import Quota, parse_quotas
from edgeshard_coordinator.membership.api_keys import ApiKeyStore, KeyBook

from edgeshard.domain.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
)
from edgeshard.domain.identity import ApiKey, key_identity, shown_identity


def book(directory: Path) -> KeyBook:
    return KeyBook(ApiKeyStore(directory / "keys.sqlite"), lambda: 1000.0)


@pytest_asyncio.fixture
async def keys(tmp_path: Path) -> AsyncIterator[KeyBook]:
    opened = book(tmp_path)
    await opened.open()
    yield opened
    await opened.close()


async def test_a_key_outlives_the_coordinator_and_only_its_hash_is_on_disk(tmp_path: Path) -> None:
    first = book(tmp_path)
    await first.open()
    made, text = await first.create(ApiKey("app", ("tales",), 100, 2))
    assert (made.name, made.models, made.tokens_per_minute, made.requests) == (
        "app",
        ("tales",),
        100,
        2,
    )
    assert made.created_at == 1000.0 and text.startswith(f"esk-{made.key_id}-")
    await first.close()
    second = book(tmp_path)
    await second.open()
    assert second.find(text) == made and second.list() == (made,)
    await second.close()
    for path in tmp_path.iterdir():
        assert text.split("-", 2)[2].encode() not in path.read_bytes()
    assert (tmp_path / "keys.sqlite").stat().st_mode & 0o077 == 0


async def test_whoever_does_not_know_the_secret_hears_nothing(keys: KeyBook) -> None:
    _, text = await keys.create(ApiKey("app"))
    said = set()
    for wrong in (
        text[:-1] + ("A" if text[-1] != "A" else "B"),
        text + "A",
        "esk-" + "0" * 12 + text[16:],
        "",
        "x",
    ):
        with pytest.raises(UnauthenticatedError) as refusal:
            keys.find(wrong)
        said.add((refusal.value.reason, refusal.value.message))
    assert len(said) == 1


async def test_a_revoked_key_is_refused_and_what_it_runs_ends(tmp_path: Path) -> None:
    ended: list[str] = []
    keys = book(tmp_path)
    await keys.open(ended.append)
    key, text = await keys.create(ApiKey("app"))
    identity = key_identity("app", key.key_id)
    keys.check(identity)
    with pytest.raises(AlreadyExistsError):
        await keys.create(ApiKey("app"))
    await keys.revoke("app")
    assert ended == [identity] and shown_identity(identity) == "key/app"
    with pytest.raises(UnauthenticatedError):
        keys.check(identity)
    with pytest.raises(UnauthenticatedError):
        keys.find(text)
    with pytest.raises(NotFoundError):
        await keys.revoke("app")
    _, again = await keys.create(ApiKey("app"))
    assert again != text and keys.find(again).name == "app"
    with pytest.raises(UnauthenticatedError):
        keys.check(identity)  # another key of the name is another
    await keys.close()


async def test_limits_of_a_key_are_its_own_quota(keys: KeyBook) -> None:
    small, _ = await keys.create(ApiKey("small", (), 100, 2))
    free, _ = await keys.create(ApiKey("free"))
    assert keys.quota_of(key_identity("small", small.key_id)) == Quota(2, 100)
    others = (
        key_identity("free", free.key_id),
        "client/small",
        "",
        "key/small",
        key_identity("small", "0" * 12),
    )
    assert [keys.quota_of(who) for who in others] == [None] * 5
    assert parse_quotas({"key/free": {"requests": 3}}, "quotas").of(others[0]) == Quota(3)
    assert parse_quotas({}, "quotas").max_priority_of(others[0]) == 0


async def test_a_disk_that_refuses_keeps_no_half_of_a_key(
    keys: KeyBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise InternalError("the disk refuses")

    monkeypatch.setattr(ApiKeyStore, "save", refuse)
    with pytest.raises(InternalError):
        await keys.create(ApiKey("app"))
    assert keys.list() == ()


@pytest.mark.parametrize(
    "wrong",
    [ApiKey("No Name"), ApiKey("a", ("../x",)), ApiKey("a", (), 0), ApiKey("a", (), None, 0)],
)
def test_what_no_key_is_like(wrong: ApiKey) -> None:
    with pytest.raises(InvalidArgumentError):
        wrong.check()
