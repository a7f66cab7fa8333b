"""A clock outside a certificate is named; TLS itself only reports that it cannot verify the
certificate."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from edgeshard.client import joining
from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.domain.identity import Invitation, Principal, Role, authority_digest, coordinator_of
from edgeshard.identity.authority import Authority, new_key, now, private_pem, request_for
from edgeshard.identity.certificates import check_valid_now, ders_of
from edgeshard.rpc import clocks
from edgeshard.rpc.tls_files import write_files

SITE = "home"
YEAR = timedelta(days=365)


@pytest.fixture
def authority() -> Authority:
    return Authority.create(SITE, now() - YEAR, life=3 * YEAR)


def issued(authority: Authority, principal: Principal, directory: Path, at: datetime) -> object:
    key = new_key()
    certificate = authority.issue(principal, request_for(key), at)
    return write_files(directory, authority.certificate_pem, certificate, private_pem(key))


@pytest.fixture
def address(authority: Authority, tmp_path: Path) -> Iterator[str]:
    """A coordinator's port, as far as a handshake goes; its certificate is of now."""
    files = issued(authority, coordinator_of(SITE), tmp_path / "coordinator", now())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)  # type: ignore[attr-defined]

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    continue

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_certificate_is_compared_with_the_clock(authority: Authority) -> None:
    at = now()
    check_valid_now(authority.certificate_pem, "the certificate of x", at)
    for wrong in (at - 2 * YEAR, at + 9 * YEAR):
        with pytest.raises(FailedPreconditionError) as caught:
            check_valid_now(authority.certificate_pem, "the certificate of x", wrong)
        assert (caught.value.reason, caught.value.field) == ("CLOCK", "clock")
        assert caught.value.message.startswith(
            f"this machine's clock shows {wrong:%Y-%m-%d %H:%M} UTC, but the "
        )
        assert "timedatectl" in caught.value.message


@pytest.mark.parametrize("behind", [timedelta(hours=3), timedelta(days=7)])
async def test_joining_with_a_wrong_clock_names_the_clock(
    authority: Authority, address: str, monkeypatch: pytest.MonkeyPatch, behind: timedelta
) -> None:
    monkeypatch.setattr(joining, "now", lambda: now() - behind)
    (der,) = ders_of(authority.certificate_pem)
    principal = Principal(SITE, Role.AGENT, "pi")
    invitation = Invitation(authority_digest(der), principal, address, address, b"s" * 16)
    with pytest.raises(FailedPreconditionError, match="this machine's clock shows") as caught:
        await joining.enrol(invitation, new_key())
    assert caught.value.reason == "CLOCK"


def test_a_refusal_by_tls_is_explained_by_the_clock(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clocks.clock_error(address) is None
    monkeypatch.setattr("edgeshard.identity.authority.now", lambda: now() - timedelta(hours=3))
    error = clocks.clock_error(address)
    assert error is not None and f"the certificate of {address} is valid from" in error.message
    assert clocks.clock_error("127.0.0.1:1") is None


async def test_a_call_with_a_clock_before_the_own_certificate_names_it(
    authority: Authority, address: str, tmp_path: Path
) -> None:
    operator = Principal(SITE, Role.OPERATOR, "admin")
    files = issued(authority, operator, tmp_path / "operator", now() + timedelta(days=1))
    with pytest.raises(
        FailedPreconditionError, match=r"this machine's clock shows .* but --tls-cert "
    ):
        files.check()  # type: ignore[attr-defined]
