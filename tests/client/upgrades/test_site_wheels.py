"""The address of a site's wheels, as its coordinator returns it to a member."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeshard.client.upgrades import find_wheels
from edgeshard.domain.errors import FailedPreconditionError, UnavailableError
from edgeshard.domain.identity import Role
from edgeshard.rpc.addresses import free_port
from edgeshard.rpc.tls import join_address
from tests.installing.boxes import make_folder
from tests.support.membership import SecureSite

pytestmark = pytest.mark.timing


async def test_a_member_finds_wheels_at_any_port_of_the_site(tmp_path: Path) -> None:
    port = free_port("127.0.0.2", 18443, 400)
    make_folder(tmp_path / "wheels" / "x86_64-py313-cpu", "0.2.0")
    options = ("--wheels", str(tmp_path / "wheels"), "--wheels-listen", f"127.0.0.2:{port}")
    async with SecureSite(tmp_path, *options) as mill:
        for role in Role.AGENT, Role.CLIENT:
            files = mill.identities.of(role, "b")
            assert await find_wheels(mill.coordinator.address, files) == join_address(
                "127.0.0.2", port
            )


async def test_a_site_without_wheels_names_the_two_remedies(tmp_path: Path) -> None:
    async with SecureSite(tmp_path) as mill:
        files = mill.identities.of(Role.AGENT, "b")
        with pytest.raises(FailedPreconditionError, match=r"--wheels DIR.*--from FILE") as refused:
            await find_wheels(mill.coordinator.address, files)
        assert refused.value.reason == "NO_WHEELS"
    with pytest.raises(UnavailableError, match=mill.coordinator.address):
        await find_wheels(mill.coordinator.address, files)
