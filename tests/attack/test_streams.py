"""One certificate holds a bounded number of streams, and another's do not count."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from edgeshard.domain.identity import Role
from edgeshard.rpc import open_calls
from edgeshard.rpc.server import Server
from tests.attack import streams
from tests.coordinator.conftest import open_site
from tests.support.identities import Identities

__all__ = ["open_site"]

pytestmark = pytest.mark.timing


async def test_one_certificate_opens_only_so_many_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_calls, "MOST_STREAMS", 8, raising=False)
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.coordinator())
    address = await server.start()
    eve, bob = identities.of(Role.CLIENT, "eve"), identities.of(Role.CLIENT, "bob")
    try:
        held = await streams.open_many(address, eve, "Watch", count=20)
        assert held == {streams.OPEN: 8, "STREAMS": 12}
        assert await streams.open_many(address, bob, "Watch", count=2) == {streams.OPEN: 2}
        async with asyncio.timeout(30):  # what ended makes room
            while await streams.open_many(address, eve, "Watch", count=2) != {streams.OPEN: 2}:
                pass
    finally:
        await server.stop(0)


async def test_listeners_are_such_streams(
    open_site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_calls, "MOST_STREAMS", 8)
    identities = Identities(tmp_path)
    site = await open_site(identities=identities)
    held = await streams.open_many(
        site.address, identities.of(Role.CLIENT, "eve"), "Listen", count=20
    )
    assert held == {streams.OPEN: 8, "STREAMS": 12}
