"""Certificates that are replaced under a running process: the time, the files, and the effect on
its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from edgeshard.domain.errors import (
    DeniedError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from edgeshard.domain.identity import Principal, Role
from edgeshard.identity import authority
from edgeshard.identity.authority import new_key, request_for
from edgeshard.identity.certificates import serial_of, validity_of
from edgeshard.rpc.access import ROLES
from edgeshard.rpc.channel import RenewingChannel, open_channel
from edgeshard.rpc.renewal import adopted, keep_renewed, renew_now
from edgeshard.rpc.server import Server
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import write_private
from tests.support.identities import Identities

pytestmark = pytest.mark.timing

METHOD = "/grpc.health.v1.Health/Echo"
APP = Principal("site", Role.CLIENT, "app")


class Serials(grpc.GenericRpcHandler):
    """Each message is answered with the serial number of the caller's certificate."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for _ in requests:
                yield serial_of(context.auth_context()["x509_pem_cert"][0]).encode()

        return grpc.stream_stream_rpc_method_handler(answer) if details.method == METHOD else None


@pytest.fixture
async def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, Identities]]:
    monkeypatch.setattr("edgeshard.rpc.access.ROLES", {**ROLES, METHOD: frozenset(Role)})
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.coordinator())
    server.grpc.add_generic_rpc_handlers((Serials(),))
    yield await server.start(), identities
    await server.stop(0)


def replace_certificate(identities: Identities, files: TlsFiles, principal: Principal = APP) -> str:
    """Another certificate for the key of the files; its serial number."""
    request = request_for(authority.load_key(files.key.read_bytes()))
    certificate = identities.authority.issue(principal, request, authority.now())
    write_private(files.cert, certificate)
    return serial_of(certificate)


async def said(call: Any) -> str:
    await call.write(b"who am I?")
    return bytes(await asyncio.wait_for(call.read(), 20)).decode()


async def test_new_calls_have_the_newest_certificate_and_streams_stay(
    served: tuple[str, Identities],
) -> None:
    address, identities = served
    files = identities.of(Role.CLIENT, "app")
    first = serial_of(files.cert.read_bytes())
    async with open_channel(address, files) as channel:
        assert isinstance(channel, RenewingChannel)
        method = channel.stream_stream(METHOD)
        old = method()
        assert await said(old) == first
        second = replace_certificate(identities, files)
        new = method()
        assert await said(new) == second and await said(old) == first
        assert len(channel._old) == 1
        await old.done_writing()
        assert await old.read() is grpc.aio.EOF and await old.code() is grpc.StatusCode.OK
        async with asyncio.timeout(20):
            while channel._old or channel._closing:  # noqa: ASYNC110 - what is watched has no event
                await asyncio.sleep(0.01)
        assert await said(new) == second


async def test_a_certificate_that_cannot_be_used_is_not_taken_up(
    served: tuple[str, Identities],
) -> None:
    address, identities = served
    files = identities.of(Role.CLIENT, "app")
    first, whole = serial_of(files.cert.read_bytes()), files.cert.read_bytes()
    async with open_channel(address, files) as channel:
        for broken in (b"", whole[:200], identities.of(Role.CLIENT, "other").cert.read_bytes()):
            files.cert.write_bytes(broken)
            assert await said(channel.stream_stream(METHOD)()) == first
        files.cert.unlink()
        assert await said(channel.stream_stream(METHOD)()) == first


async def test_a_server_shows_the_newest_certificate(served: tuple[str, Identities]) -> None:
    """Without a restart: who connects verifies another one than who connected before."""
    address, identities = served
    coordinator = identities.coordinator()
    app = identities.of(Role.CLIENT, "app")
    async with open_channel(address, app) as channel:
        await said(channel.stream_stream(METHOD)())
    replace_certificate(identities, coordinator, Principal("site", Role.AGENT, "x"))
    async with open_channel(address, app) as channel:
        call: Any = channel.stream_stream(METHOD)()
        # it is not the coordinator's any more
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.UNAVAILABLE
    replace_certificate(identities, coordinator, Principal("site", Role.COORDINATOR, "coordinator"))
    async with open_channel(address, app) as channel:
        await said(channel.stream_stream(METHOD)())


