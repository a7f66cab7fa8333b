"""The certificate authority of a site, which certifies the identity of its processes.

Times are passed in as values. Keys are of P-256, which every TLS library supports.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import Principal
from edgeshard.identity.certificates import BACKDATED, UNREADABLE

AUTHORITY_LIFE = timedelta(days=3650)
LIFE = timedelta(days=90)


class Authority:
    """Signs the certificates of one site."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, site: str, now: datetime, life: timedelta = AUTHORITY_LIFE) -> Authority:
        """A new one, with a key of its own. The name is for people; no decision depends on it."""
        key = new_key()
        name = _name(f"EdgeShard site {site}")
        usage = x509.KeyUsage(**{use: use in ("key_cert_sign", "crl_sign") for use in _KEY_USES})
        certificate = (
            _builder(name, name, key.public_key(), now, life)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, bundle_pem: bytes, key_pem: bytes) -> Authority:
        """The authority of the key, from the certificates in the PEM: a site that changes its
        authority trusts two for a while.

        Raises InvalidArgumentError for PEM of another kind, and if no certificate belongs to the
        key.
        """
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
            certificates = x509.load_pem_x509_certificates(bundle_pem)
        except UNREADABLE as error:
            raise InvalidArgumentError(
                f"the authority cannot be read: {error}", field="ca-key"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidArgumentError(
                "the authority's key is not of an elliptic curve", field="ca-key"
            )
        for certificate in certificates:
            if certificate.public_key() == key.public_key():
                return cls(certificate, key)
        raise InvalidArgumentError(
            "the key belongs to none of the trusted authorities", field="ca-key"
        )

    @property
    def certificate_pem(self) -> bytes:
        """What every process of the site trusts."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The private key; its holder can impersonate anyone at the site."""
        return private_pem(self._key)

    def derived(self, purpose: str) -> bytes:
        """32 secret bytes for one purpose, by HKDF of the authority's key: the same each time, and
        on no disk."""
        scalar = self._key.private_numbers().private_value.to_bytes((self._key.key_size + 7) // 8)
        return HKDF(hashes.SHA256(), 32, salt=None, info=f"edgeshard {purpose}".encode()).derive(
            scalar
        )

    def issue(
        self, principal: Principal, request_pem: bytes, now: datetime, life: timedelta = LIFE
    ) -> bytes:
        """A certificate in PEM of `principal` for the key that signed the request.

        Only the request's key is used: the identity is decided by the process that admitted the
        caller. Raises InvalidArgumentError for an invalid request, or one that its key has not
        signed.
        """
        names = [x509.UniformResourceIdentifier(principal.uri), x509.DNSName(principal.dns_name)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._issue(
            principal.dns_name, names, usages, _requested_key(request_pem), now, life
        )

    def issue_for_hosts(
        self, hosts: Sequence[str], request_pem: bytes, now: datetime, life: timedelta = LIFE
    ) -> bytes:
        """A certificate in PEM for a server that is called by these names and addresses; it speaks
        of no principal. Raises as `issue`."""
        names = [_general_name(host) for host in hosts]
        return self._issue(
            hosts[0],
            names,
            [ExtendedKeyUsageOID.SERVER_AUTH],
            _requested_key(request_pem),
            now,
            life,
        )

    def _issue(
        self,
        subject: str,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        key: ec.EllipticCurvePublicKey,
        now: datetime,
        life: timedelta,
    ) -> bytes:
        certificate = (
            _builder(_name(subject), self._certificate.subject, key, now, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def request_for(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate signing request in PEM: that whoever sends it has the key."""
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM)


def load_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    """A process's own key. Raises InvalidArgumentError for one of another kind."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except UNREADABLE as error:
        raise InvalidArgumentError(f"the key cannot be read: {error}", field="tls-key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidArgumentError("the key is not of an elliptic curve", field="tls-key")
    return key


def key_digest(request_pem: bytes) -> str:
    """The sha256 of a request's public key, by which it is known again. Raises InvalidArgumentError
    as `issue`."""
    key = _requested_key(request_pem)
    content = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return sha256(content).hexdigest()


def now() -> datetime:
    """The time that certificates are held against."""
    return datetime.now(UTC)


def _requested_key(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        signed = request.is_signature_valid
    except (*UNREADABLE, InvalidSignature):
        raise InvalidArgumentError(
            "request: not a certificate signing request in PEM", field="request"
        ) from None
    if (
        not isinstance(key, ec.EllipticCurvePublicKey)
        or not isinstance(key.curve, ec.SECP256R1)
        or not signed
    ):
        raise InvalidArgumentError(
            "request: it needs a P-256 key and that key's signature", field="request"
        )
    return key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    life: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


_KEY_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)
