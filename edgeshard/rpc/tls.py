"""Mutual TLS by files, and the rule that nothing off loopback is plaintext."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

import grpc

from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.domain.identity import Principal, Role


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the authority that signs every process of a site, and this process's certificate and key.

    The certificate says who the process is: `edgeshard://SITE/ROLE/ID` among its alternative names, and the DNS name
    `ID.ROLE.SITE`, by which others verify it.
    """

    ca: Path
    cert: Path
    key: Path

    def check(self) -> None:
        """Raise InvalidArgumentError naming a file of the wrong kind, a key that belongs to another certificate, or a
        certificate that does not say who the process is; DeniedError for a key that others can read."""
        for path, field in ((self.ca, "tls-ca"), (self.cert, "tls-cert"), (self.key, "tls-key")):
            if b"-----BEGIN " not in _read(path, field):
                raise InvalidArgumentError(f"--{field} {path} is not a PEM file", field=field, reason="TLS_FILE")
        try:
            ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError as error:
            why = error.reason or "it holds no certificate"
            raise InvalidArgumentError(f"--tls-ca {self.ca}: {why}", field="tls-ca", reason="TLS_FILE") from None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except ssl.SSLError as error:
            why = error.reason or "they cannot be read"
            raise InvalidArgumentError(
                f"--tls-cert {self.cert} with --tls-key {self.key}: {why}", field="tls-cert", reason="TLS_FILE"
            ) from None
        if stat.S_IMODE(self.key.stat().st_mode) & 0o077 and not _kept_by_systemd(self.key):
            raise DeniedError(
                f"--tls-key {self.key} can be read by others: run chmod 600 {self.key}",
                field="tls-key",
                reason="KEY_MODE",
            )
        self.principal()

    def principal(self) -> Principal:
        """Who the process is. Raises InvalidArgumentError with reason NO_ROLE where the certificate does not say."""
        from edgeshard.identity.certificates import principal_of  # a tenth of a second, which plaintext need not wait

        try:
            return principal_of(_read(self.cert, "tls-cert"))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"--tls-cert {self.cert}: {error.message}", field="tls-cert", reason=error.reason
            ) from None

    def check_is(self, role: Role, id: str) -> None:
        """Raise InvalidArgumentError for the certificate of anybody else, whom nobody would take this process for."""
        principal = self.principal()
        if (principal.role, principal.id) != (role, id):
            raise InvalidArgumentError(
                f"--tls-cert {self.cert} is of {principal}, and this is {role} {id}",
                field="tls-cert",
                reason="NOT_MINE",
            )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        self.check()
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca, "tls-ca"),
            private_key=_read(self.key, "tls-key"),
            certificate_chain=_read(self.cert, "tls-cert"),
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that demand a certificate of the same authority from every caller."""
        self.check()
        pair = (_read(self.key, "tls-key"), _read(self.cert, "tls-cert"))
        return grpc.ssl_server_credentials([pair], root_certificates=_read(self.ca, "tls-ca"), require_client_auth=True)


def _kept_by_systemd(path: Path) -> bool:
    """Of the service's credentials, which only its user reads, by an access list that the mode does not tell."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return directory is not None and path.resolve().parent == Path(directory).resolve()


def tls_from_options(ca: Path | None, cert: Path | None, key: Path | None) -> TlsFiles | None:
    """All three options or none; raises InvalidArgumentError naming the one that is missing."""
    given = {"tls-ca": ca, "tls-cert": cert, "tls-key": key}
    if not any(given.values()):
        return None
    for name, path in given.items():
        if path is None:
            raise InvalidArgumentError(
                f"--{name} is missing: --tls-ca, --tls-cert and --tls-key go together", field=name
            )
    assert ca is not None and cert is not None and key is not None
    return TlsFiles(ca, cert, key)


def split_address(address: str, field: str = "address") -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`; raises InvalidArgumentError."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgumentError(f"{field} {address!r} is not HOST:PORT, such as 127.0.0.1:7600", field=field)
    return host, int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_secure(address: str, tls: TlsFiles | None, field: str) -> None:
    """Raise DeniedError for plaintext beyond loopback, whether listening or dialling."""
    host, _ = split_address(address, field)
    if tls is None and not is_loopback(host):
        raise DeniedError(
            f"{field} {address} is beyond loopback and has no TLS: give --tls-ca, --tls-cert and --tls-key",
            field=field,
            reason="TLS_REQUIRED",
        )


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"--{field} {path}: {error.strerror}", field=field, reason="TLS_FILE") from None
