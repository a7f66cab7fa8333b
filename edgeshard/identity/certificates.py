"""What a certificate says."""

from __future__ import annotations

from cryptography import x509

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import Principal, principal_from_uri


def principal_of(certificate_pem: bytes) -> Principal:
    """Who a certificate speaks of. Raises InvalidArgumentError with reason NO_ROLE where it says nothing of it."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        names = x509.SubjectAlternativeName([])
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise InvalidArgumentError(
            "the certificate does not say who it is of: its alternative names hold no URI edgeshard://SITE/ROLE/ID, or "
            "several; make another",
            field="certificate",
            reason="NO_ROLE",
        )
    return principal_from_uri(uris[0])
