"""The contents of certificates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError
from edgeshard.domain.identity import Principal, principal_from_uri

BACKDATED = timedelta(hours=1)
"""A certificate is valid since before it was made, for the clocks of nodes differ."""

UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)
"""Errors of the library for bytes that are not of the requested kind."""


@dataclass(frozen=True, slots=True)
class Validity:
    """From when to when a certificate of ours is meant to be used; it is valid for an hour before
    `begins`, too."""

    begins: datetime
    ends: datetime

    @property
    def renewal(self) -> datetime:
        """At two thirds of its life: one third is left to a coordinator that is away."""
        return self.ends - (self.ends - self.begins) / 3


def principal_of(certificate_pem: bytes) -> Principal:
    """The principal in a certificate. Raises InvalidArgumentError with reason NO_ROLE if it has
    none."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (*UNREADABLE, x509.ExtensionNotFound):
        names = x509.SubjectAlternativeName([])
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise InvalidArgumentError(
            "the certificate has no identity: its alternative names hold no URI "
            "edgeshard://SITE/ROLE/ID, or several; make another",
            field="certificate",
            reason="NO_ROLE",
        )
    return principal_from_uri(uris[0])


def serial_of(certificate_pem: bytes) -> str:
    """The serial number in hexadecimal."""
    return f"{x509.load_pem_x509_certificate(certificate_pem).serial_number:x}"


def validity_of(certificate_pem: bytes) -> Validity:
    """Raises ValueError if it is no certificate in PEM."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    # A foreign certificate need not be backdated.
    return Validity(begins + BACKDATED if begins + BACKDATED < ends else begins, ends)


def is_signed_by(chain_pem: bytes, authorities_pem: bytes) -> bool:
    """Whether the first certificate of a chain leads to one of these authorities. Raises ValueError
    for other bytes."""
    leaf, *between = x509.load_pem_x509_certificates(chain_pem)
    authorities = x509.load_pem_x509_certificates(authorities_pem)
    for _ in range(len(between) + 1):
        if leaf in authorities or any(_is_issuer(authority, leaf) for authority in authorities):
            return True
        above = [certificate for certificate in between if _is_issuer(certificate, leaf)]
        if not above:
            return False
        leaf = above[0]
        between.remove(leaf)
    return False


def _is_issuer(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (*UNREADABLE, InvalidSignature):
        return False
    return True


def is_of_key(certificate_pem: bytes, key_pem: bytes) -> bool:
    """Whether a certificate belongs to a private key. Raises ValueError if either is invalid."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    key = serialization.load_pem_private_key(key_pem, password=None)
    return certificate.public_key() == key.public_key()


def bundle_of(certificates_der: Iterable[bytes]) -> bytes:
    """Certificates of authorities as one PEM. Raises InvalidArgumentError for other bytes."""
    try:
        loaded = [x509.load_der_x509_certificate(der) for der in certificates_der]
    except UNREADABLE:
        raise InvalidArgumentError(
            "token: its fingerprint of the authority is damaged; copy the whole token again",
            field="token",
            reason="TOKEN",
        ) from None
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in loaded)


def ders_of(bundle_pem: bytes) -> tuple[bytes, ...]:
    """Each certificate of a PEM, in DER."""
    return tuple(
        certificate.public_bytes(serialization.Encoding.DER)
        for certificate in x509.load_pem_x509_certificates(bundle_pem)
    )


def check_valid_now(certificate_pem: bytes, whose: str, now: datetime) -> None:
    """Raise FailedPreconditionError (CLOCK) for a certificate that this machine's clock is not
    within.

    TLS would only report that the certificate cannot be verified. `whose` begins the description,
    such as `the certificate of HOST:PORT`. Raises ValueError if it is no certificate in PEM.
    """
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begins <= now <= ends:
        return
    raise FailedPreconditionError(
        f"this machine's clock shows {now:%Y-%m-%d %H:%M} UTC, but {whose} is valid from "
        f"{begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC: set the clock, such as with "
        "timedatectl set-ntp true, or renew the certificate if the clock is right",
        field="clock",
        reason="CLOCK",
    )


def check_clock(bundle_pem: bytes, now: datetime) -> None:
    """Raise FailedPreconditionError for a clock that is before the site's authorities were made, or
    after their end.

    TLS would only report that a certificate cannot be verified.
    """
    authorities = x509.load_pem_x509_certificates(bundle_pem)
    earliest = min(certificate.not_valid_before_utc for certificate in authorities)
    if now < earliest:
        raise FailedPreconditionError(
            f"this machine's clock shows {now:%Y-%m-%d %H:%M} UTC, before the site's authority was "
            "made "
            f"({earliest:%Y-%m-%d %H:%M} UTC): set the clock, such as with timedatectl set-ntp "
            "true",
            field="clock",
            reason="CLOCK",
        )
    if all(certificate.not_valid_after_utc < now for certificate in authorities):
        latest = max(certificate.not_valid_after_utc for certificate in authorities)
        raise FailedPreconditionError(
            f"the site's authority expired at {latest:%Y-%m-%d %H:%M} UTC, and this machine's "
            "clock shows "
            f"{now:%Y-%m-%d %H:%M} UTC: set the clock, or make another authority",
            field="clock",
            reason="CLOCK",
        )