async def test_it_is_renewed_at_two_thirds_and_tried_again_until_its_end(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    files = identities.of(Role.CLIENT, "app")
    validity = validity_of(files.cert.read_bytes())
    time = validity.renewal - timedelta(hours=1.5)
    slept = []
    asked = []

    class Over(Exception):
        pass

    async def sleep(seconds: float) -> None:
        nonlocal time
        slept.append(seconds)
        time += timedelta(seconds=seconds)
        if len(slept) == 6:
            raise Over

    async def renew(request: bytes) -> tuple[bytes, bytes]:
        asked.append(time)
        if len(asked) < 3:
            raise UnavailableError("the coordinator is away")
        certificate = identities.authority.issue(APP, request, time, timedelta(days=10))
        return certificate, identities.authority.certificate_pem

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Over):
        patch.setattr("edgeshard.rpc.renewal.asyncio.sleep", sleep)
        await keep_renewed(files, renew, lambda: time)
    assert slept[:4] == [3600.0, 1800.0, 600.0, 600.0] and asked[0] == validity.renewal
    assert validity_of(files.cert.read_bytes()).begins == asked[2].replace(microsecond=0)


@pytest.mark.parametrize("refusal", [FailedPreconditionError("no authority here")])
async def test_a_site_that_makes_none_is_not_asked_again(
    tmp_path: Path, refusal: Exception
) -> None:
    files = Identities(tmp_path).of(Role.CLIENT, "app")
    before = files.cert.read_bytes()

    async def renew(request: bytes) -> tuple[bytes, bytes]:
        raise refusal

    await keep_renewed(files, renew, lambda: validity_of(before).renewal + timedelta(seconds=1))
    assert files.cert.read_bytes() == before


async def test_an_application_prints_what_it_likes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program may read the output of edgectl."""
    identities = Identities(tmp_path)
    files = identities.of(Role.CLIENT, "app")

    async def renew(request: bytes) -> tuple[bytes, bytes]:
        return identities.authority.issue(
            APP, request, authority.now()
        ), identities.authority.certificate_pem

    await renew_now(files, renew)
    async with open_channel("127.0.0.1:1", files) as channel:
        method: Any = channel.stream_stream(METHOD)
        files.cert.write_bytes(b"")
        method().cancel()
    assert capsys.readouterr().out == ""


async def test_a_certificate_of_another_key_is_refused(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    files = identities.of(Role.CLIENT, "app")
    before = files.cert.read_bytes()

    async def renew(request: bytes) -> tuple[bytes, bytes]:
        other = identities.authority.issue(APP, request_for(new_key()), authority.now())
        return other, identities.authority.certificate_pem

    with pytest.raises(InvalidArgumentError):
        await renew_now(files, renew)
    assert files.cert.read_bytes() == before


def test_a_daemon_keeps_the_newer_of_two_certificates_of_its_key(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    given = identities.of(Role.CLIENT, "app")
    kept = adopted(given, tmp_path / "state" / "pki")
    assert kept.cert.read_bytes() == given.cert.read_bytes() and kept.key == given.key
    newer = authority.now() + timedelta(days=1)
    request = request_for(authority.load_key(given.key.read_bytes()))
    renewed = identities.authority.issue(APP, request, newer)
    write_private(kept.cert, renewed)
    assert adopted(given, tmp_path / "state" / "pki").cert.read_bytes() == renewed
    # Another key was given: the stored files are useless.
    other = identities.of(Role.CLIENT, "other")
    assert adopted(other, tmp_path / "state" / "pki").cert.read_bytes() == other.cert.read_bytes()


def test_authorities_of_the_last_renewal_count_until_others_are_given(tmp_path: Path) -> None:
    identities, directory = Identities(tmp_path), tmp_path / "state" / "pki"
    given = identities.of(Role.CLIENT, "app")
    kept = adopted(given, directory)
    both = (
        identities.authority.certificate_pem
        + authority.Authority.create("site", authority.now()).certificate_pem
    )
    write_private(kept.ca, both)
    assert adopted(given, directory).ca.read_bytes() == both
    given.ca.write_bytes(identities.authority.certificate_pem + b"\n")
    assert adopted(given, directory).ca.read_bytes() == given.ca.read_bytes()


async def test_a_key_that_others_can_read_is_not_taken_up(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    given = identities.of(Role.CLIENT, "app")
    given.key.chmod(0o644)
    with pytest.raises(DeniedError) as refusal:
        adopted(given, tmp_path / "state" / "pki")
    assert "chmod 600" in refusal.value.message and not (tmp_path / "state").exists()


def test_a_state_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(InvalidArgumentError) as refusal:
        adopted(Identities(tmp_path).of(Role.CLIENT, "app"), tmp_path / "state" / "pki")
    assert refusal.value.field == "state-dir"
