"""The certificates that an authority signs, and those it refuses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import Principal, Role, principal_from_uri
from edgeshard.identity.authority import Authority, new_key, private_pem, request_for
from edgeshard.identity.certificates import BACKDATED, principal_of

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
NODE = Principal("mill", Role.AGENT, "node-a")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("mill", NOW)


def test_a_certificate_says_who_it_is_of_and_for_how_long(authority: Authority) -> None:
    key = new_key()
    made = x509.load_pem_x509_certificate(
        authority.issue(NODE, request_for(key), NOW, timedelta(days=2))
    )
    ca = x509.load_pem_x509_certificate(authority.certificate_pem)
    made.verify_directly_issued_by(ca)
    assert made.public_key() == key.public_key()
    assert (made.not_valid_before_utc, made.not_valid_after_utc) == (
        NOW - BACKDATED,
        NOW + timedelta(days=2),
    )
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert principal_of(made.public_bytes(serialization.Encoding.PEM)) == NODE


def test_what_a_request_says_of_itself_is_not_taken(authority: Authority) -> None:
    key = new_key()
    name = x509.SubjectAlternativeName(
        [x509.UniformResourceIdentifier("edgeshard://mill/operator/admin")]
    )
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.add_extension(name, critical=False).add_extension(constraints, critical=True)
    pem = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    made = authority.issue(NODE, pem, NOW)
    assert principal_of(made) == NODE
    known = x509.load_pem_x509_certificate(made).extensions.get_extension_for_class(
        x509.BasicConstraints
    )
    assert not known.value.ca


@pytest.mark.parametrize(
    "key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())]
)
def test_other_keys_are_refused(
    authority: Authority, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
) -> None:
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256())
    )
    with pytest.raises(InvalidArgumentError):
        authority.issue(NODE, request.public_bytes(serialization.Encoding.PEM), NOW)


@pytest.mark.parametrize("damage", [b"", b"-----BEGIN NONSENSE-----\n", None])
def test_a_request_that_is_none_is_refused(authority: Authority, damage: bytes | None) -> None:
    """None stands for one whose signature is of another key."""
    if damage is None:
        der = bytearray(
            x509.load_pem_x509_csr(request_for(new_key())).public_bytes(serialization.Encoding.DER)
        )
        der[-1] ^= 1
        damage = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(InvalidArgumentError):
        authority.issue(NODE, damage, NOW)


def test_an_authority_is_read_back(authority: Authority) -> None:
    again = Authority.load(authority.certificate_pem, authority.key_pem)
    made = x509.load_pem_x509_certificate(again.issue(NODE, request_for(new_key()), NOW))
    made.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate_pem))
    with pytest.raises(InvalidArgumentError):
        Authority.load(authority.certificate_pem, private_pem(new_key())[:40])


def test_a_name_is_never_more_than_a_name() -> None:
    assert principal_from_uri(NODE.uri) == NODE and NODE.dns_name == "node-a.agent.mill"
    for uri in (
        "edgeshard://mill/agent/a/b",
        "edgeshard://mill/agent/",
        "edgeshard:///agent/a",
        "edgeshard://m/boss/a",
    ):
        with pytest.raises(InvalidArgumentError):
            principal_from_uri(uri)
