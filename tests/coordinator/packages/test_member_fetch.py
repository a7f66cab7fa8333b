"""A member of a site fetches its wheels: all of them, no changed one, and nothing from another
site."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edgeshard.client import upgrades
from edgeshard.client.upgrades import SiteWheels
from edgeshard.domain.errors import FailedPreconditionError, UnavailableError
from edgeshard.domain.identity import Denial, Principal, Role
from edgeshard.rpc.addresses import free_port
from tests.coordinator.packages.test_listener import CONTENT, WHEEL, Site, started
from tests.support.identities import Identities

pytestmark = pytest.mark.timing

HERE = "x86_64-py311-cpu"
MACHINE = {"platform": "x86_64", "pythons": "3.11", "accelerator": "cpu"}


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(upgrades, "_machine", lambda: MACHINE)
    async with started(tmp_path) as found:
        yield found


def wheels_of(site: Site) -> SiteWheels:
    return SiteWheels(site.address, site.identities.of(Role.AGENT, "b"))


async def test_all_files_are_fetched_and_a_half_one_continues(site: Site, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    (into / f"{WHEEL}.part").write_bytes(CONTENT[:1000])
    (into / "pip-1-py3-none-any.whl").write_text("of another version")
    wheels = wheels_of(site)
    folder = await asyncio.to_thread(wheels.folder)
    assert folder.name == HERE
    await asyncio.to_thread(wheels.fetch, folder, into)
    assert sorted(path.name for path in into.iterdir()) == [WHEEL, "install.sh", "requirements.txt"]
    assert (into / WHEEL).read_bytes() == CONTENT


async def test_a_file_that_changed_since_the_list_is_not_kept(site: Site, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    wheels = wheels_of(site)
    folder = await asyncio.to_thread(wheels.folder)
    (site.directory / "wheels" / HERE / WHEEL).write_bytes(b"another")
    with pytest.raises(FailedPreconditionError, match="not the file"):
        await asyncio.to_thread(wheels.fetch, folder, into)
    assert not (into / WHEEL).exists()


async def test_a_revoked_member_is_refused(site: Site) -> None:
    site.denials.replace([Denial(Principal("mill", Role.AGENT, "b"), ())])
    with pytest.raises(FailedPreconditionError, match="revoked"):
        await asyncio.to_thread(wheels_of(site).folder)


async def test_another_site_is_not_believed(site: Site, tmp_path: Path) -> None:
    stranger = Identities(tmp_path / "stranger", "mill").of(Role.AGENT, "b")
    with pytest.raises(FailedPreconditionError, match="not this node's site"):
        await asyncio.to_thread(SiteWheels(site.address, stranger).folder)


async def test_a_site_without_wheels_for_this_machine_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrades, "_machine", lambda: MACHINE | {"platform": "riscv64"})
    with pytest.raises(FailedPreconditionError, match="this machine is riscv64"):
        await asyncio.to_thread(wheels_of(site).folder)


def test_a_closed_port_names_the_other_ways(tmp_path: Path) -> None:
    files = Identities(tmp_path, "mill").of(Role.AGENT, "b")
    address = f"127.0.0.1:{free_port('127.0.0.1', 20000, 1000)}"
    with pytest.raises(UnavailableError, match="--from FILE"):
        SiteWheels(address, files).folder()
