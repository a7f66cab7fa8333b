"""Every store reports its disk's refusal, by one helper, and works when there is space."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.core.values.state import ServedOperation, Timings
from edgeshard_coordinator.membership.api_keys import ApiKeyStore
from edgeshard_coordinator.membership.store import MembershipStore
from edgeshard_coordinator.membership.tokens import TokenRecord
from edgeshard_coordinator.sqlite_store import SqliteStore

from edgeshard.domain.errors import InternalError, ResourceExhaustedError
from edgeshard.domain.identity import ApiKey, principal_from_uri
from edgeshard.domain.ids import OperationId

LARGE = "x" * 20_000
"""More than the free space of a page of the file."""


async def _state(path: Path) -> tuple[SqliteStore, Callable[[], Awaitable[None]]]:
    store = StateStore(path)
    await store.open("instance", Timings())
    return store, lambda: store.save_operation(ServedOperation(OperationId("op"), LARGE, b""))


async def _keys(path: Path) -> tuple[SqliteStore, Callable[[], Awaitable[None]]]:
    store = ApiKeyStore(path)
    await store.open()
    return store, lambda: store.save(ApiKey("name", (LARGE,), None, None, "id", 0.0), "digest")


async def _membership(path: Path) -> tuple[SqliteStore, Callable[[], Awaitable[None]]]:
    store = MembershipStore(path)
    await store.open()
    agent = principal_from_uri("edgeshard://site/agent/a")
    return store, lambda: store.save(TokenRecord("id", LARGE, agent, time.time() + 60, "digest"))


@pytest.mark.parametrize("opened", [_state, _keys, _membership])
async def test_a_full_disk_is_named_and_nothing_is_lost_when_there_is_room(
    opened: Any, tmp_path: Path
) -> None:
    store, write = await opened(tmp_path / "some.sqlite")

    async def pages(most: int) -> None:
        await store._run(
            lambda: store._open_database.execute(f"PRAGMA max_page_count={most}").fetchall()
        )

    await pages(1)  # no fewer than exist: none can be added
    with pytest.raises(ResourceExhaustedError) as full:
        await write()
    assert full.value.reason == "DISK_FULL" and full.value.field == "state-dir"
    await pages(1 << 20)
    await write()
    await store.close()


@pytest.mark.parametrize("opened", [_state, _keys, _membership])
async def test_a_store_that_is_closed_says_which_file(opened: Any, tmp_path: Path) -> None:
    store, write = await opened(tmp_path / "some.sqlite")
    await store._run(store._close)
    with pytest.raises(
        InternalError, match=r"some\.sqlite, which holds .* cannot be used: it is not open"
    ) as caught:
        await write()
    assert caught.value.reason == "STATE_STORE"
    store._thread.shutdown()
