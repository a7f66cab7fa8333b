"""A site found on the network: by its real coordinator's announcement, on loopback, among false
ones."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edgeshard.client.joining import enrol, invitation_from_text, located
from edgeshard.domain.errors import FailedPreconditionError, UnavailableError
from edgeshard.domain.identity import Invitation, Role
from edgeshard.identity.authority import new_key
from edgeshard.process import extras
from edgeshard.rpc.discovery import SERVICE, Announced, keep_announced
from tests.support.identities import tls_options
from tests.support.membership import SecureSite, edgectl

pytestmark = [pytest.mark.timing, pytest.mark.asyncio(loop_scope="module")]
FIND_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureSite]:
    async with SecureSite(tmp_path_factory.mktemp("mill"), "--announce") as site:
        yield site


async def invited(mill: SecureSite, role: Role = Role.OPERATOR, name: str = "eva") -> Invitation:
    """By a token without an address."""
    async with mill.client_of() as admin:
        token = await admin.create_token(role, name)
    return token.invitation.without_address()


@contextlib.asynccontextmanager
async def announcing(site: str, authority: bytes, enrolment: str) -> AsyncIterator[None]:
    """An announcement with any content, by another host on the same network."""
    task = asyncio.ensure_future(
        keep_announced(Announced(site, authority, "127.0.0.1:7600", enrolment))
    )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_the_site_of_a_token_is_found_and_joined(mill: SecureSite) -> None:
    invitation = await invited(mill)
    there = await located(invitation, FIND_S)
    assert there.coordinator == mill.coordinator.address and there.has_address
    certificate, _ = await enrol(there, new_key())
    assert certificate.startswith(b"-----BEGIN CERTIFICATE")
    assert await located(there) is there


async def test_who_claims_to_be_the_site_is_passed_over_and_learns_nothing(
    mill: SecureSite, tmp_path: Path
) -> None:
    invitation = await invited(mill)
    heard: list[bytes] = []

    async def listen(reader: Any, writer: Any) -> None:
        heard.append(await reader.read(1 << 16))
        writer.close()

    silent = await asyncio.start_server(listen, "127.0.0.1", 0)
    liar = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    (tmp_path / "other").mkdir()
    async with SecureSite(tmp_path / "other") as other:  # a real site, of another authority
        async with other.client_of() as admin:
            elsewhere = (await admin.create_token(Role.OPERATOR, "eva")).enrolment
        async with (
            announcing("mill", invitation.authority, liar),
            announcing("mill", invitation.authority, elsewhere),
            announcing("mill", bytes(len(invitation.authority)), elsewhere),
        ):
            there = await located(invitation, FIND_S)
            assert there.coordinator == mill.coordinator.address
            # Only false ones, for a site that does not exist.
            nobody = replace(invitation, authority=bytes(len(invitation.authority)))
            with pytest.raises(UnavailableError, match="1 that claim to be it are not") as raised:
                await located(nobody, 5.0)
    assert raised.value.field == "token"
    silent.close()
    assert not any(invitation.secret in text for text in heard)


async def test_nonsense_on_the_network_is_passed_over(mill: SecureSite) -> None:
    from zeroconf import ServiceInfo
    from zeroconf.asyncio import AsyncZeroconf

    invitation = await invited(mill)
    digest = invitation.authority.hex()
    sender = AsyncZeroconf(interfaces=["127.0.0.1"])
    nonsense: list[dict[Any, Any]] = [
        {},
        {"authority": digest},
        {"authority": digest, "coordinator": "70000"},
        {"authority": digest, "coordinator": "٧"},
        {"authority": b"\xff", "coordinator": b"\xff"},
    ]
    for number, told in enumerate(nonsense):
        info = ServiceInfo(
            SERVICE, f"x{number}.{SERVICE}", port=9, properties=told, parsed_addresses=["127.0.0.1"]
        )
        await sender.async_register_service(info)
    try:
        assert (await located(invitation, FIND_S)).coordinator == mill.coordinator.address
    finally:
        await sender.async_close()


async def test_an_announcement_ends_with_its_coordinator(tmp_path: Path) -> None:
    async with SecureSite(tmp_path, "--announce") as site:
        invitation = await invited(site)
        await located(invitation, FIND_S)
    with pytest.raises(UnavailableError, match=r"site mill does not answer .*--announce"):
        await located(invitation, 2.0)


async def test_edgectl_makes_and_takes_a_token_without_an_address(
    mill: SecureSite, tmp_path: Path
) -> None:
    home = {
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    options = [
        "--coordinator",
        mill.coordinator.address,
        *tls_options(mill.identities.of(Role.OPERATOR, "admin")),
    ]
    create = ("token", "create", "--role", "operator", "--name", "otto", "--discover")
    code, line, said = await edgectl(*options, *create, environment=home)
    assert code == 0 and "it looks for the site on its network" in said
    token = line.split()[-1]
    assert not invitation_from_text(token).has_address
    code, _, said = await edgectl("join", token, environment=home)
    assert (code, said.splitlines()[0]) == (0, f"site mill is at {mill.coordinator.address}")
    code, out, _ = await edgectl("get", "nodes", "-o", "json", environment=home)
    assert (code, out.strip()) == (0, "[]")


async def test_without_the_extra_the_token_says_what_is_missing(
    mill: SecureSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(extras._NEEDED, "discovery", ("a_module_that_nobody_has",))
    with pytest.raises(FailedPreconditionError, match="needs the discovery extra"):
        await located(await invited(mill))


async def test_who_announces_has_to_let_others_join(tmp_path: Path) -> None:
    arguments = (
        "--plaintext",
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        str(tmp_path / "state"),
        "--announce",
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "edgeshard_coordinator",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), FIND_S)
    assert process.returncode == 2 and b"--announce needs --enrol-listen" in said, said
