"""TLS files an operator got wrong are named before anything is dialled or opened."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from edgeshard.domain.errors import DeniedError, InvalidArgumentError, UnauthenticatedError
from edgeshard.domain.identity import Role
from edgeshard.identity.authority import Authority, now
from edgeshard.identity.certificates import is_signed_by
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles, check_secure, tls_from_options
from tests.support.identities import Identities


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return Identities(tmp_path).of(Role.AGENT, "node")


def test_good_files_make_credentials(files: TlsFiles) -> None:
    files.channel_credentials()
    files.server_credentials()


@pytest.mark.parametrize("option", ["ca", "cert", "key"])
@pytest.mark.parametrize(
    "content", [None, b"", b"not a certificate", b"-----BEGIN NONSENSE-----\nx\n"]
)
def test_a_bad_file_is_named(
    files: TlsFiles, tmp_path: Path, option: str, content: bytes | None
) -> None:
    bad = tmp_path / "bad.pem"
    if content is not None:
        bad.write_bytes(content)
    broken = TlsFiles(**{**{n: getattr(files, n) for n in ("ca", "cert", "key")}, option: bad})
    with pytest.raises(InvalidArgumentError) as refusal:
        broken.channel_credentials()
    assert refusal.value.field.startswith("tls-") and str(bad) in refusal.value.message


def test_a_key_of_another_certificate_is_named(files: TlsFiles, tmp_path: Path) -> None:
    other_key = Identities(tmp_path).of(Role.AGENT, "other").key
    with pytest.raises(InvalidArgumentError) as refusal:
        TlsFiles(files.ca, files.cert, other_key).server_credentials()
    assert refusal.value.field == "tls-cert" and str(other_key) in refusal.value.message


def test_a_key_that_others_can_read_is_refused(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that systemd keeps for a service."""
    for mode in (0o640, 0o604, 0o660):
        files.key.chmod(mode)
        with pytest.raises(DeniedError, match=f"chmod 600 {files.key}"):
            files.check()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(files.key.parent))
    files.check()


def test_a_certificate_that_is_gone_is_named_once(files: TlsFiles) -> None:
    files.cert.unlink()
    with pytest.raises(InvalidArgumentError) as refusal:
        files.principal()
    assert refusal.value.message.count(str(files.cert)) == 1


def test_a_certificate_that_does_not_say_who_it_is_of_is_named(
    files: TlsFiles, tmp_path: Path
) -> None:
    """As of the authority itself, or one made by hand without a role."""
    authority = Authority.create("site", now())
    nobody = TlsFiles(tmp_path / "ca.pem", tmp_path / "ca.pem", tmp_path / "ca.key")
    nobody.ca.write_bytes(authority.certificate_pem)
    nobody.key.write_bytes(authority.key_pem)
    nobody.key.chmod(0o600)
    with pytest.raises(InvalidArgumentError) as refusal:
        nobody.channel_credentials()
    assert (refusal.value.field, refusal.value.reason) == ("tls-cert", "NO_ROLE")


def test_a_process_with_the_certificate_of_another_is_refused(files: TlsFiles) -> None:
    files.check_is(Role.AGENT, "node")
    for role, name in ((Role.AGENT, "other"), (Role.COORDINATOR, "node")):
        with pytest.raises(
            InvalidArgumentError, match=f"is of agent node, and this is {role} {name}"
        ):
            files.check_is(role, name)


def test_some_of_the_three_options_are_not_enough(files: TlsFiles) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        tls_from_options(files.ca, None, files.key)
    assert refusal.value.field == "tls-cert"
    assert tls_from_options(None, None, None) is None


@pytest.mark.parametrize(
    "address", ["10.0.0.1:1", "0.0.0.0:1", "[::]:1", "example.org:1", "[fe80::1]:1"]
)
def test_nothing_off_loopback_is_plaintext(files: TlsFiles, address: str) -> None:
    with pytest.raises(DeniedError) as refusal:
        check_secure(address, None, "listen")
    assert refusal.value.reason == "TLS_REQUIRED" and "--tls-ca" in refusal.value.message
    check_secure(address, files, "listen")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback_may_be_plaintext(address: str) -> None:
    check_secure(address, None, "listen")


async def test_a_channel_beyond_loopback_is_refused_before_it_dials() -> None:
    with pytest.raises(DeniedError):
        open_channel("192.0.2.1:7600", None)


def test_a_certificate_of_another_authority_is_named_by_its_own_process(tmp_path: Path) -> None:
    """The called process can only hang up."""
    ours, theirs = (Identities(tmp_path, site).of(Role.AGENT, "a") for site in ("ours", "theirs"))
    mixed = TlsFiles(ours.ca, theirs.cert, theirs.key)
    for credentials in (mixed.channel_credentials, mixed.server_credentials):
        with pytest.raises(
            UnauthenticatedError, match="was not issued by the authority in --tls-ca"
        ) as caught:
            credentials()
        assert caught.value.reason == "OTHER_AUTHORITY"
    both = tmp_path / "both.pem"
    both.write_bytes(theirs.ca.read_bytes() + ours.ca.read_bytes())
    TlsFiles(both, ours.cert, ours.key).channel_credentials()


def test_a_chain_may_lead_to_the_authority() -> None:
    """An authority of one's own may sign by another certificate in between."""
    keys = {
        name: ec.generate_private_key(ec.SECP256R1())
        for name in ("root", "between", "other", "leaf")
    }

    def certificate(name: str, issuer: str) -> bytes:
        subject, by = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer)
        )
        builder = x509.CertificateBuilder(
            by, subject, keys[name].public_key(), 7, now(), now() + timedelta(days=1)
        )
        return builder.sign(keys[issuer], SHA256()).public_bytes(Encoding.PEM)

    root = certificate("root", "root")
    between = certificate("between", "root")
    leaf = certificate("leaf", "between")
    assert is_signed_by(leaf + between, root) and is_signed_by(leaf, between)
    assert not is_signed_by(leaf, root), "the one in between is missing"
    assert not is_signed_by(leaf + certificate("other", "root"), root)
