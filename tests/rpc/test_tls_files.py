"""TLS files an operator got wrong are named before anything is dialled or opened."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles, check_secure, tls_from_options


def write_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = directory / f"{name}.crt", directory / f"{name}.key"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_path, key_path


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    cert, key = write_pair(tmp_path, "node")
    return TlsFiles(cert, cert, key)


def test_good_files_make_credentials(files: TlsFiles) -> None:
    files.channel_credentials()
    files.server_credentials()


@pytest.mark.parametrize("option", ["ca", "cert", "key"])
@pytest.mark.parametrize("content", [None, b"", b"not a certificate", b"-----BEGIN NONSENSE-----\nx\n"])
def test_a_bad_file_is_named(files: TlsFiles, tmp_path: Path, option: str, content: bytes | None) -> None:
    bad = tmp_path / "bad.pem"
    if content is not None:
        bad.write_bytes(content)
    broken = TlsFiles(**{**{n: getattr(files, n) for n in ("ca", "cert", "key")}, option: bad})
    with pytest.raises(InvalidArgumentError) as refusal:
        broken.channel_credentials()
    assert refusal.value.field.startswith("tls-") and str(bad) in refusal.value.message


def test_a_key_of_another_certificate_is_named(files: TlsFiles, tmp_path: Path) -> None:
    _, other_key = write_pair(tmp_path, "other")
    with pytest.raises(InvalidArgumentError) as refusal:
        TlsFiles(files.ca, files.cert, other_key).server_credentials()
    assert refusal.value.field == "tls-cert" and str(other_key) in refusal.value.message


def test_some_of_the_three_options_are_not_enough(files: TlsFiles) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        tls_from_options(files.ca, None, files.key)
    assert refusal.value.field == "tls-cert"
    assert tls_from_options(None, None, None) is None


@pytest.mark.parametrize("address", ["10.0.0.1:1", "0.0.0.0:1", "[::]:1", "example.org:1", "[fe80::1]:1"])
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
